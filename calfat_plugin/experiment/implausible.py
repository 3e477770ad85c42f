"""Warnings of values that are allowed, and that were probably not meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from calfat_plugin.recipe.document import EPS, Document, KeyPath, dotted
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.recipe.schema import ClientGroup
from calfat_plugin.recipe.training import AWPOptions
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.base import start_noise_option


def implausible(experiment: Experiment, written: Document, trains: bool) -> Iterator[str]:
    """What has no effect, or not the one that was probably meant, each with its place and what to do.

    ``written`` is the recipe before a preset filled it in: only for what somebody wrote does anybody want a warning.
    """
    yield from _bad_steps(experiment, trains)
    if not trains:  # of a finished model the other keys are nobody's business any more
        return
    yield from _unused_host_keys(experiment, written)
    yield from _unused_attack(experiment, written)
    yield from _idle_options(experiment, written)
    yield from _unused_additions(experiment, written)
    yield from _unused_reported(experiment, written)
    yield from _too_late(experiment)
    yield from _of_plugins(experiment)
    yield from _no_budget(experiment)


# --- of the data, when they have been read ----------------------------------------------------------------------------


def too_large_batches(experiment: Experiment, groups: Mapping[int, ClientGroup], sizes: Mapping[int, int]) -> str:
    """A warning where no client has the examples of one batch; empty where one has. ``sizes``: of training sets."""
    for client, size in sizes.items():
        if size >= experiment.trained_by(groups.get(client)).train.batch_size:
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


# --- keys without effect ----------------------------------------------------------------------------------------------


def _at(experiment: Experiment, path: KeyPath, text: str) -> str:
    return f"{experiment.document.place(path)}: {dotted(path)}: {text}"


def _useless(written: Document, key: KeyPath, chosen_at: KeyPath, why: str) -> Iterator[str]:
    """A warning that ``key`` has no effect, because of what was chosen at ``chosen_at``, if the recipe has the key.

    None where the file has the key and an override (--set, a suite) replaces what the file had chosen.
    """
    in_file = f"{written.file}:"
    is_replaced = written.place(key).startswith(in_file) and not written.place(chosen_at).startswith(in_file)
    if written.has(key) and not is_replaced:
        yield f"{written.place(key)}: {dotted(key)}: this key has no effect here: {why}"


def _unused_host_keys(experiment: Experiment, written: Document) -> Iterator[str]:
    """Keys of FedML in whose place others count here."""
    optimizer, aggregator = experiment.train.federated_optimizer, experiment.aggregator.name
    if optimizer.lower() not in ("fedavg", aggregator.lower()):
        text = f"'{optimizer}' has no effect; calfat.aggregator selects the algorithm, here '{aggregator}'."
        yield _at(experiment, ("train_args", "federated_optimizer"), text)
    partition = experiment.partition.entry
    if not partition.uses_alpha:
        why = f"the partition '{partition.name}' does not use it."
        yield from _useless(written, ("data_args", "partition_alpha"), ("data_args", "partition_method"), why)


def _unused_attack(experiment: Experiment, written: Document) -> Iterator[str]:
    """The attack of training where no method attacks; its steps, or its start, where it has some of its own."""
    for group in experiment.clients:
        method = experiment.trained_by(group)
        if "threat" in group.changed and not method.trains_attacked:
            why = f"the local trainer '{method.trainer.name}' does not attack"
            yield _at(experiment, (*group.path, "threat"), f"this key has no effect here: {why}.")
    threat = experiment.threat
    attacks = [trained.threat for trained in experiment.everyone if trained.trains_attacked]
    inner: KeyPath = ("calfat", "threat", "inner")
    # A recipe as run has every key, so a value is taken for one that somebody wrote where it is not the usual one.
    has_steps = threat.own_steps is not None and threat.steps not in (threat.own_steps, ThreatModel.steps)
    if threat.inner.name != "pgd" and threat.inner not in [attack.inner for attack in attacks]:
        yield from _useless(written, inner, inner, f"the local trainer '{experiment.trainer.name}' does not attack.")
    elif has_steps and all(attack.own_steps is not None for attack in attacks):
        why = f"the inner attack '{threat.inner.name}' takes {threat.own_steps} of its own."
        yield from _useless(written, ("calfat", "threat", "steps"), inner, why)
    noise: KeyPath = (*experiment.trainer.path, "start_noise")
    usual = start_noise_option().default
    has_noise = written.has(noise) and getattr(experiment.trainer.options, "start_noise", usual) != usual
    if not has_noise or not attacks:
        return
    for attack in attacks:
        build = attack.inner.entry.load()
        starts_itself = (
            isinstance(build, type) and issubclass(build, InnerAttack) and build.start is not InnerAttack.start
        )
        if not starts_itself:
            return
    why = f"the inner attack '{threat.inner.name}' has a start of its own."
    yield from _useless(written, noise, inner, why)


def _idle_options(experiment: Experiment, written: Document) -> Iterator[str]:
    """Options of plugins that others make useless, as their entries say."""
    for plugin in experiment.picked:
        options, config = plugin.options, plugin.entry.config
        required = {info.name: getattr(options, info.name) for info in describe_options(config) if info.required}
        with experiment.attribute_errors_to(plugin):
            idle = returned.mapping(plugin.entry.idle(options), "idle returned")
            usual = config(**required)
            asked_for = [name for name in idle if getattr(options, name) != getattr(usual, name)]
        for name in asked_for:
            yield from _useless(written, (*plugin.path, name), plugin.path, idle[name])


def _unused_additions(experiment: Experiment, written: Document) -> Iterator[str]:
    """What is added to a method or to the threat, and comes too late or has nothing to act on."""
    awp, rounds, by_class = experiment.additions.awp, experiment.num_rounds, experiment.threat.by_class
    at: KeyPath = ("calfat", "threat", "by_class")
    if by_class is not None and not any(trained.trains_attacked for trained in experiment.everyone):
        yield from _useless(written, at, at, f"the local trainer '{experiment.trainer.name}' does not attack.")
    elif by_class is not None and by_class.warmup and rounds == 1:
        yield _at(experiment, at, "its warm-up begins with eps 0, and there is one round: no attack. Set warmup: 0.")
    if awp is not None and awp.warmup >= rounds:
        at = (*experiment.trainer.path, "awp")
        yield from _useless(written, at, at, f"its warm-up of {awp.warmup} rounds leaves none of the {rounds} rounds.")
    for trained in experiment.everyone:
        if trained.additions.clean_rounds and not trained.trains_attacked:
            at = (*trained.trainer.path, "clean_rounds")
            why = f"the local trainer '{trained.trainer.name}' does not attack in any round."
            yield from _useless(written, at, at, why)


def _unused_reported(experiment: Experiment, written: Document) -> Iterator[str]:
    """Published numbers under a label that is nearly one of an evaluator."""
    labels = [plugin.label for plugin in experiment.evaluators]
    for label in experiment.reported.percent:
        hint = did_you_mean(label, labels)
        if label not in labels and hint:
            at = ("calfat", "reported", label)
            yield from _useless(written, at, ("calfat", "evaluators"), f"no evaluator is called so.{hint}")


# --- another effect than was probably meant ---------------------------------------------------------------------------


def _too_late(experiment: Experiment) -> Iterator[str]:
    """Methods and aggregators that begin to differ after the last round, and a patience that cannot end before it."""
    plugins: list[tuple[KeyPath, Plugin[Any]]] = [
        (experiment.trainer.path, experiment.trainer),
        (experiment.aggregator.path, experiment.aggregator),
    ]
    for group in experiment.clients:
        if "trainer" in group.changed:
            plugins.append((group.path, group.recipe.trainer))
    last = experiment.num_rounds
    for path, plugin in plugins:
        first = getattr(plugin.options, "start_round", 1)
        if isinstance(plugin.options, AWPOptions):
            first = plugin.options.warmup + 1
        if isinstance(first, int) and first > last:  # an option of a plugin may have that name, too
            text = f"'{plugin.name}' begins to differ in round {first}, and round {last} is the last."
            yield _at(experiment, path, text)
    patience = experiment.train.patience
    if patience is not None:
        first_end = (patience + 1) * experiment.monitor.every  # the first evaluation is the best so far
        if first_end >= last:
            text = f"no effect: training could stop after round {first_end} at the earliest, and it has {last} rounds."
            yield _at(experiment, ("train_args", "patience"), text)


def _of_plugins(experiment: Experiment) -> Iterator[str]:
    """What plugins warn of themselves, each text once."""
    plugins: list[tuple[Plugin[Any], KeyPath, Experiment]] = []
    plugins += [(plugin, plugin.path, experiment) for plugin in experiment.picked]
    for group in experiment.clients:
        trained = experiment.trained_by(group)
        plugins += [(plugin, group.path, trained) for plugin in (trained.trainer, trained.modifier)]
        plugins.append((trained.threat.inner, group.path, trained))
    path_of: dict[str, KeyPath] = {}  # of a warning
    for plugin, path, recipe in plugins:
        if recipe.trains_attacked or not isinstance(plugin.entry, InnerAttackEntry):
            with experiment.attribute_errors_to(plugin):
                text = returned.instance(plugin.entry.warn(plugin.options, recipe), str, "warn returned")
            if text:
                path_of.setdefault(f"'{plugin.name}' {text}", path)
    for text, path in path_of.items():
        yield _at(experiment, path, text)


def _bad_steps(experiment: Experiment, trains: bool) -> Iterator[str]:
    """A warning for each way in which steps do not fit eps, with all whom it is about: training and evaluators."""
    path_of: dict[str, KeyPath] = {}  # of a problem
    whose: dict[str, list[str]] = {}
    plugins = list(experiment.evaluators)
    if trains:
        plugins += experiment.monitor.evaluators
        for problem, training in experiment.training_step_problems.items():
            path_of[problem] = training[0][0]
            whose[problem] = [name for _, name in training]
    for plugin in plugins:
        if not isinstance(plugin.options, PGDOptions):
            continue
        problem = plugin.options.threat(experiment.threat).step_problem()
        if problem:
            path_of.setdefault(problem, plugin.path)
            whose.setdefault(problem, []).append(plugin.label)
    for problem, path in path_of.items():
        names = dict.fromkeys(whose[problem])
        yield _at(experiment, path, f"{', '.join(names)}: {problem}")


def _no_budget(experiment: Experiment) -> Iterator[str]:
    """Attacks that may change nothing: by the key that says so, all whom it is about."""
    labels_of: dict[KeyPath, list[str]] = {}  # of a key with an eps of 0: who attacks with it
    trained = [(EPS, experiment)]
    trained += [((*group.path, *EPS[1:]), experiment.trained_by(group)) for group in experiment.clients]
    for path, recipe in trained:
        if recipe.trains_attacked and not recipe.threat.eps:
            key = EPS
            if experiment.document.has(path):
                key = path
            labels_of[key] = ["training"]
    for plugin in (*experiment.evaluators, *experiment.monitor.evaluators):
        if not isinstance(plugin.options, BudgetOptions):
            continue
        key, eps = EPS, experiment.threat.eps
        if plugin.options.eps is not None:
            key, eps = (*plugin.path, "eps"), plugin.options.eps
        if not eps:
            labels_of.setdefault(key, []).append(plugin.label)
    for path, labels in labels_of.items():
        text = (
            f"{', '.join(dict.fromkeys(labels))}: with eps 0 no image changes, so adversarial training is natural "
            "training, and an attack measures natural accuracy. Write the eps that is meant, such as 8/255, or take a "
            "trainer and evaluators without attack: standard, natural."
        )
        yield _at(experiment, path, text)
