"""What ``calfat trust`` looks like on the console: progress with the time left, then the evidence and the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calfat_plugin.cli.attack_progress import AttackProgress
from calfat_plugin.cli.progress import clock
from calfat_plugin.judging.check import Check
from calfat_plugin.judging.evidence import Evidence
from calfat_plugin.judging.examine import TrustObserver, TrustReport
from calfat_plugin.report.numbers import interval, percent

_STYLES = {"holds": "bold green", "overstated": "bold red", "not robust": "bold red", "not shown": "bold yellow"}


class TrustProgress(AttackProgress, TrustObserver):
    """A line before every check with the time left, and one for every attack."""

    def begin(self, check: Check, number: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"; at most about {clock(seconds_left)} left"
        self.say(f"check {number} of {total}: {check.title}{left}")

    def checked(self, check: Check, evidence: Evidence) -> None:
        for row in evidence.rows:
            self.say(f"  {row.attack}  {percent(row.accuracy)}  {row.seconds:.1f} s")


def show_verdict(console: Console, outcome: TrustReport) -> None:
    """Print the evidence as a table, and below it the verdict and the sentence for a reviewer."""
    table = Table()
    table.add_column("check")
    table.add_column("attack")
    for heading in ("eps", "accuracy", "95 % interval", "left"):
        table.add_column(heading, justify="right")
    for evidence in outcome.evidence:
        for index, row in enumerate(evidence.rows):
            table.add_row(
                evidence.check if index == 0 else "",
                row.attack,
                row.eps,
                percent(row.accuracy),
                "" if row.interval is None else interval(*row.interval),
                "" if row.left is None else percent(row.left),
            )
    console.print(table)
    verdict = outcome.verdict
    console.print(Text.assemble("verdict: ", (verdict.text, _STYLES[verdict.word])))
    console.print(verdict.sentence, soft_wrap=True)
    for cause in verdict.causes[1:]:
        console.print(f"  also: {cause}", soft_wrap=True)
    skipped = [check.title for check in outcome.checks if check.name not in {e.check for e in outcome.evidence}]
    if skipped:
        console.print(f"not needed for the verdict (--full runs them): {', '.join(skipped)}", soft_wrap=True)
    console.print(f"results: {outcome.path}", soft_wrap=True)
