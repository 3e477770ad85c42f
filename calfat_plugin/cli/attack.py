"""``calfat attack CHECKPOINT_OR_RUN_DIR``: how much of a finished model's accuracy an attacker leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from calfat_plugin import report
from calfat_plugin.analyses.attack import attack as measure
from calfat_plugin.analyses.attack_plan import planned
from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import INTERRUPTED, fail, stop_signals, warn, write_page
from calfat_plugin.cli.options import model_options, target_argument
from calfat_plugin.cli.progress import choose_progress, verbatim_console
from calfat_plugin.cli.results import show_alarms, show_evaluations
from calfat_plugin.disk import read_json
from calfat_plugin.errors import OptionError

_RESUME = "The same command again continues inside AutoAttack where it stopped; other attacks start again."


@click.command()
@target_argument
@click.option(
    "--attacks",
    default="fgsm,pgd20,cw20,autoattack",
    show_default=True,
    metavar="NAME,...",
    help="Evaluators; LABEL=NAME to have one twice. `calfat plugins` lists them.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="LABEL.OPTION=VALUE",
    help="An option of an attack; repeatable. Example: --set pgd20.restarts=5",
)
@click.option("--eps", metavar="EPS,...", help="Budgets such as 8/255; several draw a curve. Default: the recipe's.")
@model_options
@click.option("--examples", type=click.IntRange(min=1), metavar="N", help="A fixed random subset of the test split.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Results file. Default: a free name in RUN_DIR/attacks/."
)
@json_option
def attack(
    target: Path | None,
    attacks: str,
    eps: str | None,
    output: Path | None,
    plain: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Attack a finished model: a checkpoint of a run, or any PyTorch model with --model, --weights and --dataset.

    Writes accuracies in both counting conventions, per class, with everything needed to make them again, and findings
    about numbers that look too good.
    """
    with stop_signals(), json_output(as_json) as show:
        budgets = () if eps is None else _split(eps, "--eps")
        plan = planned(target, attacks=_split(attacks, "--attacks"), eps=budgets, **how)
        warn(*dict.fromkeys(text for experiment in plan.experiments for text in experiment.warnings))
        console = verbatim_console()
        try:
            with choose_progress(console, plain=plain) as progress:
                outcome = measure(plan, [Path(sys.argv[0]).name, *sys.argv[1:]], progress, output)
        except KeyboardInterrupt:
            fail("stopped.", _RESUME, INTERRUPTED)
        show_evaluations(console, outcome.results)
        show_alarms(console, outcome.alarms)
        console.print(f"results: {outcome.path}", soft_wrap=True)
        for curve in outcome.curves:
            console.print(f"curve: {curve}", soft_wrap=True)
        if (run := plan.run) is not None and (run / "report.html").exists():
            write_page(lambda: report.write_run_report(run), run)
        show({"file": str(outcome.path), "results": read_json(outcome.path)})


def _split(text: str, flag: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise OptionError(f"{flag} '{text}': there is nothing between two commas, or nothing at all.")
    return parts
