"""A suite's table as people read it (Markdown, LaTeX, in percent) and for programs (CSV; JSON, in fractions)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from calfat_plugin.disk import TRY_AGAIN, reporting_disk_errors, write_text
from calfat_plugin.errors import OptionError
from calfat_plugin.maths.intervals import Score
from calfat_plugin.options import to_plain
from calfat_plugin.report import table as tables
from calfat_plugin.report.numbers import counted, paired_points
from calfat_plugin.report.reading import SUITE
from calfat_plugin.report.scores import Scored, meaning, partition_note, score_tables
from calfat_plugin.report.table import NOTHING, Table, csv_text, in_markdown, one_line
from calfat_plugin.results import evaluator_of
from calfat_plugin.suites.parse import Suite
from calfat_plugin.suites.summary import CellSummary, SuiteSummary, comparisons
from calfat_plugin.suites.tuning import as_json as choice_as_json
from calfat_plugin.suites.tuning import chosen_text, how_chosen
from calfat_plugin.version import __version__

_PERCENT = "Accuracy in percent on the test split, mean"
PLANNED = (
    "Planned comparisons: {} minus the other row, in points, paired over seeds, with 95 % intervals (Student's, not "
    "corrected) and p-values (paired t test), corrected after Holm within each family."
)

# --- the pieces -------------------------------------------------------------------------------------------------------


def caption(summary: SuiteSummary) -> str:
    """What the numbers mean, in a few sentences."""
    suite, seeds = summary.suite, ", ".join(map(str, summary.plan.seeds))
    chosen = how_chosen(suite.choose, summary.plan.choices) if suite.choose else ""
    sources = (cell.source for cell in summary.cells)
    said = _one_partition(summary), chosen
    text = (
        f"{_PERCENT} ± sample standard deviation over n of the seeds {seeds}; the model after the final round. "
        f"{meaning(suite.metrics, scored(summary)[1], sources, suite.reported.tolerance, *said)}"
    )
    left = sum(bool(cell.left) for cell in summary.cells)
    return f"{text} {left} of {len(summary.cells)} cells have seeds left to run." if left else text


def _one_partition(summary: SuiteSummary) -> str:
    """Which rows have one partition for all seeds; empty where none has."""
    rows = {row.cell.name: row.cell.experiment.as_run() for row in summary.cells if row.cell.experiment is not None}
    return partition_note(rows) if len(summary.plan.seeds) > 1 else ""


def headings(summary: SuiteSummary) -> dict[str, str]:
    """Of the numbers: ``AutoAttack (64 of 359 images)`` where others in the table are of more images."""
    fewer = {label: _fewer(summary, evaluator_of(label)) for label in summary.suite.metrics}
    return {
        label: f"{head} ({fewer[label]} images)" if fewer[label] else head
        for label, head in summary.suite.metrics.items()
    }


def _fewer(summary: SuiteSummary, label: str) -> str:
    """``32 of 359`` where runs measured on fewer examples than with other evaluators; empty where none did.

    Of runs that are only in a record, ``at most 32``, as their recipes say.
    """
    found: dict[str, None] = {}
    for evaluations in (run.results.get("evaluations", ()) for cell in summary.cells for run in cell.runs):
        number = {str(each["label"]): each.get("num_examples") or 0 for each in evaluations}
        if 0 < number.get(label, 0) < (most := max(number.values(), default=0)):
            found[f"{number[label]:,} of {most:,}"] = None
    recorded = (cell.cell for cell in summary.cells if any(run.recorded for run in cell.runs))
    picks = [pick for cell in recorded if cell.experiment is not None for pick in cell.experiment.evaluators]
    limits = dict.fromkeys(getattr(pick.options, "max_examples", None) for pick in picks if pick.label == label)
    return " or ".join(found or (f"at most {limit:,}" for limit in limits if limit is not None))


def notes(summary: SuiteSummary) -> list[tuple[str, str]]:
    """(cell, remark) for whatever the numbers alone do not say; each on one line, whatever a run printed."""
    return [(one_line(cell.cell.name), one_line(note)) for cell in summary.cells for note in cell.notes]


# --- formats ----------------------------------------------------------------------------------------------------------


def scored(summary: SuiteSummary, *, chosen: bool = True) -> tuple[list[str], list[Scored]]:
    """Head and rows: labels, what was chosen unless it is to be left out, the verdict of ``calfat trust`` where some
    row has one, the number of seeds, and scores. Rows of one label of the first of several axes stand together."""
    axes, chosen = summary.suite.axes, chosen and summary.suite.choose is not None
    rows = []
    for row in summary.cells:
        value = NOTHING if row.choice is None else chosen_text(row.choice) or NOTHING
        names = [*row.cell.labels, *([value] if chosen else []), *([row.verdict or NOTHING] if summary.judged else [])]
        names.append(NOTHING if row.cell.skipped else str(row.ended))
        rows.append(Scored(names, row.scores, row.cell.labels[0] if len(axes) > 1 else ""))
    return [*axes, *(["chosen"] if chosen else []), *(["calfat trust"] if summary.judged else []), "n"], rows


def planned(summary: SuiteSummary) -> Iterator[Table]:
    """The comparisons that the suite plans, one table for each family."""
    for family in comparisons(summary):
        rows = []
        for one in family:
            n = "" if one.difference is None else str(one.difference.seeds)
            p_values = ("" if p_value is None else f"{p_value:.2g}" for p_value in (one.p_value, one.adjusted))
            numbers = [n, paired_points(one.difference), *p_values, one.word or "not all seeds yet"]
            rows.append([one.row.cell.name, one.endpoint, *numbers])
        yield Table("", ["row", "endpoint", "n", "difference", "p", "p, corrected", "result"], rows, 2)


def markdown(summary: SuiteSummary) -> str:
    """The tables with caption and notes."""
    head, rows = scored(summary)
    found = score_tables(head, headings(summary), rows, caption(summary), own=len(summary.suite.axes))
    parts = [f"# {in_markdown(summary.suite.title)}\n", *map(tables.markdown, filter(None, found))]
    if (plan := summary.suite.compare) is not None:
        level = f" Level: within {plan.level:g} points in {plan.robust}, by two one-sided tests." if plan.level else ""
        parts += [f"{in_markdown(PLANNED.format(plan.row) + level)}\n", *map(tables.markdown, planned(summary))]
    remarks = "".join(f"- {in_markdown(f'{cell}: {note}')}\n" for cell, note in notes(summary))
    return "\n".join(filter(None, (*parts, remarks)))


def latex(summary: SuiteSummary) -> str:
    """A table with a short caption; the rest of what is said of the numbers is below it, in comments."""
    title, seeds = one_line(summary.suite.title), counted(len(summary.plan.seeds), "seed")
    end = "" if title.endswith((".", "!", "?")) else "."
    numbers = f"{_PERCENT} ± sample standard deviation over {seeds} [95 % interval]. {_one_partition(summary)}".rstrip()
    comments = [one_line(caption(summary)), *(f"{cell}: {note}" for cell, note in notes(summary))]
    head, rows = scored(summary, chosen=False)
    table, _ = score_tables(head, headings(summary), rows)
    return tables.latex(replace(table, name=f"{title}{end} {numbers}"), summary.suite.name.replace("_", "-"), comments)


def as_csv(summary: SuiteSummary) -> str:
    """A row for each cell and metric; further columns where some metric is a figure and no accuracy."""
    head, rows = scored(summary)
    figures = any(not score.is_accuracy for row in rows for score in row.scores.values())
    lines: list[list[object]] = []
    for cell, row in zip(summary.cells, rows, strict=True):
        for label, score in row.scores.items():
            numbers = _csv_row(cell, score, figures)
            lines.append([*row.names[:-1], label, len(score.values), *numbers.values()])
    return csv_text([[*head[:-1], "metric", "n", *numbers], *lines])


# --- files ------------------------------------------------------------------------------------------------------------


def check_record(suite: Suite) -> None:
    """Refuse a record that a table would take the place of."""
    if suite.record is not None and suite.record.resolve() in [(suite.directory / name).resolve() for name in _FILES]:
        raise OptionError(
            f"--record {suite.record}: a table of the suite is written there, over the record. Choose another name."
        )


def write_tables(summary: SuiteSummary) -> Path:
    """Write ``table.md``, ``.tex``, ``.csv`` and ``suite.json`` to the suite's directory, which is returned."""
    folder = summary.suite.directory
    with reporting_disk_errors(folder, TRY_AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
    for name, written in _FILES.items():
        write_text(folder / name, written(summary), TRY_AGAIN)
    return folder


def _csv_row(cell: CellSummary, score: Score, figures: bool) -> dict[str, str]:
    """Column to text; the numbers of a figure have columns of their own, where there are ``figures``."""
    of, raw = (score, Score({})) if score.is_accuracy else (Score({}), score)
    own = {name: "" if (value := getattr(raw, name)) is None else repr(value) for name in ("mean", "std")}
    own["values"] = " ".join(map(repr, raw.values))
    low, high = of.interval or (None, None)
    rival = score.rival and score.rival.difference
    rival_low, rival_high = (rival and rival.interval) or (None, None)
    return {
        "mean_percent": _hundredths(of.mean),
        "std_percent": _hundredths(of.std),
        "release_percent": _hundredths(of.release_mean),
        "reported_percent": _hundredths(of.reported),
        "difference_points": _hundredths(of.difference),
        "beyond": "" if score.beyond is None else str(score.beyond).lower(),
        "source": (cell.source or "") if score.reported is not None else "",
        "note": "; ".join(cell.notes),
        "low_percent": _hundredths(low),
        "high_percent": _hundredths(high),
        "rival": score.rival.name if score.rival else "",
        "rival_points": _hundredths(rival and rival.mean),
        "rival_low_points": _hundredths(rival_low),
        "rival_high_points": _hundredths(rival_high),
        # One value a seed, for paired comparisons.
        "seeds": " ".join(map(str, score.by_seed)),
        "values_percent": " ".join(map(_hundredths, of.values)),
        **(own if figures else {}),
    }


def as_json(summary: SuiteSummary) -> dict[str, Any]:
    """Everything: settings, runs with their directories and full evaluations, scores."""
    suite = summary.suite
    content: dict[str, Any] = {
        "suite": suite.name,
        "title": suite.title,
        "file": suite.document.file,
        "base": suite.base_document.file,
        "overrides": list(summary.plan.overrides),
        "seeds": list(summary.plan.seeds),
        "axes": [{"name": axis, "labels": list(labels)} for axis, labels in suite.axes.items()],
        "metrics": [{"label": label, "heading": heading} for label, heading in suite.metrics.items()],
        "tolerance_points": dict(suite.reported.tolerance),
        "units": "accuracies are fractions in [0, 1]; std is the sample standard deviation (ddof 1) over seeds; "
        "interval is a 95 % interval",
    }
    if suite.choose:
        chosen = {"metric": list(suite.choose.metric), "seeds": list(suite.choose.seeds)}
        content["choose"] = {**chosen, "how": how_chosen(suite.choose, summary.plan.choices)}
    content["cells"] = [_cell_as_json(cell) for cell in summary.cells]
    if suite.compare:
        content["comparisons"] = [
            [
                {
                    "cell": one.row.cell.name,
                    "endpoint": one.endpoint,
                    "difference": None if one.difference is None else one.difference._asdict(),
                    "p_value": one.p_value,
                    "adjusted": one.adjusted,
                    "result": one.word or None,
                }
                for one in family
            ]
            for family in comparisons(summary)
        ]
    return {**content, "calfat_plugin": __version__}


def _cell_as_json(cell: CellSummary) -> dict[str, Any]:
    scores = {}
    for label, score in cell.scores.items():
        rival: dict[str, Any] | None = None
        if score.rival is not None:
            rival, found = {"name": score.rival.name}, score.rival.difference
            if found is not None:
                rival |= {"difference": found.mean, "interval": found.interval, "seeds": found.seeds}
        scores[label] = {
            "n": len(score.values),
            "values": list(score.values),
            **{key: getattr(score, key) for key in ("mean", "std", "release_mean", "reported", "difference")},
            "beyond_tolerance": score.beyond,
            "interval": score.interval,
            "rival": rival,
            "clear_best": score.is_clear_best,
        }
    content = {
        "name": cell.cell.name,
        "labels": list(cell.cell.labels),
        "settings": {setting.key: to_plain(setting.value) for setting in cell.cell.settings},
        "skipped": cell.cell.skipped or None,
        "source": cell.source,
        "scores": scores,
        "runs": [
            {
                "seed": run.seed,
                "directory": str(run.directory),
                "status": run.state,
                "message": run.message or None,
                "verdict": run.verdict or None,
                "seconds": run.results.get("seconds"),
                "evaluations": run.results.get("evaluations", []),
                "alarms": list(run.results.get("alarms", ())),
            }
            for run in cell.runs
        ],
        "seeds_left": cell.left,
        "notes": cell.notes,
    }
    return content if cell.choice is None else {**content, "choice": choice_as_json(cell.choice)}


def _hundredths(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.4f}"


_FILES: Mapping[str, Callable[[SuiteSummary], str]] = {
    "table.md": markdown,
    "table.tex": latex,
    "table.csv": as_csv,
    SUITE: lambda summary: json.dumps(as_json(summary), indent=2, allow_nan=False) + "\n",
}
