"""``calfat attack CHECKPOINT_OR_RUN_DIR ...``: how much of a finished model's accuracy an attacker leaves."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from calfat_plugin import report
from calfat_plugin.analyses.attack import AttackPlan, AttackReport, planned
from calfat_plugin.analyses.attack import attack as measure
from calfat_plugin.cli.errors import INTERRUPTED, fail, stop_signals, warn, write_page
from calfat_plugin.cli.options import json_option, json_output, model_options, targets_argument
from calfat_plugin.disk import read_json
from calfat_plugin.errors import CalfatError, OptionError
from calfat_plugin.progress import choose_progress, verbatim_console
from calfat_plugin.report.run_tables import EVALUATION_HEAD, evaluation_row, show_alarms, show_evaluations
from calfat_plugin.report.table import Row, Table, print_table

_RESUME = "The same command again continues inside AutoAttack where it stopped; other attacks start again."


@click.command()
@targets_argument
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
    targets: tuple[Path, ...],
    attacks: str,
    eps: str | None,
    output: Path | None,
    plain: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Attack a finished model: a checkpoint of a run, or any PyTorch model with --model, --weights and --dataset.

    Writes accuracies in both counting conventions, per class, with everything needed to make them again, and findings
    about numbers that look too good. Of several runs each has its own results file, and one table shows all; those that
    cannot be measured are named at the end, with exit code 2.
    """
    with stop_signals(), json_output(as_json) as show:
        how["attacks"] = _split(attacks, "--attacks")
        how["eps"] = ()
        if eps is not None:
            how["eps"] = _split(eps, "--eps")
        if len(targets) > 1:
            _refuse_for_several(targets, output)
            _attack_several(targets, how, plain, show)
        else:
            target = targets[0] if targets else None
            plan, measured = _attack_one(target, how, plain, output)
            show_evaluations(verbatim_console(), measured.results)
            _finish_one(plan, measured)
            show({"file": str(measured.path), "results": read_json(measured.path)})


def _attack_one(
    target: Path | None, how: Mapping[str, Any], plain: bool, output: Path | None = None
) -> tuple[AttackPlan, AttackReport]:
    """Attack one model."""
    plan = planned(target, **how)
    warnings: dict[str, None] = {}
    for experiment in plan.experiments:
        warnings.update(dict.fromkeys(experiment.warnings))
    warn(*warnings)
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    try:
        with choose_progress(verbatim_console(), plain=plain) as progress:
            return plan, measure(plan, command, progress, output)
    except KeyboardInterrupt:
        fail("stopped.", _RESUME, INTERRUPTED)


def _finish_one(plan: AttackPlan, measured: AttackReport) -> None:
    """Show findings and files, and draw the page of the run, where there is one, again."""
    console = verbatim_console()
    show_alarms(console, measured.alarms)
    console.print(f"results: {measured.path}", soft_wrap=True)
    for curve in measured.curves:
        console.print(f"curve: {curve}", soft_wrap=True)
    run = plan.run
    if run is not None and (run / "report.html").exists():
        write_page(lambda: report.write_run_report(run), run)


def _refuse_for_several(targets: Sequence[Path], output: Path | None) -> None:
    if output is not None:
        raise OptionError(
            f"--output {output}: one file cannot have the results of {len(targets)} runs. Leave it out: each run gets "
            "a file in its attacks/."
        )
    places: set[Path] = set()
    for target in targets:
        if target.resolve() in places:
            raise OptionError(f"{target}: is named twice; name it once.")
        places.add(target.resolve())


def _attack_several(targets: Sequence[Path], how: Mapping[str, Any], plain: bool, show: Callable[[Any], None]) -> None:
    """Attack one run after the other; one that cannot be measured does not stop the others."""
    console = verbatim_console()
    rows: list[Row] = []
    measured: list[dict[str, Any]] = []
    refused: dict[Path, CalfatError] = {}
    for number, target in enumerate(targets, start=1):
        console.print(f"[{number}/{len(targets)}] {target}", soft_wrap=True)
        try:
            plan, attacked = _attack_one(target, how, plain)
        except CalfatError as error:
            refused[target] = error
            warn(f"{target} is not measured: {error}")
        except SystemExit:  # the user stopped it
            left = shlex.join(map(str, [*refused, *targets[number - 1 :]]))
            print(f"Name those alone that are left, for the others would be measured again: {left}", file=sys.stderr)
            raise
        else:
            _finish_one(plan, attacked)
            for result in attacked.results:
                rows.append([str(target), *evaluation_row(result)])
            measured.append({"run": str(target), "file": str(attacked.path), "results": read_json(attacked.path)})
    if rows:
        print_table(console, Table("", ["run", *EVALUATION_HEAD], rows, 2))
    not_measured = [{"run": str(target), "error": str(error)} for target, error in refused.items()]
    show({"runs": measured, "not_measured": not_measured})
    if refused:
        others = "The others are done; what" if measured else "What"
        fail(f"not measured: {', '.join(map(str, refused))}. {others} is wrong is said above.")


def _split(text: str, flag: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise OptionError(f"{flag} '{text}': there is nothing between two commas, or nothing at all.")
    return parts
