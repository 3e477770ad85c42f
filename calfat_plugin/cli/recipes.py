"""``calfat recipes``: the recipes and suites that come with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import click

from calfat_plugin.cli.as_json import json_option
from calfat_plugin.errors import OptionError, did_you_mean, listed
from calfat_plugin.recipe.document import KeyPath, read_document
from calfat_plugin.shipped import Folder, headline, shipped_files

#: What can be looked for: the key that names it, and what is meant where there is none.
_NAMED: Mapping[str, tuple[KeyPath, str]] = {
    "dataset": (("data_args", "dataset"), "digits"),
    "method": (("calfat", "trainer"), "calfat"),
    "aggregator": (("calfat", "aggregator"), "fedavg"),
}


@click.command()
@click.option("--dataset", metavar="NAME", help="Only those that use this data set, such as cifar10.")
@click.option("--method", metavar="NAME", help="Only those that use this local trainer, such as fedpgd.")
@click.option("--aggregator", metavar="NAME", help="Only those that use this aggregator, such as scaffold.")
@click.option("--kind", type=click.Choice(["recipe", "suite"]), help="Only recipes, or only suites.")
@json_option
def recipes(kind: str | None, as_json: bool, **wanted: str | None) -> None:
    """List the recipes and suites that come with the package; their names work in every folder.

    A suite uses whatever one of its cells does.
    """
    asked = {what: name for what, name in wanted.items() if name is not None}
    found = [
        {"name": name, "kind": folder.removesuffix("s"), "summary": headline(file), "file": str(file)}
        | (_uses(folder, file) if asked or as_json else {})
        for folder in get_args(Folder)
        for name, file in shipped_files(folder).items()
    ]
    for what, name in asked.items():
        known = sorted({each for row in found for each in row[what]})
        if name not in known:
            hint = did_you_mean(name, known) or f" There are: {listed(known)}."
            raise OptionError(f"--{what} {name}: nothing that comes with the package uses it.{hint}")
    found = [row for row in found if kind in (None, row["kind"]) and all(asked[what] in row[what] for what in asked)]
    _show(found, as_json)


def _show(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"recipes": found}, indent=2))
        return
    width = max((len(row["name"]) for row in found), default=0)
    for kind, command in (("recipe", "calfat run NAME"), ("suite", "calfat suite NAME")):
        rows = [row for row in found if row["kind"] == kind]
        if rows:
            click.echo(f"{kind}s   {command}")
            for row in rows:
                click.echo(f"  {row['name']:<{width}}  {row['summary']}")
            click.echo()
    click.echo(
        "calfat init NAME copies one of them into this folder." if found else "Nothing uses all of these together."
    )


def _uses(folder: Folder, file: Path) -> dict[str, list[str]]:
    """The data sets, methods and aggregators of a recipe, or of a suite's cells together."""
    from calfat_plugin.suites.parse import Setting, load_suite

    if folder == "recipes":
        document, cells = read_document(file), [tuple[Setting, ...]()]
    else:
        suite = load_suite(file)
        document, cells = suite.base_document, list(map(suite.settings_of, suite.grid()))
    found = {}
    for what, (path, default) in _NAMED.items():
        values = [
            [document.get(path), *(each.value for each in cell if each.path in (path, (*path, "name")))][-1]
            for cell in cells
        ]
        found[what] = sorted({_name(value, default) for value in values})
    return found


def _name(value: Any, default: str) -> str:
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else default
