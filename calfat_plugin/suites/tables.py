"""A suite's table as people read it (Markdown, LaTeX, in percent) and for programs (CSV; JSON, in fractions)."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from calfat_plugin import __version__
from calfat_plugin.disk import TRY_AGAIN, write_text
from calfat_plugin.errors import OptionError, RunError
from calfat_plugin.maths.intervals import Score
from calfat_plugin.options import to_plain
from calfat_plugin.report.labels import WORST_DEFINED, partition_note
from calfat_plugin.report.numbers import counted, paired_points, score_texts
from calfat_plugin.results import WORST, evaluator_of
from calfat_plugin.suites.parse import Suite
from calfat_plugin.suites.summary import CellSummary, SuiteSummary, comparisons
from calfat_plugin.suites.tuning import as_json as choice_as_json
from calfat_plugin.suites.tuning import chosen_text, how_chosen

NOTHING = "-"
CHOSEN, TRUST = "chosen", "calfat trust"
_PERCENT = "Accuracy in percent on the test split, mean"
INTERVALS = (
    "In brackets: a 95 % interval of the mean, Student's over seeds, or Wilson's of one run over its test examples. "
    "Bold: the best mean, where the 95 % interval of its difference to each other one, paired over seeds, excludes "
    "zero; rows compare if data, partition, model, clients, threat model and evaluator agree."
)
DIFFERENCES = (
    "Differences in points with 95 % intervals (Student's), paired over the seeds that both rows have: of the best row "
    "to the next best, and of each other row to the best."
)
PLANNED = (
    "Planned comparisons: {} minus the other row, in points, paired over seeds, with 95 % intervals (Student's, not "
    "corrected) and p-values (paired t test), corrected after Holm within each family."
)
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

# --- the pieces -------------------------------------------------------------------------------------------------------


def caption(summary: SuiteSummary) -> str:
    """What the numbers mean, in a few sentences."""
    suite, seeds = summary.suite, ", ".join(map(str, summary.plan.seeds))
    text = (
        f"{_PERCENT} ± sample standard deviation over n of the seeds {seeds}; "
        f"the global model after the final round. {INTERVALS}"
    )
    figures = {label for cell in summary.cells for label, score in cell.scores.items() if not score.is_accuracy}
    if figures:
        shown = ", ".join(heading for label, heading in suite.metrics.items() if label in figures)
        text += f" Not in percent, but as measured: {shown}."
    text += f" {WORST_DEFINED}" if any(label.endswith(tuple(WORST)) for label in suite.metrics) else ""
    text += _one_partition(summary)
    text += f" {how_chosen(suite.choose, summary.plan.choices)}" if suite.choose else ""
    sources = list(dict.fromkeys(cell.source for cell in summary.cells if cell.source is not None))
    if sources:
        text += (
            f" In parentheses: {'; '.join(sources)}, and measured (as counted there, the release's way) minus reported"
        )
        limits = ", ".join(f"{suite.metrics[label]} {limit:g}" for label, limit in suite.reported.tolerance.items())
        text += f" (! marks more points than: {limits})." if limits else "."
    left = sum(bool(cell.left) for cell in summary.cells)
    if left:
        text += f" {left} of {len(summary.cells)} cells have seeds left to run."
    return text


def _one_partition(summary: SuiteSummary) -> str:
    """Behind a blank: which rows have one partition for all seeds; empty where none has."""
    rows = {row.cell.name: row.cell.experiment.as_run() for row in summary.cells if row.cell.experiment is not None}
    note = partition_note(rows) if len(summary.plan.seeds) > 1 else ""
    return f" {note}" if note else ""


def headings(summary: SuiteSummary) -> list[str]:
    """Of the numbers: ``AutoAttack (64 of 359 images)`` where others in the table are of more images."""
    fewer = {label: _fewer(summary, evaluator_of(label)) for label in summary.suite.metrics}
    return [
        f"{head} ({fewer[label]} images)" if fewer[label] else head for label, head in summary.suite.metrics.items()
    ]


def _fewer(summary: SuiteSummary, label: str) -> str:
    """``32 of 359`` where runs measured on fewer examples than with other evaluators; empty where none did.

    Of runs that are only in a record, ``at most 32``, as their recipes say.
    """
    found: dict[str, None] = {}
    for evaluations in (run.results.get("evaluations", ()) for cell in summary.cells for run in cell.runs):
        number = {str(each["label"]): each.get("num_examples") or 0 for each in evaluations}
        if label in number and number[label] < (most := max(number.values(), default=0)):
            found[f"{number[label]:,} of {most:,}"] = None
    recorded = (cell.cell for cell in summary.cells if any(run.run.recorded for run in cell.runs))
    picks = [pick for cell in recorded if cell.experiment is not None for pick in cell.experiment.evaluators]
    limits = dict.fromkeys(getattr(pick.options, "max_examples", None) for pick in picks if pick.label == label)
    return " or ".join(found or (f"at most {limit:,}" for limit in limits if limit is not None))


def notes(summary: SuiteSummary) -> list[tuple[str, str]]:
    """(cell, remark) for whatever the numbers alone do not say; each on one line, whatever a run printed."""
    return [(_line(cell.cell.name), _line(note)) for cell in summary.cells for note in cell.notes]


# --- formats ----------------------------------------------------------------------------------------------------------


def markdown(summary: SuiteSummary) -> str:
    """A pipe table with caption and notes. Texts stay texts: none of them is Markdown or HTML."""
    numbers = ["n", *headings(summary)]
    rows = [[*names(summary, cell), count(cell), *map(_in_text, cell.scores.values())] for cell in summary.cells]
    text = f"# {_in_markdown(summary.suite.title)}\n\n{_pipes(columns(summary), numbers, rows)}\n"
    text += f"{_in_markdown(caption(summary))}\n"
    rows = [
        [*cell.cell.labels, count(cell), *(score_texts(score).rival or NOTHING for score in cell.scores.values())]
        for cell in summary.cells
    ]
    rows = [row for row in rows if set(row[len(summary.suite.axes) + 1 :]) - {NOTHING}]
    text += f"\n{_pipes([*summary.suite.axes], numbers, rows)}\n{DIFFERENCES}\n" if rows else ""
    text += _planned(summary)
    remarks = "".join(f"- {_in_markdown(f'{cell}: {note}')}\n" for cell, note in notes(summary))
    return text + (f"\n{remarks}" if remarks else "")


def _planned(summary: SuiteSummary) -> str:
    """The comparisons that the suite plans, one table for each family; empty where it plans none."""
    plan = summary.suite.compare
    if plan is None:
        return ""
    level = f" Level: within {plan.level:g} points in {plan.robust}, by two one-sided tests." if plan.level else ""
    text = f"\n{_in_markdown(PLANNED.format(plan.row) + level)}\n"
    for family in comparisons(summary):
        rows = []
        for one in family:
            n = NOTHING if one.difference is None else str(one.difference.seeds)
            p_values = ("" if p_value is None else f"{p_value:.2g}" for p_value in (one.p_value, one.adjusted))
            numbers = [n, paired_points(one.difference) or NOTHING, *p_values, one.word or "not all seeds yet"]
            rows.append([one.row.cell.name, one.endpoint, *numbers])
        text += f"\n{_pipes(['row', 'endpoint'], ['n', 'difference', 'p', 'p, corrected', 'result'], rows)}"
    return text


def _pipes(axes: Sequence[str], numbers: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Rows of names under ``axes``, which are texts of others, then of numbers, which are Markdown of ours."""
    left = len(axes)
    rows = [[_in_markdown(text).replace("|", "\\|") for text in (*axes, *numbers)]]
    rows += [[*(_in_markdown(text).replace("|", "\\|") for text in row[:left]), *row[left:]] for row in body]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, [f"{'':-<{width - (n >= left)}}{':' * (n >= left)}" for n, width in enumerate(widths)])
    lines = (" | ".join(f"{text:{'<' if n < left else '>'}{widths[n]}}" for n, text in enumerate(row)) for row in rows)
    return "".join(f"| {line} |\n" for line in lines)


def latex(summary: SuiteSummary) -> str:
    """A booktabs ``table`` with a short caption; the rest of what is said of the numbers is below it, in comments."""
    axes, seeds = columns(summary, chosen=False), counted(len(summary.plan.seeds), "seed")
    title = _line(summary.suite.title)
    end = "" if title.endswith((".", "!", "?")) else "."
    numbers = f"{_PERCENT} ± sample standard deviation over {seeds} [95 % interval].{_one_partition(summary)}"
    rows = [[*map(_escape, axes), "$n$", *map(_escape, headings(summary))]]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{_escape(f'{title}{end} {numbers}')}}}",
        f"  \\label{{tab:{summary.suite.name.replace('_', '-')}}}",
        f"  \\begin{{tabular}}{{{'l' * len(axes)}{'r' * (1 + len(summary.suite.metrics))}}}",
        "    \\toprule",
    ]
    for group in ([], *summary.groups()):
        for cell in group:
            texts = map(_escape, names(summary, cell, chosen=False))
            rows.append([*texts, count(cell), *map(_in_latex, cell.scores.values())])
        lines += [f"    {' & '.join(row)} \\\\" for row in rows] + ["    \\midrule"]
        rows = []
    lines[-1:] = ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    lines += [f"% {_line(caption(summary))}", *(f"% {cell}: {note}" for cell, note in notes(summary))]
    return "\n".join(lines) + "\n"


# --- helpers ----------------------------------------------------------------------------------------------------------


def columns(summary: SuiteSummary, chosen: bool = True) -> list[str]:
    """The headings of :func:`names`."""
    with_chosen = [CHOSEN] if summary.suite.choose and chosen else []
    return [*summary.suite.axes, *with_chosen, *([TRUST] if summary.judged else [])]


def names(summary: SuiteSummary, cell: CellSummary, chosen: bool = True) -> list[str]:
    """The first columns of a row: its labels, what was chosen where the suite chooses, unless ``chosen`` is False, and
    the verdict of ``calfat trust`` where some row has one."""
    value = NOTHING if cell.choice is None else chosen_text(cell.choice) or NOTHING
    verdict = [cell.verdict or NOTHING] if summary.judged else []
    return [*cell.cell.labels, *([value] if summary.suite.choose and chosen else []), *verdict]


def count(cell: CellSummary) -> str:
    """How many seeds a row's accuracies are over."""
    return NOTHING if cell.cell.skipped else str(cell.ended)


def _line(text: str) -> str:
    return " ".join(text.split())


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", _line(text))


def _in_text(score: Score) -> str:
    """``**61.35 ± 0.42** [60.8, 61.9] (64.69, -3.34!)``."""
    found = score_texts(score)
    mean = f"{found.mean} ± {found.std}" if found.std else found.mean or NOTHING
    known = _beside(score)
    parts = (f"**{mean}**" if found.best else mean, found.interval, f"({known})" if known else "")
    return " ".join(filter(None, parts))


def _in_latex(score: Score) -> str:
    found = score_texts(score)
    mean = f"\\mathbf{{{found.mean}}}" if found.best else found.mean or "--"
    text = f"${mean} \\pm {found.std}$" if found.std else mean
    known = _beside(score).replace("+", "$+$").replace("-", "$-$")
    small = " ".join(filter(None, (found.interval.replace("-", "$-$"), f"({known})" if known else "")))
    return text + (f" {{\\scriptsize {small}}}" if small else "")


def _beside(score: Score) -> str:
    """``64.69, -3.34!``: the published number and the difference, marked when beyond the tolerance; empty for none."""
    found = score_texts(score)
    return ", ".join(filter(None, (found.reported, f"{found.difference}{'!' * found.beyond}")))


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


# --- files ------------------------------------------------------------------------------------------------------------


def check_record(suite: Suite) -> None:
    """Refuse a record that a table would take the place of."""
    if suite.record is not None and suite.record.resolve() in [
        (suite.directory / name).resolve() for name in ("table.md", "table.tex", "table.csv", "suite.json")
    ]:
        raise OptionError(
            f"--record {suite.record}: a table of the suite is written there, over the record. Choose another name."
        )


def write_tables(summary: SuiteSummary) -> Path:
    """Write ``table.md``, ``.tex``, ``.csv`` and ``suite.json`` to the suite's directory, which is returned."""
    texts = {
        "table.md": markdown(summary),
        "table.tex": latex(summary),
        "table.csv": as_csv(summary),
        "suite.json": json.dumps(as_json(summary), indent=2, allow_nan=False) + "\n",
    }
    folder = summary.suite.directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text, TRY_AGAIN)
    except OSError as error:
        raise RunError(f"{folder}: the tables cannot be written ({error.strerror}).") from None
    return folder


def as_csv(summary: SuiteSummary) -> str:
    """A row for each cell and metric; further columns where some metric is a figure and no accuracy."""
    scores = [(cell, *scored) for cell in summary.cells for scored in cell.scores.items()]
    figures = any(not score.is_accuracy for _, _, score in scores)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, (cell, label, score) in enumerate(scores):
        row = _csv_row(cell, score)
        if figures:
            of = Score({}) if score.is_accuracy else score
            row |= {name: "" if value is None else repr(value) for name, value in (("mean", of.mean), ("std", of.std))}
            row["values"] = " ".join(map(repr, of.values))
        if number == 0:
            writer.writerow([*columns(summary), "metric", "n", *row])
        writer.writerow([*names(summary, cell), label, len(score.values), *row.values()])
    return text.getvalue()


def _csv_row(cell: CellSummary, score: Score) -> dict[str, str]:
    """Column to text; the numbers of a figure have columns of their own."""
    of = score if score.is_accuracy else Score({})
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
        "seeds_left": cell.left,
        "notes": cell.notes,
    }
    return content if cell.choice is None else {**content, "choice": choice_as_json(cell.choice)}


def _hundredths(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.4f}"
