"""Results on the console: tables of evaluations and, below them, findings about their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.report.evaluations import evaluations_table, figures_of, tails_table, worst_table
from calfat_plugin.report.labels import budget
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.table import print_table
from calfat_plugin.results import EarlyStop, EvaluationResult


def show_final(
    console: Console,
    results: Sequence[EvaluationResult],
    alarms: Sequence[Alarm],
    class_names: Sequence[str] = (),
    stop: EarlyStop | None = None,
) -> None:
    """Print the final evaluation of a run: its tables and findings; ``stop``: why training ended early, if it did."""
    if not results:
        console.print("no final evaluation: calfat.evaluators is empty", soft_wrap=True)
        return
    after = "the final round" if stop is None else f"round {stop.round}, where training stopped early"
    show_evaluations(console, results, f"model after {after}, test split")
    for table in (worst_table(results, class_names), tails_table(results, class_names)):
        if table:
            print_table(console, table)
    show_alarms(console, alarms)


def show_evaluations(console: Console, results: Sequence[EvaluationResult], title: str = "") -> None:
    """Print a table, and a line for what an evaluation measured beside accuracy."""
    print_table(console, evaluations_table(title, results))
    for result in results:
        figures = figures_of(result)
        if figures:
            name = f"{result.label} {budget(result.settings)}".rstrip()
            console.print(f"{name}: {figures}", soft_wrap=True)


def show_alarms(console: Console, alarms: Sequence[Alarm]) -> None:
    """Print each finding with its code; nothing when there is none."""
    if alarms:
        console.print(Text(f"{counted(len(alarms), 'finding')} about these numbers:", style="yellow"))
    for alarm in alarms:
        console.print(Text.assemble("  ", (alarm.code, "bold"), f": {alarm.text}"), soft_wrap=True)
