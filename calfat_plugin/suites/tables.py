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
from calfat_plugin.report.scores import Scored, meaning, partition_note, score_tables
from calfat_plugin.report.table import NOTHING, Table, csv_text, in_markdown, one_line
from calfat_plugin.results import evaluator_of
from calfat_plugin.run_files import SUITE
from calfat_plugin.suites.cells import SuiteRun
from calfat_plugin.suites.suite import Suite
from calfat_plugin.suites.summary import CellSummary, Compared, SuiteSummary, comparisons
from calfat_plugin.suites.tuning import choice_as_json, chosen_text, how_chosen
from calfat_plugin.version import __version__

_PERCENT = "Accuracy in percent on the test split, mean"
PLANNED = (
    "Planned comparisons: {} minus the other row, in points, paired over seeds, with 95 % intervals (Student's, not "
    "corrected) and p-values (paired t test), corrected after Holm within each family."
)
_COLUMNS = (
    *("mean_percent", "std_percent", "release_percent", "reported_percent", "difference_points", "beyond", "source"),
    *("note", "low_percent", "high_percent", "rival", "rival_points", "rival_low_points", "rival_high_points"),
    *("seeds", "values_percent"),  # one value a seed, for paired comparisons
)
_COLUMNS_OF_FIGURES = ("mean", "std", "values")

# --- the pieces -------------------------------------------------------------------------------------------------------


def caption(summary: SuiteSummary) -> str:
    """What the numbers mean, in a few sentences."""
    suite = summary.suite
    seeds = ", ".join(map(str, summary.plan.seeds))
    chosen = ""
    if suite.choose is not None:
        chosen = how_chosen(suite.choose, summary.plan.choices)
    _, rows = scored(summary)
    sources = [cell.source for cell in summary.cells]
    what_numbers_mean = meaning(suite.metrics, rows, sources, suite.reported.tolerance, _one_partition(summary), chosen)
    text = (
        f"{_PERCENT} ± sample standard deviation over n of the seeds {seeds}; the model after the final round. "
        f"{what_numbers_mean}"
    )
    unfinished = sum(bool(cell.left) for cell in summary.cells)
    if unfinished:
        text += f" {unfinished} of {len(summary.cells)} cells have seeds left to run."
    return text


def _one_partition(summary: SuiteSummary) -> str:
    """Which rows have one partition for all seeds; empty where none has."""
    if len(summary.plan.seeds) < 2:
        return ""
    recipes = {}
    for row in summary.cells:
        if row.cell.experiment is not None:
            recipes[row.cell.name] = row.cell.experiment.as_run()
    return partition_note(recipes)


def headings(summary: SuiteSummary) -> dict[str, str]:
    """Of the numbers: ``AutoAttack (64 of 359 images)`` where others in the table are of more images."""
    heads = {}
    for label, head in summary.suite.metrics.items():
        heads[label] = head
        images = _fewer_images(summary, evaluator_of(label))
        if images:
            heads[label] += f" ({images} images)"
    return heads


def _fewer_images(summary: SuiteSummary, label: str) -> str:
    """``32 of 359`` where runs measured on fewer examples than with other evaluators; empty where none did.

    Of runs that are only in a record, ``at most 32``, as their recipes say.
    """
    texts: dict[str, None] = {}  # each once, in order
    for cell in summary.cells:
        for run in cell.runs:
            if run.results is None or label not in run.results.by_label:
                continue
            number = run.results.by_label[label].num_examples
            largest = max(evaluation.num_examples for evaluation in run.results.evaluations)
            if 0 < number < largest:
                texts[f"{number:,} of {largest:,}"] = None
    if texts:
        return " or ".join(texts)
    for cell in summary.cells:
        if cell.cell.experiment is None or not any(run.recorded for run in cell.runs):
            continue
        for pick in cell.cell.experiment.evaluators:
            limit = getattr(pick.options, "max_examples", None)
            if pick.label == label and limit is not None:
                texts[f"at most {limit:,}"] = None
    return " or ".join(texts)


def notes(summary: SuiteSummary) -> list[tuple[str, str]]:
    """(cell, remark) for whatever the numbers alone do not say; each on one line, whatever a run printed."""
    remarks = []
    for cell in summary.cells:
        remarks += [(one_line(cell.cell.name), one_line(note)) for note in cell.notes]
    return remarks


# --- formats ----------------------------------------------------------------------------------------------------------


def scored(summary: SuiteSummary, *, chosen: bool = True) -> tuple[list[str], list[Scored]]:
    """Head and rows: labels, what was chosen unless it is to be left out, the verdict of ``calfat trust`` where some
    row has one, the number of seeds, and scores. Rows of one label of the first of several axes stand together."""
    axes = summary.suite.axes
    with_choice = chosen and summary.suite.choose is not None
    head = list(axes)
    if with_choice:
        head.append("chosen")
    if summary.judged:
        head.append("calfat trust")
    rows = []
    for row in summary.cells:
        names = list(row.cell.labels)
        if with_choice:
            value = ""
            if row.choice is not None:  # a skipped row has none
                value = chosen_text(row.choice)
            names.append(value or NOTHING)
        if summary.judged:
            names.append(row.verdict or NOTHING)
        number_of_seeds = str(row.ended)
        if row.cell.skipped:
            number_of_seeds = NOTHING
        names.append(number_of_seeds)
        group = ""
        if len(axes) > 1:
            group = row.cell.labels[0]
        rows.append(Scored(names, row.scores, group))
    return [*head, "n"], rows


def planned(summary: SuiteSummary) -> Iterator[Table]:
    """The comparisons that the suite plans, one table for each family."""
    for family in comparisons(summary):
        rows = []
        for compared in family:
            seeds = ""
            if compared.difference is not None:
                seeds = str(compared.difference.seeds)
            rows.append(
                [
                    compared.row.cell.name,
                    compared.endpoint,
                    seeds,
                    paired_points(compared.difference),
                    _two_digits(compared.p_value),
                    _two_digits(compared.adjusted),
                    compared.word or "not all seeds yet",
                ]
            )
        yield Table("", ["row", "endpoint", "n", "difference", "p", "p, corrected", "result"], rows, 2)


def _two_digits(p_value: float | None) -> str:
    if p_value is None:
        return ""
    return f"{p_value:.2g}"


def markdown(summary: SuiteSummary) -> str:
    """The tables with caption and notes."""
    head, rows = scored(summary)
    parts = [f"# {in_markdown(summary.suite.title)}\n"]
    for table in score_tables(head, headings(summary), rows, caption(summary), own=len(summary.suite.axes)):
        if table:
            parts.append(tables.markdown(table))
    plan = summary.suite.compare
    if plan is not None:
        text = PLANNED.format(plan.row)
        if plan.level:
            text += f" Level: within {plan.level:g} points in {plan.robust}, by two one-sided tests."
        parts.append(f"{in_markdown(text)}\n")
        parts += map(tables.markdown, planned(summary))
    remarks = [in_markdown(f"{cell}: {note}") for cell, note in notes(summary)]
    if remarks:
        parts.append("".join(f"- {remark}\n" for remark in remarks))
    return "\n".join(parts)


def latex(summary: SuiteSummary) -> str:
    """A table with a short caption; the rest of what is said of the numbers is below it, in comments."""
    title = one_line(summary.suite.title)
    if not title.endswith((".", "!", "?")):
        title += "."
    seeds = counted(len(summary.plan.seeds), "seed")
    numbers = f"{_PERCENT} ± sample standard deviation over {seeds} [95 % interval]. {_one_partition(summary)}".rstrip()
    comments = [one_line(caption(summary))]
    for cell, note in notes(summary):
        comments.append(f"{cell}: {note}")
    head, rows = scored(summary, chosen=False)
    results, _ = score_tables(head, headings(summary), rows)
    named = replace(results, name=f"{title} {numbers}")
    return tables.latex(named, summary.suite.name.replace("_", "-"), comments)


def as_csv(summary: SuiteSummary) -> str:
    """A row for each cell and metric; further columns where some metric is a figure and no accuracy."""
    head, rows = scored(summary)
    columns = list(_COLUMNS)
    for row in rows:
        if not all(score.is_accuracy for score in row.scores.values()):
            columns = [*_COLUMNS, *_COLUMNS_OF_FIGURES]
    lines: list[list[object]] = [[*head[:-1], "metric", "n", *columns]]
    for cell, row in zip(summary.cells, rows, strict=True):
        for label, score in row.scores.items():
            text_of_column = _csv_row(cell, score)
            texts = [text_of_column.get(column, "") for column in columns]
            lines.append([*row.names[:-1], label, len(score.values), *texts])
    return csv_text(lines)


def _csv_row(cell: CellSummary, score: Score) -> dict[str, str]:
    """Column to text; columns of what a score does not have are left out."""
    row = {"note": "; ".join(cell.notes), "seeds": " ".join(map(str, score.by_seed))}
    if score.reported is not None:
        row["source"] = cell.source or ""
    if score.beyond is not None:
        row["beyond"] = str(score.beyond).lower()
    if score.rival is not None:
        row["rival"] = score.rival.name
        difference = score.rival.difference
        if difference is not None:
            low, high = difference.interval or (None, None)
            row["rival_points"] = _hundredths(difference.mean)
            row["rival_low_points"] = _hundredths(low)
            row["rival_high_points"] = _hundredths(high)
    if not score.is_accuracy:
        row["mean"] = _digits(score.mean)
        row["std"] = _digits(score.std)
        row["values"] = " ".join(map(repr, score.values))
        return row
    low, high = score.interval or (None, None)
    row["mean_percent"] = _hundredths(score.mean)
    row["std_percent"] = _hundredths(score.std)
    row["low_percent"] = _hundredths(low)
    row["high_percent"] = _hundredths(high)
    row["release_percent"] = _hundredths(score.release_mean)
    row["reported_percent"] = _hundredths(score.reported)
    row["difference_points"] = _hundredths(score.difference)
    row["values_percent"] = " ".join(map(_hundredths, score.values))
    return row


def _hundredths(fraction: float | None) -> str:
    """In percent; empty for None."""
    if fraction is None:
        return ""
    return f"{100 * fraction:.4f}"


def _digits(number: float | None) -> str:
    """All digits of a figure; empty for None."""
    if number is None:
        return ""
    return repr(number)


def as_json(summary: SuiteSummary) -> dict[str, Any]:
    """Everything: settings, runs with their directories and full evaluations, scores."""
    suite = summary.suite
    axes = [{"name": axis, "labels": list(labels)} for axis, labels in suite.axes.items()]
    metrics = [{"label": label, "heading": heading} for label, heading in suite.metrics.items()]
    content: dict[str, Any] = {
        "suite": suite.name,
        "title": suite.title,
        "file": suite.document.file,
        "base": suite.base_document.file,
        "overrides": list(summary.plan.overrides),
        "seeds": list(summary.plan.seeds),
        "axes": axes,
        "metrics": metrics,
        "tolerance_points": dict(suite.reported.tolerance),
        "units": "accuracies are fractions in [0, 1]; std is the sample standard deviation (ddof 1) over seeds; "
        "interval is a 95 % interval",
    }
    if suite.choose is not None:
        content["choose"] = {
            "metric": list(suite.choose.metric),
            "seeds": list(suite.choose.seeds),
            "how": how_chosen(suite.choose, summary.plan.choices),
        }
    content["cells"] = [_cell_as_json(cell) for cell in summary.cells]
    if suite.compare is not None:
        families = []
        for family in comparisons(summary):
            families.append([_compared_as_json(compared) for compared in family])
        content["comparisons"] = families
    content["calfat_plugin"] = __version__
    return content


def _compared_as_json(compared: Compared) -> dict[str, Any]:
    difference = None
    if compared.difference is not None:
        difference = compared.difference._asdict()
    return {
        "cell": compared.row.cell.name,
        "endpoint": compared.endpoint,
        "difference": difference,
        "p_value": compared.p_value,
        "adjusted": compared.adjusted,
        "result": compared.word or None,
    }


def _cell_as_json(cell: CellSummary) -> dict[str, Any]:
    settings = {setting.key: to_plain(setting.value) for setting in cell.cell.settings}
    scores = {label: _score_as_json(score) for label, score in cell.scores.items()}
    runs = [_run_as_json(run) for run in cell.runs]
    content = {
        "name": cell.cell.name,
        "labels": list(cell.cell.labels),
        "settings": settings,
        "skipped": cell.cell.skipped or None,
        "source": cell.source,
        "scores": scores,
        "runs": runs,
        "seeds_left": cell.left,
        "notes": cell.notes,
    }
    if cell.choice is not None:
        content["choice"] = choice_as_json(cell.choice)
    return content


def _score_as_json(score: Score) -> dict[str, Any]:
    rival: dict[str, Any] | None = None
    if score.rival is not None:
        rival = {"name": score.rival.name}
        difference = score.rival.difference
        if difference is not None:
            rival |= {"difference": difference.mean, "interval": difference.interval, "seeds": difference.seeds}
    return {
        "n": len(score.values),
        "values": list(score.values),
        "mean": score.mean,
        "std": score.std,
        "release_mean": score.release_mean,
        "reported": score.reported,
        "difference": score.difference,
        "beyond_tolerance": score.beyond,
        "interval": score.interval,
        "rival": rival,
        "clear_best": score.is_clear_best,
    }


def _run_as_json(run: SuiteRun) -> dict[str, Any]:
    measured: dict[str, Any] = {"seconds": None, "evaluations": [], "alarms": []}
    if run.results is not None:
        results = run.results.as_json()
        for name in measured:
            measured[name] = results[name]
    return {
        "seed": run.seed,
        "directory": str(run.directory),
        "status": run.state,
        "message": run.message or None,
        "verdict": run.verdict or None,
        **measured,
    }


# --- files ------------------------------------------------------------------------------------------------------------


def check_record(suite: Suite) -> None:
    """Refuse a record that a table would take the place of."""
    if suite.record is None:
        return
    record = suite.record.resolve()
    if any(record == (suite.directory / name).resolve() for name in _FILES):
        raise OptionError(
            f"--record {suite.record}: a table of the suite is written there, over the record. Choose another name."
        )


def write_tables(summary: SuiteSummary) -> Path:
    """Write ``table.md``, ``.tex``, ``.csv`` and ``suite.json`` to the suite's directory, which is returned."""
    folder = summary.suite.directory
    with reporting_disk_errors(folder, TRY_AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text_of in _FILES.items():
        write_text(folder / name, text_of(summary), TRY_AGAIN)
    return folder


#: Name of each file to what makes its text.
_FILES: Mapping[str, Callable[[SuiteSummary], str]] = {
    "table.md": markdown,
    "table.tex": latex,
    "table.csv": as_csv,
    SUITE: lambda summary: json.dumps(as_json(summary), indent=2, allow_nan=False) + "\n",
}
