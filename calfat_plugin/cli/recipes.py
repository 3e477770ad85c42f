"""``calfat recipes``: the recipes and suites that come with the package."""

from __future__ import annotations

import json
from typing import get_args

import click

from calfat_plugin.cli.as_json import json_option
from calfat_plugin.shipped import Folder, headline, shipped_files


@click.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the recipes and suites that come with the package; their names work in every folder."""
    listed = [
        {"name": name, "kind": folder.removesuffix("s"), "summary": headline(file), "file": str(file)}
        for folder in get_args(Folder)
        for name, file in shipped_files(folder).items()
    ]
    if as_json:
        click.echo(json.dumps({"recipes": listed}, indent=2))
        return
    width = max(len(row["name"]) for row in listed)
    for kind, command in (("recipe", "run"), ("suite", "suite")):
        click.echo(f"{kind}s   calfat {command} NAME")
        for row in listed:
            if row["kind"] == kind:
                click.echo(f"  {row['name']:<{width}}  {row['summary']}")
        click.echo()
    click.echo("calfat init NAME copies one of them into this folder.")
