"""``calfat per-class RUN_DIR``: methods compared client by client and class by class."""

from __future__ import annotations

from pathlib import Path

import click

from calfat_plugin import report
from calfat_plugin.analyses.per_class import compare_per_class, parse_picks
from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import stop_signals, warn
from calfat_plugin.cli.options import plugin_option, trust_option
from calfat_plugin.disk import read_json
from calfat_plugin.errors import RunError
from calfat_plugin.runs.loaded_run import Trust, find_checkpoint


@click.command(name="per-class")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--methods",
    default="calfat,fedgairat",
    show_default=True,
    help="Local trainers, with commas between them; options as in recipes: '{name: fedgairat, lam: -1}'. A label names "
    "one that is there twice: '{name: fedgairat, lam: -2, label: lam -2}'.",
)
@click.option("--evaluators", default="natural,pgd20", show_default=True, help="What to measure, likewise.")
@click.option(
    "--checkpoint",
    default="last",
    show_default=True,
    help="Global model to start from: last, best-natural or best-robust.",
)
@plugin_option
@trust_option
@json_option
def per_class(
    run_dir: Path,
    methods: str,
    evaluators: str,
    checkpoint: str,
    plugins: tuple[Path, ...],
    trust: Trust,
    as_json: bool,
) -> None:
    """Train every client of a run one local epoch with each method, from one global model, and measure class by class.

    Nothing is aggregated; each local model is measured on the whole test split. The learning rate is the recipe's,
    without schedule; groups of clients are left out. Writes per_class.json into RUN_DIR, keeps an earlier one as
    per_class-1.json, and makes its report anew.
    """
    if run_dir.is_file():  # there it would clash with the default of --checkpoint
        _, run = find_checkpoint(run_dir, otherwise="Give a run directory.")
        raise RunError(f"{run_dir}: this is a file, expected a run directory, such as {run}.")
    with stop_signals(), json_output(as_json) as show:
        compare_per_class(
            run_dir,
            methods=parse_picks(methods, "--methods"),
            evaluators=parse_picks(evaluators, "--evaluators"),
            checkpoint=checkpoint,
            say=click.echo,
            warn=warn,
            plugins=plugins,
            trust=trust,
        )
        page = report.write_run_report(run_dir)
        results = run_dir / "per_class.json"
        click.echo(f"results: {results}\nreport: {page}")
        show({"file": str(results), "report": str(page), "results": read_json(results)})
