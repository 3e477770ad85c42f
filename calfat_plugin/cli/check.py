"""``calfat check RECIPE``: everything that can be known to be wrong without data, device, torch or FedML."""

from __future__ import annotations

import click
import yaml

from calfat_plugin.cli.errors import user_errors, warn
from calfat_plugin.cli.options import load_experiment, recipe_argument, seed_option, set_option


@click.command()
@recipe_argument
@set_option
@seed_option
@click.option("--show", is_flag=True, help="Print the recipe in full, every default and derived value written out.")
def check(recipe: str, overrides: tuple[str, ...], seed: int | None, show: bool) -> None:
    """Check RECIPE without running it."""
    with user_errors():
        experiment = load_experiment(recipe, overrides, seed)
    for warning in experiment.recipe.warnings:
        warn(warning)
    if show:
        click.echo(yaml.safe_dump(experiment.as_run(), sort_keys=False, width=120), nl=False)
        return
    train = experiment.recipe.train
    click.echo(
        f"{recipe}: good. {experiment.trainer.name} with {experiment.aggregator.name} on {experiment.dataset.name} "
        f"({experiment.partition.name}), {experiment.model.name}: {train.client_num_in_total} clients, "
        f"{experiment.recipe.clients_per_round} a round, {train.comm_round} rounds, seed {experiment.seed}."
    )
