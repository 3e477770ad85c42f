"""The files of a suite's table: those of ``tables``, and CSV and JSON for programs. JSON holds fractions, as results
files do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calfat_plugin import __version__
from calfat_plugin.disk import write_text
from calfat_plugin.errors import RunError
from calfat_plugin.maths.intervals import Rival
from calfat_plugin.options import to_plain
from calfat_plugin.suites.chosen import as_json as choice_as_json
from calfat_plugin.suites.chosen import how_chosen
from calfat_plugin.suites.compare import Compared, comparisons
from calfat_plugin.suites.schema import Choose
from calfat_plugin.suites.summary import CellSummary, Score, SuiteSummary
from calfat_plugin.suites.tables import columns, latex, markdown, names

_CSV_NUMBERS = ("mean_percent", "std_percent", "release_percent", "reported_percent", "difference_points")
_CSV_INTERVALS = ("low_percent", "high_percent", "rival", "rival_points", "rival_low_points", "rival_high_points")
_CSV_SEEDS = ("seeds", "values_percent")  # one value a seed, for paired comparisons
_CSV_FIGURES = ("mean", "std", "values")  # of what is no accuracy; only in tables that have such a column


def write_tables(summary: SuiteSummary, out: Path | None) -> list[Path]:
    """Write ``table.md``, ``.tex``, ``.csv`` and ``suite.json`` to the suite's directory, and copies to ``out``.

    Returns:
        The folders written to.

    Raises:
        RunError: one of them cannot be written.
    """
    texts: Mapping[str, str] = {
        "table.md": markdown(summary),
        "table.tex": latex(summary),
        "table.csv": as_csv(summary),
        "suite.json": json.dumps(as_json(summary), indent=2, allow_nan=False) + "\n",
    }
    folders = {summary.plan.directory: False, **({} if out is None else {out: True})}
    for folder, is_copy in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                write_text(folder / (f"{summary.suite.name}{Path(name).suffix}" if is_copy else name), text)
        except OSError as error:
            raise RunError(f"{folder}: the tables cannot be written ({error.strerror}).") from None
    return list(folders)


def as_csv(summary: SuiteSummary) -> str:
    """A row for each cell and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = not all(score.is_accuracy for cell in summary.cells for score in cell.scores.values())
    more = _CSV_FIGURES if figures else ()
    head = (*_CSV_NUMBERS, "beyond", "source", "note", *_CSV_INTERVALS, *_CSV_SEEDS, *more)
    writer.writerow([*columns(summary), "metric", "n", *head])
    for cell in summary.cells:
        for label, score in cell.scores.items():
            writer.writerow(
                [
                    *names(summary, cell),
                    label,
                    len(score.values),
                    *_numbers(score),
                    "" if score.beyond is None else str(score.beyond).lower(),
                    (cell.source or "") if score.reported is not None else "",
                    "; ".join(cell.notes),
                    *_intervals(score),
                    *_seeds(score),
                    *_figures(score)[: len(more)],
                ]
            )
    return text.getvalue()


def _numbers(score: Score) -> list[str]:
    """The values of ``_CSV_NUMBERS``; empty for a figure."""
    numbers = (score.mean, score.std, score.release_mean, score.reported, score.difference)
    return _in_hundredths(numbers if score.is_accuracy else (None,) * len(numbers))


def _intervals(score: Score) -> list[str]:
    """The values of ``_CSV_INTERVALS``."""
    own = score.interval if score.is_accuracy else None
    rival = "" if score.rival is None else score.rival.name
    difference = None if score.rival is None else score.rival.difference
    found = [None] * 3 if difference is None else [difference.mean, *(difference.interval or (None, None))]
    return [*_in_hundredths(own or (None, None)), rival, *_in_hundredths(found)]


def _seeds(score: Score) -> list[str]:
    """The values of ``_CSV_SEEDS``."""
    return [" ".join(map(str, score.seeds)), " ".join(_in_hundredths(score.values if score.is_accuracy else ()))]


def _figures(score: Score) -> list[str]:
    """The values of ``_CSV_FIGURES``; empty for an accuracy."""
    if score.is_accuracy:
        return [""] * len(_CSV_FIGURES)
    return [
        *("" if number is None else repr(number) for number in (score.mean, score.std)),
        " ".join(map(repr, score.values)),
    ]


def as_json(summary: SuiteSummary) -> dict[str, Any]:
    """Everything: settings, runs with their directories and full evaluations, scores."""
    suite = summary.suite
    return {
        "suite": suite.name,
        "title": suite.title,
        "file": suite.document.file,
        "base": str(suite.base),
        "overrides": list(summary.plan.overrides),
        "seeds": list(summary.plan.seeds),
        "axes": [{"name": axis, "labels": list(labels)} for axis, labels in suite.axes.items()],
        "metrics": [{"label": label, "heading": heading} for label, heading in suite.metrics.items()],
        "tolerance_points": dict(suite.tolerance),
        "units": "accuracies are fractions in [0, 1]; std is the sample standard deviation (ddof 1) over seeds; "
        "interval is a 95 % interval",
        **({"choose": _choose_as_json(suite.choose, summary)} if suite.choose else {}),
        "cells": [_cell_as_json(cell) for cell in summary.cells],
        **({"comparisons": [[*map(_compared_as_json, of)] for of in comparisons(summary)]} if suite.compare else {}),
        "calfat_plugin": __version__,
    }


def _choose_as_json(choose: Choose, summary: SuiteSummary) -> dict[str, Any]:
    return {
        "metric": list(choose.metric),
        "by": choose.by,
        "seeds": list(choose.seeds),
        "how": how_chosen(choose, summary.plan.choices),
    }


def _compared_as_json(one: Compared) -> dict[str, Any]:
    return {
        "cell": one.row.cell.name,
        "endpoint": one.endpoint,
        "difference": None if one.difference is None else one.difference._asdict(),
        "p_value": one.p_value,
        "adjusted": one.adjusted,
        "result": one.word or None,
    }


def _cell_as_json(cell: CellSummary) -> dict[str, Any]:
    return {
        "name": cell.cell.name,
        "labels": list(cell.cell.labels),
        "settings": {setting.key: to_plain(setting.value) for setting in cell.cell.settings},
        "skipped": cell.cell.skipped or None,
        "source": cell.source,
        "scores": {
            label: {
                "n": len(score.values),
                "values": list(score.values),
                **{key: getattr(score, key) for key in ("mean", "std", "release_mean", "reported", "difference")},
                "beyond_tolerance": score.beyond,
                "interval": score.interval,
                "rival": score.rival and _rival_as_json(score.rival),
                "clear_best": score.is_clear_best,
            }
            for label, score in cell.scores.items()
        },
        "runs": [
            {
                "seed": run.run.seed,
                "directory": str(run.run.directory),
                "status": run.status,
                "message": run.message or None,
                "verdict": run.verdict or None,
                "seconds": run.results.get("seconds"),
                "evaluations": run.results.get("evaluations", []),
            }
            for run in cell.runs
        ],
        **({} if cell.choice is None else {"choice": choice_as_json(cell.choice)}),
        "seeds_left": cell.left,
        "notes": cell.notes,
    }


def _rival_as_json(rival: Rival) -> dict[str, Any]:
    found = rival.difference
    paired = {} if found is None else {"difference": found.mean, "interval": found.interval, "seeds": found.seeds}
    return {"name": rival.name, **paired}


def _in_hundredths(fractions: Iterable[float | None]) -> list[str]:
    return ["" if number is None else f"{100 * number:.4f}" for number in fractions]
