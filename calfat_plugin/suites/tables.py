"""A suite's table as Markdown, LaTeX, CSV and JSON. Texts show percent; JSON holds fractions, as results files do."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calfat_plugin import __version__
from calfat_plugin.disk import write_text
from calfat_plugin.errors import RunError
from calfat_plugin.options import to_plain
from calfat_plugin.report.numbers import bare_percent as percent
from calfat_plugin.report.numbers import points
from calfat_plugin.suites.chosen import as_json as choice_as_json
from calfat_plugin.suites.chosen import chosen_text, how_chosen
from calfat_plugin.suites.schema import Choose, Suite
from calfat_plugin.suites.summary import CellSummary, Score, SuiteSummary

NOTHING = "-"
CHOSEN = "chosen"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
# What Markdown would read as HTML, an entity, emphasis, code or a link.
_MARKDOWN = re.compile(r"[\\`*<\[\]]|(?<!\w)_|_(?!\w)|~(?=~)|&(?=#?\w+;)")
_CSV_NUMBERS = ("mean_percent", "std_percent", "reported_percent", "difference_points")
_CSV_FIGURES = ("mean", "std")  # of what is no accuracy; only in tables that have such a column


# --- the pieces -------------------------------------------------------------------------------------------------------


def measured(score: Score) -> str:
    """``61.35 ± 0.42``; without the deviation for a single seed, ``-`` for none."""
    if score.mean is None:
        return NOTHING
    shown = percent if score.is_accuracy else "{:.4g}".format
    return shown(score.mean) if score.std is None else f"{shown(score.mean)} ± {shown(score.std)}"


def beside(score: Score) -> str:
    """``64.69, -3.34!``: the published number and the difference, marked when beyond the tolerance; empty for none."""
    if score.reported is None:
        return ""
    if score.difference is None:
        return percent(score.reported)
    return f"{percent(score.reported)}, {points(score.difference)}{'!' if score.beyond else ''}"


def caption(summary: SuiteSummary) -> str:
    """What the numbers mean, in a few sentences."""
    suite, seeds = summary.suite, ", ".join(map(str, summary.plan.seeds))
    text = (
        f"Accuracy in percent on the test split, mean ± sample standard deviation over n of the seeds {seeds}; "
        "the global model after the final round."
    )
    figures = {label for cell in summary.cells for label, score in cell.scores.items() if not score.is_accuracy}
    if figures:
        shown = ", ".join(heading for label, heading in suite.metrics.items() if label in figures)
        text += f" Not in percent, but as measured: {shown}."
    fewer = [f"{heading} on {found}" for label, heading in suite.metrics.items() if (found := _fewer(summary, label))]
    text += f" Not on all test examples: {', '.join(fewer)}." if fewer else ""
    text += f" {how_chosen(suite.choose, summary.plan.choices)}" if suite.choose else ""
    sources = list(dict.fromkeys(cell.source for cell in summary.cells if cell.source is not None))
    if sources:
        text += f" In parentheses: {'; '.join(sources)}, and measured minus reported"
        limits = ", ".join(f"{suite.metrics[label]} {limit:g}" for label, limit in suite.tolerance.items())
        text += f" (! marks more points than: {limits})." if limits else "."
    left = sum(bool(cell.left) for cell in summary.cells)
    if left:
        text += f" {left} of {len(summary.cells)} cells have seeds left to run."
    return text


def _fewer(summary: SuiteSummary, label: str) -> str:
    """``32 of 359`` where runs measured a metric on fewer examples than their others; empty where none did."""
    found: dict[str, None] = {}
    for evaluations in (run.results.get("evaluations", ()) for cell in summary.cells for run in cell.runs):
        number = {str(each["label"]): each.get("num_examples") or 0 for each in evaluations}
        if label in number and number[label] < (most := max(number.values(), default=0)):
            found[f"{number[label]:,} of {most:,}"] = None
    return " or ".join(found)


def notes(summary: SuiteSummary) -> list[tuple[str, str]]:
    """(cell, remark) for whatever the numbers alone do not say; each on one line, whatever a run printed."""
    return [(_line(cell.cell.name), _line(note)) for cell in summary.cells for note in cell.notes]


# --- formats ----------------------------------------------------------------------------------------------------------


def markdown(summary: SuiteSummary) -> str:
    """A pipe table with caption and notes. Texts stay texts: none of them is Markdown or HTML."""
    axes = columns(summary.suite)
    rows = [[*axes, "n", *summary.suite.metrics.values()]]
    rows += ([*names(summary, cell), count(cell), *map(_in_text, cell.scores.values())] for cell in summary.cells)
    rows = [[_in_markdown(text).replace("|", "\\|") for text in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(
        1, ["-" * width if index < len(axes) else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    )
    aligned = ["<" if index < len(axes) else ">" for index in range(len(widths))]
    lines = [
        "| "
        + " | ".join(f"{text:{align}{width}}" for text, align, width in zip(row, aligned, widths, strict=True))
        + " |"
        for row in rows
    ]
    text = f"# {_in_markdown(summary.suite.title)}\n\n" + "\n".join(lines) + f"\n\n{_in_markdown(caption(summary))}\n"
    remarks = "".join(f"- {_in_markdown(f'{cell}: {note}')}\n" for cell, note in notes(summary))
    return text + (f"\n{remarks}" if remarks else "")


def latex(summary: SuiteSummary) -> str:
    """A ``table`` for ``\\usepackage{booktabs}``; groups of the first axis are set apart."""
    axes = columns(summary.suite)
    title = _line(summary.suite.title)
    end = "" if title.endswith((".", "!", "?")) else "."
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{_escape(f'{title}{end} {caption(summary)}')}}}",
        f"  \\label{{tab:{summary.suite.name.replace('_', '-')}}}",
        f"  \\begin{{tabular}}{{{'l' * len(axes)}{'r' * (1 + len(summary.suite.metrics))}}}",
        "    \\toprule",
        _latex_row(*map(_escape, axes), "$n$", *map(_escape, summary.suite.metrics.values())),
    ]
    for group in summary.groups():
        lines.append("    \\midrule")
        lines += (
            _latex_row(*map(_escape, names(summary, cell)), count(cell), *map(_in_latex, cell.scores.values()))
            for cell in group
        )
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    lines += [f"% {cell}: {note}" for cell, note in notes(summary)]
    return "\n".join(lines) + "\n"


def as_csv(summary: SuiteSummary) -> str:
    """A row for each cell and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    axes = columns(summary.suite)
    figures = not all(score.is_accuracy for cell in summary.cells for score in cell.scores.values())
    more = _CSV_FIGURES if figures else ()
    writer.writerow([*axes, "metric", "n", *_CSV_NUMBERS, "beyond", "source", "note", *more])
    for cell in summary.cells:
        for label, score in cell.scores.items():
            numbers = (score.mean, score.std, score.reported, score.difference)
            plain = ("",) * 2 if score.is_accuracy else tuple("" if n is None else repr(n) for n in numbers[:2])
            numbers = numbers if score.is_accuracy else (None,) * 4
            writer.writerow(
                [
                    *names(summary, cell),
                    label,
                    len(score.values),
                    *("" if number is None else f"{100 * number:.4f}" for number in numbers),
                    "" if score.beyond is None else str(score.beyond).lower(),
                    (cell.source or "") if score.reported is not None else "",
                    "; ".join(cell.notes),
                    *plain[: len(more)],
                ]
            )
    return text.getvalue()


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
        "units": "accuracies are fractions in [0, 1]; std is the sample standard deviation (ddof 1) over seeds",
        **({"choose": _choose_as_json(suite.choose, summary)} if suite.choose else {}),
        "cells": [_cell_as_json(cell) for cell in summary.cells],
        "calfat_plugin": __version__,
    }


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


# --- helpers ----------------------------------------------------------------------------------------------------------


def columns(suite: Suite) -> list[str]:
    """The headings of :func:`names`."""
    return [*suite.axes, *([CHOSEN] if suite.choose else [])]


def names(summary: SuiteSummary, cell: CellSummary) -> list[str]:
    """The first columns of a row: its labels, and what was chosen where the suite chooses."""
    chosen = NOTHING if cell.choice is None else chosen_text(cell.choice) or NOTHING
    return [*cell.cell.labels, *([chosen] if summary.suite.choose else [])]


def count(cell: CellSummary) -> str:
    """How many seeds a row's numbers are over."""
    return NOTHING if cell.cell.skipped else str(cell.finished)


def _line(text: str) -> str:
    return " ".join(text.split())


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", _line(text))


def _in_text(score: Score) -> str:
    known = beside(score)
    return measured(score) + (f" ({known})" if known else "")


def _in_latex(score: Score) -> str:
    text = "--" if score.mean is None else measured(score)
    text = f"${text}$".replace("±", "\\pm") if score.std is not None else text
    known = beside(score).replace("+", "$+$").replace("-", "$-$")
    return text + (f" {{\\scriptsize ({known})}}" if known else "")


def _latex_row(*cells: str) -> str:
    return "    " + " & ".join(cells) + " \\\\"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _choose_as_json(choose: Choose, summary: SuiteSummary) -> dict[str, Any]:
    return {
        "metric": list(choose.metric),
        "by": choose.by,
        "seeds": list(choose.seeds),
        "how": how_chosen(choose, summary.plan.choices),
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
                **{key: getattr(score, key) for key in ("mean", "std", "reported", "difference")},
                "beyond_tolerance": score.beyond,
            }
            for label, score in cell.scores.items()
        },
        "runs": [
            {
                "seed": run.run.seed,
                "directory": str(run.run.directory),
                "status": run.status,
                "message": run.message or None,
                "seconds": run.results.get("seconds"),
                "evaluations": run.results.get("evaluations", []),
            }
            for run in cell.runs
        ],
        **({} if cell.choice is None else {"choice": choice_as_json(cell.choice)}),
        "seeds_left": cell.left,
        "notes": cell.notes,
    }
