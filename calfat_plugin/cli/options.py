"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.host.arguments import refuse_unsupported
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

recipe_argument: Decorator = click.argument("recipe", metavar="RECIPE")
set_option: Decorator = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a recipe value; repeatable. Example: --set train_args.comm_round=20",
)
seed_option: Decorator = click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Short for --set common_args.random_seed=N."
)


download_option: Decorator = click.option(
    "--download", is_flag=True, help="Fetch a missing data set; short for --set calfat.dataset.download=true."
)


def load_experiment(recipe: str, overrides: tuple[str, ...], seed: int | None, *, download: bool = False) -> Experiment:
    """Read, override and resolve a recipe, and refuse what the host cannot run: all that needs neither torch nor FedML.

    Raises:
        CalfatError: whatever is wrong with it.
    """
    document = read_document(recipe).with_overrides(overrides)
    if seed is not None:
        document = document.with_value(("common_args", "random_seed"), seed, f"--seed {seed}")
    if download:
        document = document.with_value(("calfat", "dataset", "download"), True, "--download")
    experiment = assemble(document, Registry.load())
    refuse_unsupported(experiment)
    return experiment
