"""``calfat trust CHECKPOINT_OR_RUN_DIR``: whether the robust accuracy of a finished model may be believed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from calfat_plugin import report
from calfat_plugin.analyses.attack import AttackPlan, planned
from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import INTERRUPTED, fail, stop_signals, warn, write_page
from calfat_plugin.cli.options import model_options, target_argument
from calfat_plugin.disk import read_json
from calfat_plugin.judging.examine import FILE, TrustReport, examine
from calfat_plugin.progress import choose_progress, verbatim_console
from calfat_plugin.report.evaluations import trust_table
from calfat_plugin.report.table import print_table
from calfat_plugin.run_files import TrustResults
from calfat_plugin.typed_json import read_typed

_STYLES = {"holds": "bold green", "overstated": "bold red", "not robust": "bold red", "not shown": "bold yellow"}
_RESUME = "The same command again continues with the check that was stopped."


@click.command()
@target_argument
@click.option(
    "--full", is_flag=True, help="Run every check, and AutoAttack on all images, also if the verdict is clear."
)
@click.option(
    "--transfer",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="Try the adversarial examples of another run's model, too; repeatable.",
)
@click.option("--eps", metavar="EPS", help="The budget, such as 8/255. Default: the recipe's.")
@model_options
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    metavar="N",
    help="A fixed random subset of the test split. Default: 500, or all if there are fewer.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Results file. Default: RUN_DIR/trust.json.")
@json_option
def trust(
    target: Path | None,
    full: bool,
    transfer: tuple[Path, ...],
    eps: str | None,
    output: Path | None,
    plain: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Judge whether a robust accuracy may be believed: the number holds, is overstated, or is not shown.

    A battery of checks attacks the model, the cheapest first, until the verdict is clear. It looks for what a weak
    attack or masked gradients leave behind. The evidence and a sentence for reviewers are written to trust.json; the
    same command continues there after a kill.
    """
    with stop_signals(), json_output(as_json) as show:
        plan = planned(target, attacks=(), eps=() if eps is None else (eps,), **how)
        warn(*plan.experiments[0].warnings)
        outcome = judge(plan, transfer, full=full, output=output, plain=plain)
        show({"file": str(outcome.path), "results": read_json(outcome.path)})


def judge(
    plan: AttackPlan,
    transfer: tuple[Path, ...] = (),
    *,
    full: bool = False,
    output: Path | None = None,
    plain: bool = False,
) -> TrustReport:
    """Judge one model, with its progress and its verdict on the console."""
    console = verbatim_console()
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    try:
        with choose_progress(console, plain=plain) as progress:
            outcome = examine(plan, transfer, full=full, output=output, command=command, observer=progress)
    except KeyboardInterrupt:
        fail("stopped.", _RESUME, INTERRUPTED)
    show_verdict(console, outcome)
    run = plan.run
    if run is not None and outcome.path == run / FILE and (run / "report.html").exists():
        write_page(lambda: report.write_run_report(run), run)
    return outcome


def show_verdict(console: Console, outcome: TrustReport) -> None:
    """Print the evidence as a table, and below it the verdict and the sentence for a reviewer."""
    results = read_typed(TrustResults, outcome.path)
    if results is not None:
        print_table(console, trust_table(results))
    verdict = outcome.verdict
    console.print(Text.assemble("verdict: ", (verdict.text, _STYLES[verdict.word])))
    console.print(verdict.sentence, soft_wrap=True)
    for cause in verdict.causes[1:]:
        console.print(f"  also: {cause}", soft_wrap=True)
    skipped = [check.title for check in outcome.checks if check.name not in {e.check for e in outcome.evidence}]
    if skipped:
        console.print(f"not needed for the verdict (--full runs them): {', '.join(skipped)}", soft_wrap=True)
    console.print(f"results: {outcome.path}", soft_wrap=True)
