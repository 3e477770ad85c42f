"""``calfat new-flower-app DIR --recipe RECIPE``: an app that `flwr run` starts, simulated or between SuperNodes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import yaml

from calfat_plugin.cli.options import seed_option, set_option
from calfat_plugin.disk import write_new_folder
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.request import checked_experiment

_APP = '''\
"""What Flower starts: server and client of calfat-plugin, with the recipe that lies beside this file."""

from pathlib import Path

from calfat_plugin.cli.flower_app import client_app, server_app

server = server_app(Path(__file__).parent)
client = client_app(Path(__file__).parent)
'''
_PROJECT = """\
[project]
name = {name}
version = "1.0.0"
description = {description}
license = "Apache-2.0"
# Flower would install what stands here for each run. The environment of SuperLink and SuperNodes has it already:
# pip install 'calfat-plugin[flower]'
dependencies = []

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "calfat_app:server"
clientapp = "calfat_app:client"

[tool.flwr.app.config]
recipe = "recipe.yaml"
# As `calfat run` has it: SECTION.KEY=VALUE, separated by spaces.
set = ""
# Where the server writes: each run makes a folder in here, or writes to run-dir if that is not empty.
runs = {runs}
run-dir = ""
# true: continue the newest unfinished run of this seed in runs, or the one in run-dir.
resume = false
"""


@click.command(name="new-flower-app")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--recipe", required=True, metavar="RECIPE", help="What it runs: a file, or the name of a shipped one.")
@set_option
@seed_option
def new_flower_app(folder: Path, recipe: str, overrides: tuple[str, ...], seed: int | None) -> None:
    """Write a Flower app for RECIPE into a new folder DIR.

    `flwr run DIR` starts it in Flower's simulation; between SuperNodes each of them is a client with its own data.
    """
    experiment = checked_experiment(read_document(recipe), [*overrides, "common_args.host=flower"], seed)
    name = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-") or "app"
    described = f"{experiment.trainer.name} on {experiment.dataset.name}, federated by calfat-plugin"
    texts = {"name": name, "description": described, "runs": str(folder.absolute() / "runs")}
    project = _PROJECT.format(**{key: _toml(text) for key, text in texts.items()})
    named = experiment.document.with_value(("calfat", "name"), experiment.name, "its file")
    text = yaml.safe_dump(dict(named.data), sort_keys=False, width=120)
    ignored = "/runs/\n"  # else Flower sends their JSON and YAML files to the nodes
    files = {"pyproject.toml": project, "calfat_app.py": _APP, "recipe.yaml": text, ".gitignore": ignored}
    write_new_folder(folder, files, "Choose another folder.")
    nodes = experiment.num_clients
    click.echo(
        f"{folder}: a Flower app for {experiment.name}, {nodes} clients. In simulation:\n"
        f"  flwr run {shlex.quote(str(folder))} local --federation-config 'num-supernodes={nodes}' --stream\n"
        "Between SuperNodes: docs/howto/flower.md"
    )


def _toml(text: str) -> str:
    """A text as TOML has it: as JSON does, but that DEL, too, is written as its number."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
