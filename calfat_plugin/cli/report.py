"""``calfat report DIR...``: the page of a run, or of several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from calfat_plugin.cli.options import json_option, json_output
from calfat_plugin.report import write_comparison, write_run_report
from calfat_plugin.report.comparison import find_runs


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="The page to write; default: report.html in DIR."
)
@json_option
def report(directories: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Make one self-contained HTML page.

    A run directory gives the page of that run. Several, or a directory with several runs below it such as a suite's,
    give a page that sets them side by side, seeds of one recipe averaged. Figures go beside the page as SVG, PDF
    and PNG.
    """
    with json_output(as_json) as show:
        runs: list[Path] = []
        for directory in directories:
            runs += find_runs(directory)
        if len(directories) == 1 and runs == [directories[0]]:
            page = write_run_report(runs[0], out)
        else:
            page = write_comparison(directories, out)
        click.echo(f"report: {page}")
        show({"report": str(page), "runs": [str(run) for run in runs]})
