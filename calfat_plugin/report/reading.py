"""Run directories as a report sees them: whatever is there, read once, typed where it is used."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from calfat_plugin.disk import long_csv_fields
from calfat_plugin.errors import RunError
from calfat_plugin.recipe.document import read_document

RECIPE = "recipe.yaml"
PER_CLASS = "per_class.json"
TSNE = "tsne.json"
ATTACKS = "attacks"
SUITE = "suite.json"
_FILES = ("results", "environment", "partition", "per_class", "tsne")  # JSON, each a field of RunFiles
NATURAL = "natural"


@dataclass(frozen=True)
class RunFiles:
    """The contents of one run directory. A file that is not there yet is empty here.

    Attributes:
        path: the directory.
        recipe: as run.
        rounds: a row a round: column to number; None where nothing was measured.
        results: ``results.json``; empty while the run is not finished.
        environment: ``environment.json``.
        partition: ``partition.json``.
        per_class: ``per_class.json``, made by ``calfat per-class``.
        tsne: ``tsne.json``, made by ``calfat report --tsne``.
        attacks: file name to content of ``attacks/*.json``, made by ``calfat attack``.
    """

    path: Path
    recipe: Mapping[str, Any]
    rounds: Sequence[Mapping[str, float | None]]
    results: Mapping[str, Any]
    environment: Mapping[str, Any]
    partition: Mapping[str, Any]
    per_class: Mapping[str, Any]
    tsne: Mapping[str, Any]
    attacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def value(self, *keys: str) -> Any:
        """A recipe value; None where it is not written."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def name(self) -> str:
        """The recipe's name."""
        return str(self.results.get("recipe") or self.path.resolve().parent.name)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.value("common_args", "random_seed") or 0)

    @property
    def num_rounds(self) -> int:
        """Rounds asked for."""
        return int(self.value("train_args", "comm_round") or 0)

    @property
    def finished(self) -> bool:
        """Whether the final evaluation is there."""
        return bool(self.results)

    @property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """The final evaluation, one entry an evaluator."""
        return self.results.get("evaluations") or ()

    def accuracy(self, label: str) -> float | None:
        """Final accuracy of one evaluator, a fraction."""
        return next((float(e["accuracy"]) for e in self.evaluations if e["label"] == label), None)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where no name is known."""
        names = self.partition.get("class_names") or self.per_class.get("class_names")
        if names:
            return tuple(map(str, names))
        counted = next((e["per_class"] for e in self.evaluations if e.get("per_class")), ())
        return tuple(map(str, range(len(counted))))

    @property
    def class_counts(self) -> tuple[tuple[int, ...], ...]:
        """Training examples: a row a client, a column a class."""
        return tuple(tuple(map(int, row)) for row in self.partition.get("class_counts") or ())

    @cached_property
    def monitored(self) -> tuple[str, ...]:
        """Labels of the evaluators that were measured during the run, in the recipe's order."""
        listed = self.value("calfat", "monitor", "evaluators") or ()
        labels = [pick.get("label") or pick.get("name") if isinstance(pick, Mapping) else str(pick) for pick in listed]
        return tuple(label for label in labels if label and self.curve(label))

    @property
    def robust_label(self) -> str | None:
        """The monitored attack that measures robustness: the last of the list, which goes from weak to strong."""
        attacks = [label for label in self.monitored if label != NATURAL]
        return attacks[-1] if attacks else None

    def curve(self, column: str) -> list[tuple[int, float]]:
        """(round, number) for every round that has one in ``column``."""
        points = ((row.get("round"), row.get(column)) for row in self.rounds)
        return [(int(number), value) for number, value in points if number is not None and value is not None]


def read_run(path: Path) -> RunFiles:
    """Read one run directory.

    Raises:
        RunError: there is no run in it, or a file of it is damaged.
        RecipeError: its recipe is damaged.
    """
    if not (path / RECIPE).is_file():
        raise RunError(f"{path}: there is no run in this directory (no {RECIPE}).")
    return RunFiles(
        path=path,
        recipe=read_document(path / RECIPE).data,
        rounds=_rounds(path / "rounds.csv"),
        **{name: read_json(path / f"{name}.json") for name in _FILES},
        attacks={
            str(file.relative_to(path)): content
            for file in sorted((path / ATTACKS).glob("*.json"), key=lambda file: file.stem)
            if file.stat().st_size > 0 and (content := read_json(file)).get("evaluations")  # 0: just being written
        },
    )


def find_runs(path: Path) -> list[Path]:
    """The run directories at ``path``, those that its suite lists, or all below it, sorted.

    A suite lists its runs in ``suite.json``; they may lie with another suite that shares them.

    Raises:
        RunError: there is none.
    """
    if (path / RECIPE).is_file():
        return [path]
    listed = [run for cell in read_json(path / SUITE).get("cells", ()) for run in cell.get("runs", ())]
    found = [found for run in listed if (found := listed_run(path, Path(run["directory"]))) is not None]
    if found:
        return found
    found = sorted(recipe.parent for recipe in path.rglob(RECIPE)) if path.is_dir() else []
    if not found:
        what = "neither here nor below is there a run" if path.is_dir() else "no such directory"
        raise RunError(f"{path}: {what}. Name run directories, such as runs/calfat_digits/0-20260101-120000.")
    return found


def listed_run(suite: Path, written: Path) -> Path | None:
    """A run of a suite: where ``suite.json`` says, or at the same place beside the suite, if both were moved."""
    moved = suite.parent.joinpath(*written.parts[-3:])
    return next((place for place in (written, moved) if (place / RECIPE).is_file()), None)


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON mapping; empty where there is no such file.

    Raises:
        RunError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}).") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON mapping; it was changed by hand.")
    return content


def _rounds(path: Path) -> list[Mapping[str, float | None]]:
    try:
        with path.open(encoding="utf-8", newline="") as file, long_csv_fields():
            return [{name: _number(text) for name, text in row.items() if name} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}).") from None


def _number(text: Any) -> float | None:
    """Texts such as refusals, and what is not finite, have no place in a curve."""
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None
