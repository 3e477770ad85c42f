"""Every hook is on docs/hooks.md with its signature, has a test here named after it, and works."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin import entries, hookspecs
from calfat_plugin.entries import KINDS, Entry
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from calfat_plugin.results import RoundRecord, RunInfo, RunResult
from calfat_plugin.runs.session import Listeners
from tests.cli.runner import ROOT

HOOKS = [name for name in vars(hookspecs) if name.startswith("calfat_")]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")


def section(hook: str) -> str:
    return PAGE.partition(f"### `{hook}`\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_and_tested(hook: str) -> None:
    specification = getattr(hookspecs, hook)
    signature = f"{hook}{inspect.signature(specification)}".replace("'", "")
    assert section(hook).startswith(f"\n```text\n{signature}\n```\n")
    assert callable(globals().get(f"test_{hook}"))
    assert specification.__doc__


def test_the_page_has_the_hooks_in_the_order_of_their_module_and_no_others() -> None:
    assert re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE) == HOOKS


def test_every_hook_is_used() -> None:
    assert set(HOOKS) == {kind.hook for kind in KINDS} | set(hookspecs.LIFE)


def test_examples_on_the_page_are_python() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        ast.parse(example)


# --- what can be offered ----------------------------------------------------------------------------------------------


def offered(hook: str, *given: Entry) -> Registry:
    """The built-ins and a plugin with one hook."""

    @hookimpl
    def offer(self: Any) -> tuple[Entry, ...]:
        return given

    return Registry.load(entry_points=False, plugins=[type("Plugin", (), {hook: offer})()])


def picked(registry: Registry, recipe: str) -> Experiment:
    return assemble(parse_document(recipe, "a.yaml"), registry)


def test_calfat_local_trainers() -> None:
    entry = entries.TrainerEntry("mine", build=dict)
    registry = offered("calfat_local_trainers", entry)
    assert picked(registry, "calfat: {trainer: mine}").trainer.entry is entry


def test_calfat_loss_modifiers() -> None:
    entry = entries.ModifierEntry("mine", build=dict, methods=("fedpgd",))
    registry = offered("calfat_loss_modifiers", entry)
    assert picked(registry, "calfat: {trainer: {name: fedpgd, loss: mine}}").modifier.entry is entry


def test_calfat_inner_attacks() -> None:
    entry = entries.InnerAttackEntry("mine", build=dict)
    registry = offered("calfat_inner_attacks", entry)
    assert picked(registry, "calfat: {threat: {inner: mine}}").threat.inner.entry is entry


def test_calfat_aggregators() -> None:
    entry = entries.AggregatorEntry("mine", build=dict)
    assert picked(offered("calfat_aggregators", entry), "calfat: {aggregator: mine}").aggregator.entry is entry


def test_calfat_evaluators() -> None:
    entry = entries.EvaluatorEntry("mine", build=dict)
    experiment = picked(
        offered("calfat_evaluators", entry), "calfat: {evaluators: [mine], monitor: {evaluators: [mine]}}"
    )
    assert [pick.entry for pick in (*experiment.evaluators, *experiment.monitor.evaluators)] == [entry, entry]


def test_calfat_datasets() -> None:
    entry = entries.DatasetEntry("mine", build=dict)
    registry = offered("calfat_datasets", entry)
    assert picked(registry, "data_args: {dataset: mine}\ncalfat:").dataset.entry is entry


def test_calfat_models() -> None:
    entry = entries.ModelEntry("mine", build=dict)
    registry = offered("calfat_models", entry)
    assert picked(registry, "model_args: {model: mine}\ncalfat:").model.entry is entry


def test_calfat_partitions() -> None:
    def halves(labels: Any, num_clients: int) -> list[Any]:
        return [labels[client::num_clients] for client in range(num_clients)]

    registry = offered("calfat_partitions", entries.PartitionEntry("mine", build=halves))
    experiment = picked(registry, "data_args: {partition_method: mine}\ntrain_args: {client_num_in_total: 2}\ncalfat:")
    assert [shard.tolist() for shard in experiment.split([0, 1, 2, 3, 4])] == [[0, 2, 4], [1, 3]]  # type: ignore


# --- a run's life -----------------------------------------------------------------------------------------------------

RUN = RunInfo("mine", Path("runs/mine/0"), {}, num_rounds=2, start_round=1)
RECORD = RoundRecord(1, (0, 1), {}, {0: 0.5, 1: 0.7}, {}, 0.0, {}, 1.0, 10, 20)
RESULT = RunResult((), 2, 3.0)


class Diary:
    """Writes down what it hears; takes only the arguments that it needs."""

    def __init__(self, options: Any = None) -> None:
        self.heard: list[Any] = []

    @hookimpl
    def calfat_run_started(self, run: RunInfo) -> None:
        self.heard.append(("started", run))

    @hookimpl
    def calfat_round_finished(self, record: RoundRecord, run: RunInfo) -> None:
        self.heard.append(("round", run, record))

    @hookimpl
    def calfat_run_finished(self, result: RunResult) -> None:
        self.heard.append(("finished", result))

    @hookimpl
    def calfat_run_stopped(self, error: BaseException) -> None:
        self.heard.append(("stopped", error))


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def listeners(diary: Diary) -> Listeners:
    """Those of a run with the diary installed as a plugin."""
    registry = Registry.load(entry_points=False, plugins=[diary])
    return Listeners.of(picked(registry, "calfat:"), warn=pytest.fail)


def test_calfat_run_started(diary: Diary, listeners: Listeners) -> None:
    listeners.run_started(RUN)
    assert diary.heard == [("started", RUN)]


def test_calfat_round_finished(diary: Diary, listeners: Listeners) -> None:
    listeners.round_finished(RUN, RECORD)
    assert diary.heard == [("round", RUN, RECORD)]


def test_calfat_run_finished(diary: Diary, listeners: Listeners) -> None:
    listeners.run_finished(RUN, RESULT)
    assert diary.heard == [("finished", RESULT)]


def test_calfat_run_stopped(diary: Diary, listeners: Listeners) -> None:
    error = KeyboardInterrupt()
    listeners.run_stopped(RUN, error)
    assert diary.heard == [("stopped", error)]


def test_calfat_attackers() -> None:
    entry = entries.AttackerEntry("mine", build=dict)
    registry = offered("calfat_attackers", entry)
    (group,) = picked(registry, "calfat: {clients: [{ids: 0, attacker: mine}]}").clients
    assert group.attacker is not None
    assert group.attacker.entry is entry


def test_calfat_loggers() -> None:
    """A logger hears of the runs whose recipe lists it, and of no others."""
    made: list[Diary] = []

    def build(options: Any) -> Diary:
        made.append(Diary(options))
        return made[-1]

    registry = offered("calfat_loggers", entries.LoggerEntry("mine", build=build))
    Listeners.of(picked(registry, "calfat:"), warn=pytest.fail).run_started(RUN)
    assert made == []
    Listeners.of(picked(registry, "calfat: {loggers: [mine]}"), warn=pytest.fail).run_started(RUN)
    assert made[0].heard == [("started", RUN)]
