"""Results on the console: the table of evaluations and, below it, findings about its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.maths.intervals import of_accuracy
from calfat_plugin.report.numbers import counted, interval, listed_ids, percent
from calfat_plugin.results import FREQUENCY, WORST, EvaluationResult

_COLUMNS = 3  # figures beside the accuracy that a table has columns for; more of them are lines below it


def show_final(console: Console, results: Sequence[EvaluationResult], alarms: Sequence[Alarm]) -> None:
    """Print the final evaluation of a run: its table, whom the model fails, and findings."""
    if results:
        console.print(results_table(results, title="global model after the final round, test split"))
    else:
        console.print("no final evaluation: calfat.evaluators is empty", soft_wrap=True)
    for line in (*figure_lines(results), *worst_lines(results)):
        console.print(line, soft_wrap=True)
    show_alarms(console, alarms)


def results_table(results: Sequence[EvaluationResult], *, title: str | None = None, by_eps: bool = False) -> Table:
    """One evaluation a row, with columns for the figures that any of them has beside its accuracy, if they are few."""
    table = Table(title=title, title_justify="left")
    table.add_column("attack" if by_eps else "evaluator")
    figures = _figures(results) if len(_figures(results)) <= _COLUMNS else []
    words = (name.replace("_", " ") for name in figures)
    for heading in (*["eps"] * by_eps, "accuracy", "95 % interval", "release", *words, "examples", "seconds"):
        table.add_column(heading, justify="right", no_wrap=heading in ("95 % interval", "accuracy"))
    for result in results:
        found = of_accuracy((result.accuracy,), result.num_examples)
        table.add_row(
            *((result.label, _budget(result)) if by_eps else (_with_budget(result),)),
            percent(result.accuracy),
            "" if found is None else interval(*found),
            percent(result.accuracy_release),
            *(f"{result.metrics[name]:.4g}" if name in result.metrics else "" for name in figures),
            str(result.num_examples),
            f"{result.seconds:.1f}",
        )
    return table


def figure_lines(results: Sequence[EvaluationResult]) -> list[str]:
    """What evaluations measured beside their accuracy, a line each; nothing where the table has columns for it."""
    if len(_figures(results)) <= _COLUMNS:
        return []
    return [
        f"{_with_budget(result)}: "
        + ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in result.metrics.items())
        for result in results
        if result.metrics
    ]


def _figures(results: Sequence[EvaluationResult]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.metrics))


def _with_budget(result: EvaluationResult) -> str:
    """``pgd20 (linf 8/255)``, and ``natural``."""
    return result.label + (f" ({budget})" if (budget := _budget(result)) else "")


def _budget(result: EvaluationResult) -> str:
    return f"{result.settings['norm']} {result.settings['eps']}" if "eps" in result.settings else ""


def worst_lines(results: Sequence[EvaluationResult]) -> list[str]:
    """Whom the model fails, a line for classes and one for clients: ``worst class: natural 71.0 % (8)``.

    With a long tail, also one each for the classes of its head, middle and tail.
    """
    lines = []
    names = {name: name.replace("-", " ") for name in (*WORST, *FREQUENCY)}
    for key, name in names.items():
        of_each = ((result.label, getattr(result, key.replace("-", "_"))) for result in results)
        found = [(label, worst) for label, worst in of_each if worst is not None]
        shown = ", ".join(f"{label} {percent(worst.accuracy)} ({listed_ids(worst.ids)})" for label, worst in found)
        lines += [f"{name}: {shown}"] if shown else []
    return lines


def show_alarms(console: Console, alarms: Sequence[Alarm]) -> None:
    """Print each finding with its code; nothing when there is none."""
    if alarms:
        console.print(Text(f"{counted(len(alarms), 'finding')} about these numbers:", style="yellow"))
    for alarm in alarms:
        console.print(Text.assemble("  ", (alarm.code, "bold"), f": {alarm.text}"), soft_wrap=True)
