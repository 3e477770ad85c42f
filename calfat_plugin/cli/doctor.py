"""``calfat doctor``: what is wrong with this installation, and how to fix it."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator

import click

from calfat_plugin.cli.as_json import json_option
from calfat_plugin.cli.diagnosis import Finding, diagnose
from calfat_plugin.report.numbers import counted

_WIDTH = 80
_INDENT = 26
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Find what is wrong with this installation and say how to fix it.

    Exits with 1 when something that runs need is broken.
    """
    findings = []
    for finding in diagnose():
        findings.append(finding)
        if not as_json:
            for line in _lines(finding):
                click.echo(line)
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    elif failed or warned:
        click.echo(f"{counted(failed, 'failure')}, {counted(warned, 'warning')}.")
    else:
        click.echo("Nothing is wrong.")
    sys.exit(1 if failed else 0)


def _lines(finding: Finding) -> Iterator[str]:
    """A finding, wrapped for 80 columns; what to do stays in one line, so that a command can be copied."""
    mark = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status], bold=finding.status != "ok")
    found = textwrap.wrap(finding.found, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(found):
        yield (f"{mark}  {finding.check:<{_INDENT - 6}}" if number == 0 else " " * _INDENT) + line
    if finding.todo:
        yield f"      -> {finding.todo}"
