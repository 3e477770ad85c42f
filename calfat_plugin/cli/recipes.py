"""``calfat recipes``: the recipes that come with the package."""

from __future__ import annotations

import json

import click

from calfat_plugin.cli.as_json import json_option
from calfat_plugin.shipped import headline, shipped_files


@click.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the recipes that come with the package; their names work in every folder."""
    listed = [{"name": name, "summary": headline(file), "file": str(file)} for name, file in shipped_files().items()]
    if as_json:
        click.echo(json.dumps({"recipes": listed}, indent=2))
        return
    width = max(len(row["name"]) for row in listed)
    for row in listed:
        click.echo(f"{row['name']:<{width}}  {row['summary']}")
    click.echo("\ncalfat run NAME runs one of them; calfat init NAME copies it into this folder.")
