"""What the JSON files of a run and of a suite hold, as types. A damaged file is refused where it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from calfat_plugin.entries import Citation
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.results import RELEASE, RESULTS_FORMAT, EarlyStop, EvaluationResult, evaluation_as_json, evaluator_of
from calfat_plugin.typed_json import (
    Count,
    Eps,
    Finite,
    FiniteOrNan,
    NotAsDeclaredError,
    Share,
    as_json,
    damaged,
    from_json,
    read_typed,
)

# --- results.json -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selected:
    """A best round."""

    evaluator: str
    accuracy: Share
    round: Count
    checkpoint: str = ""


@dataclass(frozen=True)
class Results:
    """``results.json``: how a run ended, and what its final evaluation measured.

    Attributes:
        rounds: that were done.
        seconds: wall-clock time of all processes of the run.
        model: which model was evaluated, in words.
        conventions: what the two accuracies mean, in words.
        metrics: of the rounds: column of ``rounds.csv`` to the last round's number, or to the sum of all.
        test_selected: checkpoint to the round that the test split chose; None where there is a validation split.
        validation_selected: likewise, where there is one.
        calfat_plugin: version that wrote the file.
    """

    format: Count = 1
    recipe: str = ""
    seed: int | None = None
    trainer: str = ""
    aggregator: str = ""
    rounds: Count | None = None
    seconds: Finite = 0.0
    stopped_early: EarlyStop | None = None
    model: str = ""
    conventions: Mapping[str, str] = field(default_factory=dict)
    evaluations: tuple[EvaluationResult, ...] = ()
    evidence: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, FiniteOrNan] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    test_selected: Mapping[str, Selected] | None = None
    validation_selected: Mapping[str, Selected] | None = None
    calfat_plugin: str = ""
    citations: tuple[Citation, ...] = ()

    @property
    def by_label(self) -> dict[str, EvaluationResult]:
        return {evaluation.label: evaluation for evaluation in self.evaluations}

    @cached_property
    def numbers(self) -> Mapping[str, float | None]:
        """Metric, as suites name it, to what was measured."""
        numbers: dict[str, float | None] = {**self.metrics}
        for evaluation in self.evaluations:
            numbers.update(evaluation.numbers)
        return numbers

    def value(self, metric: str) -> float | None:
        """What was measured; None where there is no such metric, and where the attack did not run."""
        number = self.numbers.get(metric)
        if number is None or math.isnan(number):  # null in the file is nan here
            return None
        return float(number)

    def num_examples(self, metric: str) -> int | None:
        """Test examples that an evaluator's accuracy is a share of; None for other metrics."""
        evaluation = self.by_label.get(metric.removesuffix(f":{RELEASE}"))
        if evaluation is None:
            return None
        return evaluation.num_examples

    def not_run(self, metric: str) -> str:
        """Why the attack of a metric did not run; empty where it ran, or is not there."""
        evaluation = self.by_label.get(evaluator_of(metric))
        if evaluation is None:
            return ""
        return evaluation.not_run

    def as_json(self) -> dict[str, Any]:
        """As the file has it: what is None is left out."""
        content: dict[str, Any] = as_json(dataclasses.replace(self, evaluations=(), metrics={}))
        content["evaluations"] = [evaluation_as_json(evaluation) for evaluation in self.evaluations]
        content["metrics"] = {name: self.value(name) for name in self.metrics}
        for name in ("stopped_early", "test_selected", "validation_selected"):
            if content[name] is None:
                del content[name]
        if not self.evidence:
            del content["evidence"]
        return content


def read_results(path: Path) -> Results | None:
    """Read ``results.json``; None where there is none: the run is not finished."""
    results = read_typed(Results, path)
    if results is None:
        return None
    if results.format > RESULTS_FORMAT:
        raise RunError(
            f"{path}: its format is {results.format}, and the newest that this version knows is {RESULTS_FORMAT}. A "
            "newer calfat-plugin wrote it: update yours."
        )
    check_evaluations(results.evaluations, path)
    return results


def check_evaluations(evaluations: tuple[EvaluationResult, ...], path: Path) -> None:
    """Check what the types do not say: why there is no accuracy, and the ball that a page shows."""
    for index, evaluation in enumerate(evaluations):
        if evaluation.accuracy is None and not evaluation.not_run:
            raise damaged(path, f"evaluations[{index}].accuracy is nothing, and no 'not_run' says why")
        try:
            from_json(_Ball, dict(evaluation.settings), f"evaluations[{index}].settings")
        except NotAsDeclaredError as error:
            raise damaged(path, str(error)) from None


@dataclass(frozen=True)
class _Ball:
    """Settings of an attack that pages show."""

    eps: Eps | None = None
    norm: str | None = None


# --- other files of a run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """``partition.json``: which data a run trains on; its digests are compared when a run is resumed."""

    class_names: tuple[str, ...] = ()
    image_shape: tuple[Count, ...] = ()  # channels, height, width
    class_counts: tuple[tuple[Count, ...], ...] = ()  # training examples: a row a client, a column a class
    groups: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)  # name to clients
    attackers: tuple[Count, ...] = ()
    dataset_sha256: str = ""  # of all images and labels
    partition_sha256: str = ""


@dataclass(frozen=True)
class Environment:
    """``environment.json``: where and with what the last process of a run computed."""

    command: tuple[Any, ...] = ()
    python: str = ""
    platform: str = ""
    processor: str = ""
    cpu_count: Count | None = None
    threads: Count | None = None
    precision: str = "fp32"
    device: str = ""
    gpu: str | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[Any, ...] = ()
    plugins_not_loaded: tuple[Any, ...] = ()
    commit: str | None = None
    host: str = ""


@dataclass(frozen=True)
class Span:
    """Time in one place of the code."""

    path: tuple[str, ...]  # the spans that it is within, and its own name
    seconds: Finite
    calls: Count


@dataclass(frozen=True)
class Part:
    """A round, or the final evaluation."""

    name: str
    seconds: Finite
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Spending:
    """``profile.json``: where the time of a run went."""

    parts: tuple[Part, ...]
    method: str = ""


@dataclass(frozen=True)
class EvidenceFile:
    """A file of adversarial images that belongs to results, and the ball that they are in."""

    file: str
    norm: str
    eps: str


@dataclass(frozen=True)
class EvidenceFiles:
    """What any results file says of its evidence."""

    evidence: tuple[EvidenceFile, ...] = ()


@dataclass(frozen=True)
class AttackResults:
    """A file of ``attacks/``, written by ``calfat attack``."""

    evaluations: tuple[EvaluationResult, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    checkpoint: str = ""
    round: Count | None = None
    selected_on: str | None = None


# --- trust.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TriedBudget:
    """The ball of the number on trial."""

    norm: str
    eps: Eps


@dataclass(frozen=True)
class TrustRow:
    """One attack of the battery."""

    attack: str
    eps: Eps
    accuracy: Share
    examples: Count
    seconds: Finite
    left: Share | None = None  # what this and all attacks before it leave at the budget
    of: Count | None = None  # images that the attacked ones were picked from


@dataclass(frozen=True)
class TrustCheck:
    """A check of the battery, with its attacks."""

    check: str
    rows: tuple[TrustRow, ...]


@dataclass(frozen=True)
class TrustVerdict:
    """What the file says of the number on trial."""

    word: str
    text: str
    sentence: str
    causes: tuple[str, ...]
    natural: Share | None = None
    worst: Share | None = None
    usable: bool = True


@dataclass(frozen=True)
class TrustResults:
    """``trust.json``, written by ``calfat trust``: a verdict and its evidence."""

    attack: str  # that made the number on trial
    examples: Count
    finished: bool
    threat: TriedBudget
    verdict: TrustVerdict
    checks: tuple[TrustCheck, ...]
    checkpoint: str = ""
    round: Count | None = None
    environment: Environment = Environment()  # of the command that judged


# --- suite.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuiteAxis:
    """Cells of a suite are named after its axes."""

    name: str


@dataclass(frozen=True)
class SuiteMetric:
    """A column of the suite's table."""

    label: str
    heading: str


@dataclass(frozen=True)
class SuiteScore:
    """What a paper reports, as a fraction."""

    reported: Share | None = None


@dataclass(frozen=True)
class SuiteRunFile:
    """A run of a cell."""

    directory: str
    status: str = ""


@dataclass(frozen=True)
class SuiteChoice:
    """How the values of a cell were chosen, in words."""

    text: str
    tried: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class SuiteCell:
    """A row of the suite's table."""

    name: str
    source: str = ""
    scores: Mapping[str, SuiteScore] = field(default_factory=dict)
    runs: tuple[SuiteRunFile, ...] = ()
    choice: SuiteChoice | None = None


@dataclass(frozen=True)
class SuiteChoosing:
    """How values of a suite are chosen, in words."""

    how: str


@dataclass(frozen=True)
class SuiteFile:
    """``suite.json``; everything is empty where there is none."""

    title: str = ""
    axes: tuple[SuiteAxis, ...] = ()
    metrics: tuple[SuiteMetric, ...] = ()
    cells: tuple[SuiteCell, ...] = ()
    choose: SuiteChoosing | None = None
    tolerance_points: Mapping[str, Finite] = field(default_factory=dict)  # label to the points that pass unmarked

    @property
    def headings(self) -> dict[str, str]:
        """Metric to heading, in the order of the table's columns."""
        return {metric.label: metric.heading for metric in self.metrics}

    @property
    def notes(self) -> list[str]:
        """How values were chosen, and which runs a page leaves out, in words."""
        notes = []
        if self.choose is not None:
            notes.append(self.choose.how)
            for cell in self.cells:
                if cell.choice is not None:
                    chosen = cell.choice.text or "nothing is chosen yet"
                    notes.append(f"{cell.name}: {chosen} (tried {cell.choice.tried}).")
                    notes += [f"{cell.name}: {remark}" for remark in cell.choice.remarks]
        # Such a run may have left no directory.
        lost = sum(run.status == "lost" for cell in self.cells for run in cell.runs)
        if lost == 1:
            notes.append("Left out of the means: 1 run whose training diverged; it counts as 0 in the suite's table.")
        elif lost:
            notes.append(
                f"Left out of the means: {lost} runs whose training diverged; they count as 0 in the suite's table."
            )
        return notes


SUITE = "suite.json"


def read_suite(folder: Path) -> SuiteFile:
    """Read ``suite.json`` of a folder."""
    return read_typed(SuiteFile, folder / SUITE) or SuiteFile()
