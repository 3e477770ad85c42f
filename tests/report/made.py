"""Run directories without a run: every file written by the code that writes it in a run, numbers chosen by us."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calfat_plugin.disk import write_json
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.outliers import not_run_alarms
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.report import charts
from calfat_plugin.results import EvaluationResult, RoundRecord, RunResult
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.writer import RunWriter
from tests.recipes import assembled
from tests.suites.fake_run import written

RECIPE = """\
data_args: {dataset: digits, partition_alpha: 0.1}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 4, batch_size: 64}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: eps/2, steps: 2}
  evaluators: [natural, fgsm, pgd20]
  monitor: {evaluators: [natural, pgd20]}
"""
CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTS = ((10, 0, 0, 4, 1, 7, 0, 0, 3, 0), (0, 8, 2, 0, 0, 0, 5, 6, 0, 9))

FINAL = {"natural": 0.6431, "fgsm": 0.3501, "pgd20": 0.3123}
REPORTED = "calfat.reported={source: 'arXiv:2205.14926, Table 1', natural: 64.69, pgd20: 31.12}"
PROFILE = {
    "method": "calfat",
    "parts": [
        {
            "name": f"round {number}",
            "seconds": 2.0,
            "spans": [
                {"path": ["training", "attack"], "seconds": 1.0, "calls": 10},
                {"path": ["training"], "seconds": 1.5, "calls": 2},
                {"path": [], "seconds": 1.5, "calls": 2},
            ],
        }
        for number in range(1, 5)
    ],
}
ATTACKS = {
    "run": "runs/made/0-x",
    "checkpoint": "runs/made/0-x/checkpoints/best-robust.safetensors",
    "round": 3,
    "selected_on": "test split, pgd20 (test-selected)",
    "evaluations": [
        written(label, value, accuracy_release=value + 0.01, num_examples=359, seconds=2.0)
        | {"settings": {"norm": "linf", "eps": eps} if eps else {}}
        for label, eps, value in [("natural", "", 0.8), ("cw20", "0.05", 0.61), ("cw20", "0.1", 0.4321)]
    ],
    "alarms": [{"code": "flattened-logits", "text": "CW leaves fewer.", "labels": ["cw20"]}],
}


def experiment(*overrides: str, name: str = "made.yaml", recipe: str = RECIPE) -> Experiment:
    """The recipe above with ``--set`` values."""
    return assembled(recipe, *overrides, name=name)


def evaluation(label: str, accuracy: float, *, num_classes: int = 10) -> EvaluationResult:
    """A result whose classes lie evenly around its accuracy."""
    spread = [accuracy + 0.02 * (index - (num_classes - 1) / 2) for index in range(num_classes)]
    per_class = tuple(min(1.0, max(0.0, value)) for value in spread)
    settings = {} if label == "natural" else {"norm": "linf", "eps": "1/10", "steps": 20}
    return EvaluationResult(
        label=label,
        num_examples=359,
        accuracy=accuracy,
        accuracy_release=accuracy + 0.01,
        per_class=per_class,
        per_class_release=per_class,
        settings=settings,
        implementation="calfat-plugin 0.1.0",
        seconds=1.5,
    )


def _evaluations(accuracies: Mapping[str, float | None]) -> dict[str, EvaluationResult]:
    return {
        label: idle(label) if accuracy is None else evaluation(label, accuracy)
        for label, accuracy in accuracies.items()
    }


def idle(label: str) -> EvaluationResult:
    """The result of an attack that did not run."""
    why = "its loss needs 4 classes, and there are 3"
    settings = {"norm": "linf", "eps": "1/10"}
    return EvaluationResult.without_number(label, why, settings=settings, implementation="pyautoattack 0.3.0")


def record(
    round: int, monitored: Mapping[str, float | None], *, clients: int = 2, heterogeneity: float = 0.5
) -> RoundRecord:
    """A finished round; each client's loss is 1 / round plus its number. Without an accuracy an attack did not run."""
    evaluations = _evaluations(monitored)
    return RoundRecord(
        round=round,
        clients=tuple(range(clients)),
        refused={},
        losses={client: 1 / round + client for client in range(clients)},
        update_norms={client: 0.1 * (client + 1) for client in range(clients)},
        heterogeneity=heterogeneity / round,
        evaluations=evaluations,
        alarms=not_run_alarms(evaluations),
        seconds=2.0,
        bytes_down=1000,
        bytes_up=1100,
        peak_memory_mb=812.5,
    )


def made_run(
    path: Path,
    *overrides: str,
    final: Mapping[str, float | None] | None = None,
    rounds: Sequence[Mapping[str, float | None]] = (),
    name: str = "made.yaml",
    counts: Sequence[Sequence[int]] = COUNTS,
    classes: Sequence[str] = CLASSES,
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """Write a run directory.

    Args:
        path: where to.
        overrides: ``--set`` values.
        final: label to final accuracy, None for an attack that did not run; None: not finished.
        rounds: label to monitored accuracy, likewise, a mapping a round; empty: four rounds that get better.
        name: the recipe's file name.
        counts: training examples, a row a client.
        classes: names of the classes.
        metrics: further columns, the same in every round.
    """
    run = experiment(*overrides, name=name)
    directory = RunDirectory.create(run, path)
    values = rounds or [{"natural": 0.2 * number, "pgd20": 0.1 * number} for number in range(1, 5)]
    with RunWriter(directory, run) as writer:
        for number, monitored in enumerate(values, start=1):
            snapshot = Snapshot(round=number, global_state={})
            rate = run.train.learning_rate_of(number)
            finished = dataclasses.replace(record(number, monitored, clients=len(counts)), learning_rate=rate)
            finished = dataclasses.replace(finished, metrics=dict(metrics))
            writer.round_finished(finished.with_worst_clients(counts), snapshot)
    write_json(directory.partition, {"class_names": list(classes), "class_counts": [list(c) for c in counts]})
    write_json(
        directory.environment,
        {
            "command": ["calfat", "run", name, "--set", "tracking_args.wandb_key=hunter2"],
            "python": "3.11.7",
            "platform": "Linux",
            "cpu_count": 2,
            "threads": 1,
            "device": "cpu",
            "gpu": None,
            "versions": {"calfat-plugin": "0.1.0", "torch": "2.13.0", "mpi4py": None},
            "plugins": ["calfat-plugin 0.1.0 (built-in)"],
            "plugins_not_loaded": [],
            "commit": "0123abc",
        },
    )
    if final is not None:
        evaluations = tuple(one.with_worst_clients(counts) for one in _evaluations(final).values())
        writer.run_finished(RunResult(evaluations, len(values), 12.5))
    return path


def full_run(path: Path, *overrides: str) -> Path:
    """A run with everything that a page can show."""
    made_run(path, REPORTED, *overrides, final=FINAL)
    alarm = {"code": "aa-above-pgd", "text": "AutoAttack <above> PGD.", "labels": []}
    change_json(path / "results.json", alarms=[alarm])
    (path / "attacks").mkdir()
    (path / "attacks" / "just-begun.json").touch()
    again = {**ATTACKS, "evaluations": ATTACKS["evaluations"][:2], "alarms": []}
    extras = {"profile.json": PROFILE}
    extras["attacks/best-robust.json"] = ATTACKS
    extras["attacks/best-robust-2.json"] = again
    for name, content in extras.items():
        (path / name).write_text("{}")
        change_json(path / name, **content)
    return path


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of this process list figures that nobody has drawn, which would take most of their time."""
    monkeypatch.setattr(charts, "render", lambda chart, _: charts.Drawing(chart.title, chart.caption, "data:,"))


def change_json(path: Path, **values: object) -> None:
    """Set some keys of a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def close(a: float, b: float) -> bool:
    """Equal up to rounding."""
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def drawn(chart: charts.Chart | None) -> tuple[Axes, dict[str, list[tuple[float, float]]]]:
    """A chart of lines, drawn: its axes, and each line's points."""
    assert chart is not None
    figure = Figure()
    chart.draw(figure)
    (axes,) = figure.axes
    return axes, {str(line.get_label()): [*zip(*line.get_data(), strict=True)] for line in axes.lines}
