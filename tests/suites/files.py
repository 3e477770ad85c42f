"""Suite files for tests, and a stand-in for ``calfat run`` that needs no training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.experiment import assemble
from calfat_plugin.registry import Registry
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites import load_suite, runner
from calfat_plugin.suites.cells import SuiteRun
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import Recorded, add_to_record
from calfat_plugin.suites.summary import SuiteSummary, summarise

BASE = """\
data_args: {dataset: digits}
model_args: {model: cnn_small}
train_args: {comm_round: 2, batch_size: 64, learning_rate: 0.05}
calfat:
  trainer: {name: calfat}
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural, pgd20]
  runtime: {threads: 1}
"""

SUITE = """\
title: Two methods
base: base.yaml
set: {train_args.comm_round: 1}
seeds: [0, 1]
metrics: {natural: natural, pgd20: PGD-20}
axes:
  method:
    CalFAT: {}
    FedPGD: {calfat.trainer: fedpgd}
"""

CHOOSING = (
    SUITE.replace("train_args.comm_round: 1", "train_args.comm_round: 1, data_args.validation_share: 0.2")
    + """\
choose:
  metric: pgd20
  seeds: [100, 101]
  grid: {train_args.learning_rate: [0.02, 0.05, 0.1]}
"""
)


def begun(run: SuiteRun) -> RunDirectory:
    """The directory of a run, made as ``calfat run`` does."""
    document = run.experiment.document.with_value(("common_args", "random_seed"), run.seed, "--seed")
    return RunDirectory.create(assemble(document, run.experiment.registry), run.directory)


FAKE_RUN = "fake_run"  # a module of this folder, which :func:`use_fake_run` lets processes import


def use_fake_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ``calfat run``, in this process and those that it starts."""
    here = Path(__file__).parent
    monkeypatch.setattr(runner, "PROGRAM", FAKE_RUN)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parents[1]}")


def write_suite(folder: Path, text: str = SUITE, name: str = "tiny", base: str = BASE) -> str:
    """Write base and suite to ``folder``; returns the suite's file name, relative to it."""
    (folder / "base.yaml").write_text(base, encoding="utf-8")
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return f"{name}.yaml"


def recorded(folder: Path, text: str, registry: Registry, of: Callable[[SuiteRun], Recorded | None]) -> SuiteSummary:
    """A suite in the working directory ``folder`` whose runs are nowhere but in its record; None: not there either."""
    suite = load_suite(write_suite(folder, text), record=Path("runs.csv"))
    rows = {run.key: row for run in make_plan(suite, registry).runs if (row := of(run)) is not None}
    add_to_record(Path("runs.csv"), rows)
    return summarise(make_plan(suite, registry))


def note_in(found: list[Any], monkeypatch: pytest.MonkeyPatch, place: object, name: str) -> None:
    """Let whatever makes something note each thing that it makes."""
    make = getattr(place, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        found.append(make(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(place, name, noting)
