"""``calfat trust`` and ``calfat replay``: whether the robust accuracy of a finished model may be believed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from calfat_plugin import report
from calfat_plugin.analyses.attack import AttackPlan, planned
from calfat_plugin.analyses.replay import Doubt, Replay, open_evidence, write_pictures
from calfat_plugin.analyses.replay import replay as check_evidence
from calfat_plugin.cli.errors import INTERRUPTED, fail, stop_signals, warn, write_page
from calfat_plugin.cli.options import json_option, json_output, model_options, target_argument, which_model
from calfat_plugin.disk import read_json
from calfat_plugin.judging.examine import FILE, TrustReport, examine
from calfat_plugin.progress import choose_progress, verbatim_console
from calfat_plugin.report.numbers import counted, percent
from calfat_plugin.report.run_tables import trust_table
from calfat_plugin.report.table import Table, print_table
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
    """Print the evidence as a table, then the verdict and the sentence for a reviewer."""
    results = read_typed(TrustResults, outcome.path)
    if results is not None:
        print_table(console, trust_table(results))
    verdict = outcome.verdict
    console.print(Text.assemble("verdict: ", (verdict.text, _STYLES[verdict.word])))
    console.print(verdict.sentence, soft_wrap=True)
    for cause in verdict.causes[1:]:
        console.print(f"  also: {cause}", soft_wrap=True)
    checks_done = {evidence.check for evidence in outcome.evidence}
    skipped = [check.title for check in outcome.checks if check.name not in checks_done]
    if skipped:
        console.print(f"not needed for the verdict (--full runs them): {', '.join(skipped)}", soft_wrap=True)
    console.print(f"results: {outcome.path}", soft_wrap=True)


# --- calfat replay ----------------------------------------------------------------------------------------------------


_NOT_SHOWN = 1  # exit code: a number does not stand
_LISTED = 10  # images that are named
_DOUBTS = {
    "clean": "of which the model says another class than the evidence when clean",
    "falls": "whose adversarial image does not fall",
    "missing": "said to fall, of which no adversarial image is there",
}


@click.command()
@click.argument("target", metavar="RUN_DIR_OR_EVIDENCE", type=click.Path(path_type=Path))
@which_model
@click.option("--device", metavar="cpu|cuda:0", help="Default: as the recipe says.")
@click.option(
    "--png", "pictures", type=click.Path(path_type=Path), metavar="DIR", help="Write each image as PNG files, too."
)
@click.option(
    "--model-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask this file that `calfat export` wrote, a .pt2 or .onnx, in the model's place.",
)
@click.option("--eight-bit", is_flag=True, help="Round images to 8 bits a value before they are shown.")
@json_option
def replay(
    target: Path, as_json: bool, pictures: Path | None, model_file: Path | None, eight_bit: bool, **how: Any
) -> None:
    """Check the numbers of a finished evaluation by the adversarial images that it kept.

    Takes a run directory, or a file of evidence that `calfat attack` or `calfat trust` wrote. Every image is compared
    with data, ball and pixel range, and shown to the model again: seconds instead of the attack. Exit code 1: a number
    does not stand.
    """
    with stop_signals(), json_output(as_json) as show:
        run, evidence = open_evidence(target, **how)
        result = check_evidence(run, evidence, model_file=model_file, eight_bit=eight_bit, trust=how["trust"])
        console = verbatim_console()
        rows = []
        for number in result.numbers:
            stands = "yes" if number.stands else "no"
            counts = [str(number.num_examples), str(number.checked)]
            rows.append([number.label, percent(number.said), percent(number.shown), *counts, stands])
        title = f"{counted(len(result.falls), 'adversarial image')} in {result.path}"
        head = ["evaluator", "said", "shown", "images", "checked", "stands"]
        print_table(console, Table(title, head, rows))
        for line in lines_of(result):
            console.print(line, soft_wrap=True)
        content = result.as_json()
        if pictures is not None:
            still = write_pictures(result, pictures)
            fall = f"with 8 bits a value, {still} of {len(result.falls)} still fall"
            console.print(f"pictures: {pictures}; {fall}", soft_wrap=True)
            content["fall_with_8_bits"] = still
        show(content)
    if not result.stands:
        sys.exit(_NOT_SHOWN)


def lines_of(result: Replay) -> list[str]:
    """What a replay found, beside the table of its numbers."""
    facts, num_images = result.evidence.facts, len(result.falls)
    lines = [
        f"{int(result.falls.sum())} of {num_images} fall; all are in the {facts['norm']} ball of eps {facts['eps']}, "
        "in the pixel range, and of this data and these weights"
    ]
    exported = result.model_file
    if exported is not None:
        within = f"logits are within {result.difference:.1e} of the model's own"
        lines.append(f"asked: {exported.path.name} in {exported.runtime}; {within}")
    if result.eight_bit:
        lines.append("images were rounded to 8 bits a value before they were shown")
    if result.without:
        lines.append(f"no evidence is kept of: {', '.join(result.without)}")
    borderline = [doubt for doubt in result.doubts if doubt.borderline]
    if borderline:
        lines.append(
            f"{counted(len(borderline), 'borderline image')} may differ between processors: {_images_of(borderline)}; "
            "no number falls by them"
        )
    for kind, text in _DOUBTS.items():
        doubts = [doubt for doubt in result.doubts if doubt.what == kind and not doubt.borderline]
        if doubts:
            lines.append(f"{counted(len(doubts), 'image')} {text}: {_images_of(doubts)}")
    return lines


def _images_of(doubts: list[Doubt]) -> str:
    """The first images that doubts are about, each with its attack."""
    names = []
    for doubt in doubts[:_LISTED]:
        names.append(f"{doubt.image} ({doubt.attack})" if doubt.attack else str(doubt.image))
    if len(doubts) > _LISTED:
        names.append("...")
    return ", ".join(names)
