"""``calfat init NAME``: a copy of a shipped recipe, to be changed."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

import click

from calfat_plugin.cli.options import complete_shipped
from calfat_plugin.errors import RecipeError, did_you_mean
from calfat_plugin.shipped import shipped_files


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
