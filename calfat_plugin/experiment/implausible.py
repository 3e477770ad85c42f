"""Warnings of values that are allowed, and that were probably not meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from calfat_plugin import returned
from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.findings import dataset_findings, image_findings, some_of
from calfat_plugin.entries import InnerAttackEntry
from calfat_plugin.errors import did_you_mean
from calfat_plugin.evaluators.base import BudgetOptions
from calfat_plugin.evaluators.gradient import PGDOptions
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.interfaces import InnerAttack
from calfat_plugin.options import describe_options
from calfat_plugin.recipe.additions import AWPOptions
from calfat_plugin.recipe.document import EPS, Document, KeyPath, dotted
from calfat_plugin.recipe.schema import ClientGroup
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.base import start_noise_option


def implausible(experiment: Experiment, written: Document, trains: bool) -> Iterator[str]:
    """What has no effect, or not the one that was probably meant, each with its place and what to do."""
    yield from _bad_steps(experiment, trains)
    if trains:  # of a finished model these keys are nobody's business any more
        yield from _other_optimizer(experiment)
        yield from _no_effect(experiment, written)
        yield from _too_late(experiment)
        yield from _never_stops(experiment)
        yield from _of_plugins(experiment)
        yield from _no_budget(experiment)
        yield from _unused_budgets(experiment)


def too_large_batches(experiment: Experiment, groups: Mapping[int, ClientGroup], sizes: Mapping[int, int]) -> str:
    """A warning where no client has the examples of one batch; empty where one has. ``sizes``: of training sets."""
    if any(size >= experiment.trained_by(groups.get(client)).train.batch_size for client, size in sizes.items()):
        return ""
    return _at(
        experiment,
        ("train_args", "batch_size"),
        f"a batch is larger than every client's data (the largest client has {max(sizes.values())} examples), so each "
        "epoch of a client is one step on all that it has. Take a smaller batch, unless that is meant.",
    )


def classes_not_trained(experiment: Experiment, names: Sequence[str], class_counts: Sequence[Sequence[int]]) -> str:
    """A warning where no client has an example of some class; empty where all have one. ``class_counts``: by client."""
    missing = [name for name, *counts in zip(names, *class_counts, strict=True) if not any(counts)]
    if not missing:
        return ""
    return _at(
        experiment,
        ("data_args", "dataset"),
        f"no client has a training example of {len(missing)} of {len(names)} classes ({some_of(missing)}), so no model "
        "learns what they are. Number the labels from 0 without gaps, or add examples, unless that is meant.",
    )


def implausible_data(experiment: Experiment, dataset: Dataset, rank: int | None = None) -> Iterator[str]:
    """What looks wrong in the data set that a run, or a finished model, is measured on; ``rank``: of a party."""
    for text in dataset_findings(dataset, experiment.splits_of(rank)):
        yield _at(experiment, ("data_args", "dataset"), text)


def implausible_images(experiment: Experiment, data: ImageData) -> Iterator[str]:
    """What looks wrong in the images that a client trains on."""
    for text in image_findings(data, "training images"):
        yield _at(experiment, ("data_args", "dataset"), text)


def _at(experiment: Experiment, path: KeyPath, text: str) -> str:
    return f"{experiment.document.place(path)}: {dotted(path)}: {text}"


def _other_optimizer(experiment: Experiment) -> Iterator[str]:
    asked, chosen = experiment.train.federated_optimizer, experiment.aggregator.name
    if asked.lower() not in ("fedavg", chosen.lower()):
        text = f"'{asked}' has no effect; calfat.aggregator selects the algorithm, here '{chosen}'."
        yield _at(experiment, ("train_args", "federated_optimizer"), text)


def _no_effect(experiment: Experiment, written: Document) -> Iterator[str]:
    """Keys of the threat, the partition, the trainer and a paper's numbers that others make useless.

    None of those that the file has and an override (--set, a suite) makes so by replacing what the file had chosen.
    """

    def useless(key: KeyPath, chosen_at: KeyPath, why: str) -> Iterator[str]:
        in_file = f"{written.file}:"
        replaced = written.place(key).startswith(in_file) and not written.place(chosen_at).startswith(in_file)
        if written.has(key) and not replaced:
            yield f"{written.place(key)}: {dotted(key)}: this key has no effect here: {why}"

    partition = experiment.partition.entry
    if not partition.uses_alpha:
        why = f"the partition '{partition.name}' does not use it."
        yield from useless(("data_args", "partition_alpha"), ("data_args", "partition_method"), why)
    threat, trained = experiment.threat, (experiment, *map(experiment.trained_by, experiment.clients))
    attacks = [each.threat for each in trained if each.trains_attacked]  # a group may use what the others do not
    at: KeyPath
    inner: KeyPath = ("calfat", "threat", "inner")
    # A recipe as run has every key, so who asked for a value is known only where it is not the usual one.
    asked_steps = threat.own_steps is not None and threat.steps not in (threat.own_steps, ThreatModel.steps)
    if threat.inner.name != "pgd" and threat.inner not in [each.inner for each in attacks]:
        yield from useless(inner, inner, f"the local trainer '{experiment.trainer.name}' does not attack.")
    elif asked_steps and all(each.own_steps is not None for each in attacks):
        why = f"the inner attack '{threat.inner.name}' takes {threat.own_steps} of its own."
        yield from useless(("calfat", "threat", "steps"), inner, why)
    noise: KeyPath = (*experiment.trainer.path, "start_noise")
    usual = start_noise_option().default
    asked = written.has(noise) and getattr(experiment.trainer.options, "start_noise", usual) != usual
    if asked and attacks and all(_starts_itself(each.inner.entry) for each in attacks):
        yield from useless(noise, inner, f"the inner attack '{threat.inner.name}' has a start of its own.")
    for plugin in experiment.picked:
        options, config = plugin.options, plugin.entry.config
        needed = {info.name: getattr(options, info.name) for info in describe_options(config) if info.required}
        with experiment.attribute_errors_to(plugin):
            idle = returned.mapping(plugin.entry.idle(options), "idle returned")
            usual = config(**needed)
            asked_for = [name for name in idle if getattr(options, name) != getattr(usual, name)]
        for name in asked_for:
            yield from useless((*plugin.path, name), plugin.path, idle[name])
    awp, rounds, by_class = experiment.additions.awp, experiment.num_rounds, threat.by_class
    at = ("calfat", "threat", "by_class")
    if by_class is not None and not attacks:
        yield from useless(at, at, f"the local trainer '{experiment.trainer.name}' does not attack.")
    elif by_class is not None and by_class.warmup and rounds == 1:
        yield _at(experiment, at, "its warm-up begins with eps 0, and there is one round: no attack. Set warmup: 0.")
    if awp is not None and awp.warmup >= rounds:
        at = (*experiment.trainer.path, "awp")
        yield from useless(at, at, f"its warm-up of {awp.warmup} rounds leaves none of the {rounds} rounds.")
    for recipe in trained:
        at = (*recipe.trainer.path, "clean_rounds")
        if recipe.additions.clean_rounds and not recipe.trains_attacked:
            yield from useless(at, at, f"the local trainer '{recipe.trainer.name}' does not attack in any round.")
    labels = [pick.label for pick in experiment.evaluators]
    for label in experiment.reported.percent:
        if label not in labels and (hint := did_you_mean(label, labels)):
            at = ("calfat", "reported", label)
            yield from useless(at, ("calfat", "evaluators"), f"no evaluator is called so.{hint}")


def _starts_itself(entry: InnerAttackEntry) -> bool:
    attack = entry.load()
    return isinstance(attack, type) and issubclass(attack, InnerAttack) and attack.start is not InnerAttack.start


def _too_late(experiment: Experiment) -> Iterator[str]:
    """A warning for each method and aggregator that is another one until a round that the run does not reach."""
    rounds, own = experiment.num_rounds, [group for group in experiment.clients if "trainer" in group.changed]
    picked = [(plugin.path, plugin) for plugin in (experiment.trainer, experiment.aggregator)]
    for path, plugin in (*picked, *((group.path, group.recipe.trainer) for group in own)):
        options = plugin.options
        first = options.warmup + 1 if isinstance(options, AWPOptions) else getattr(options, "start_round", 1)
        if isinstance(first, int) and first > rounds:  # an option of a plugin may have that name, too
            text = f"'{plugin.name}' begins to differ in round {first}, and round {rounds} is the last."
            yield _at(experiment, path, text)


def _never_stops(experiment: Experiment) -> Iterator[str]:
    """A warning where the rounds are over before the patience can be."""
    patience, every, rounds = experiment.train.patience, experiment.monitor.every, experiment.num_rounds
    if patience is None:
        return
    first = (patience + 1) * every  # the first evaluation is the best so far
    if first >= rounds:
        text = f"no effect: training could stop after round {first} at the earliest, and it has {rounds} rounds."
        yield _at(experiment, ("train_args", "patience"), text)


def _of_plugins(experiment: Experiment) -> Iterator[str]:
    """What plugins warn of themselves, each text once."""
    of_run = [(plugin, plugin.path, experiment) for plugin in experiment.picked]
    of_groups = [
        (plugin, group.path, trained)
        for group in experiment.clients
        for trained in [experiment.trained_by(group)]
        for plugin in (trained.trainer, trained.modifier, trained.threat.inner)
    ]
    found: dict[str, KeyPath] = {}
    for plugin, path, recipe in (*of_run, *of_groups):
        if recipe.trains_attacked or not isinstance(plugin.entry, InnerAttackEntry):
            with experiment.attribute_errors_to(plugin):
                text = returned.instance(plugin.entry.warn(plugin.options, recipe), str, "warn returned")
            if text:
                found.setdefault(f"'{plugin.name}' {text}", path)
    for text, path in found.items():
        yield _at(experiment, path, text)


def _bad_steps(experiment: Experiment, trains: bool) -> Iterator[str]:
    """A warning for each way in which steps do not fit eps, with all whom it is about: training and evaluators."""
    found: dict[str, tuple[KeyPath, list[str]]] = {}
    for problem, training in experiment.training_step_problems.items() if trains else ():
        found[problem] = training[0][0], [whose for _, whose in training]
    for plugin in (*experiment.evaluators, *(experiment.monitor.evaluators if trains else ())):
        own = plugin.options
        problem = own.threat(experiment.threat).step_problem() if isinstance(own, PGDOptions) else ""
        if problem:
            names = found.setdefault(problem, (plugin.path, []))[1]
            names += [plugin.label] if plugin.label not in names else []
    for problem, (path, names) in found.items():
        yield _at(experiment, path, f"{', '.join(names)}: {problem}")


def _no_budget(experiment: Experiment) -> Iterator[str]:
    """Attacks that may change nothing: by the key that says so, all whom it is about."""
    found: dict[KeyPath, list[str]] = {}
    trained = [(EPS, experiment)]
    trained += [((*group.path, *EPS[1:]), experiment.trained_by(group)) for group in experiment.clients]
    for path, recipe in trained:
        if recipe.trains_attacked and not recipe.threat.eps:
            found[path if experiment.document.has(path) else EPS] = ["training"]
    for plugin in (*experiment.evaluators, *experiment.monitor.evaluators):
        if isinstance(plugin.options, BudgetOptions):
            own = plugin.options.eps
            if not (experiment.threat.eps if own is None else own):
                found.setdefault(EPS if own is None else (*plugin.path, "eps"), []).append(plugin.label)
    for path, names in found.items():
        text = (
            f"{', '.join(dict.fromkeys(names))}: with eps 0 no image changes, so adversarial training is natural "
            "training, and an attack measures natural accuracy. Write the eps that is meant, such as 8/255, or take a "
            "trainer and evaluators without attack: standard, natural."
        )
        yield _at(experiment, path, text)


def _unused_budgets(experiment: Experiment) -> Iterator[str]:
    for group in experiment.clients:
        trained = experiment.trained_by(group)
        if "threat" in group.changed and not trained.trains_attacked:
            why = f"the local trainer '{trained.trainer.name}' does not attack"
            yield _at(experiment, (*group.path, "threat"), f"this key has no effect here: {why}.")
