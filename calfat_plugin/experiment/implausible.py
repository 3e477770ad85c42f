"""Warnings of values that are allowed, and that were probably not meant: budgets, numbers of attackers, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from calfat_plugin.aggregators.robust.base import TolerantOptions
from calfat_plugin.evaluators.base import BudgetOptions
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.recipe.document import EPS, KeyPath, dotted
from calfat_plugin.recipe.schema import ClientGroup

_FEW = 100  # images; with fewer, the best of many rounds is the one that was lucky with them


def implausible(experiment: Experiment) -> Iterator[str]:
    """What is more likely a mistake than meant in a recipe that is to be run, each with its place and what to do."""
    yield from _no_budget(experiment)
    yield from _unused_budgets(experiment)
    yield from _too_many_attackers(experiment)
    yield from _few_examples(experiment)
    yield from _fractions(experiment)


def too_large_batches(experiment: Experiment, groups: Mapping[int, ClientGroup], sizes: Mapping[int, int]) -> str:
    """A warning where no client has the examples of one batch; empty where one has.

    Args:
        groups: client id to its group, of those in one.
        sizes: client id to number of training examples.
    """
    if any(size >= experiment.trained_by(groups.get(client)).train.batch_size for client, size in sizes.items()):
        return ""
    return _at(
        experiment,
        ("train_args", "batch_size"),
        f"a batch is larger than every client's data (the largest client has {max(sizes.values())} examples), so each "
        "epoch of a client is one step on all that it has. Take a smaller batch, unless that is meant.",
    )


def _at(experiment: Experiment, path: KeyPath, text: str) -> str:
    return f"{experiment.document.place(path)}: {dotted(path)}: {text}"


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


def _too_many_attackers(experiment: Experiment) -> Iterator[str]:
    options, per_round = experiment.aggregator.options, experiment.clients_per_round
    attackers = min(per_round, sum(_size(experiment, group) for group in experiment.clients if group.attacker))
    if isinstance(options, TolerantOptions) and options.f < attackers:
        yield _at(
            experiment,
            (*experiment.aggregator.path, "f"),
            f"'{experiment.aggregator.name}' is to bear {options.f} of a round's {per_round} clients, and up to "
            f"{attackers} of them attack (calfat.clients), which may then decide the model. Write f: {attackers}, "
            "which may take more clients a round, or have fewer attackers.",
        )


def _size(experiment: Experiment, group: ClientGroup) -> int:
    """The clients of a group; fewer where it names some that a group above has drawn."""
    if group.ids is not None:
        return len(group.ids)
    options = group.options
    return options.smallest or options.largest or round((options.share or 0) * experiment.num_clients)


def _few_examples(experiment: Experiment) -> Iterator[str]:
    """Of the monitor, where the best of several rounds is chosen by what it measures."""
    monitor = experiment.monitor
    if experiment.num_rounds <= monitor.every or not monitor.evaluators:
        return
    asked: dict[KeyPath, int | None] = {("calfat", "monitor", "max_examples"): monitor.max_examples}
    asked |= {
        (*plugin.path, "max_examples"): getattr(plugin.options, "max_examples", None) for plugin in monitor.evaluators
    }
    for path, number in asked.items():
        if number is not None and number < _FEW:
            yield _at(
                experiment,
                path,
                f"the checkpoints best-natural and best-robust are chosen by these {number} images, of which each is "
                f"{100 / number:.3g} points of accuracy. Take {_FEW} or more, or do not use those checkpoints.",
            )


def _fractions(experiment: Experiment) -> Iterator[str]:
    """Of published numbers. A robust accuracy below 1 % is nothing special, but all of them are hardly so low."""
    percent = experiment.reported.percent
    largest = max(percent, key=lambda label: percent[label], default="")
    if largest and 0 < percent[largest] <= 1:
        value = percent[largest]
        text = f"got {value:g}, and percent are wanted; if this is a fraction, write {100 * value:g}."
        yield _at(experiment, ("calfat", "reported", largest), text)
