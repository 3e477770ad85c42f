"""``calfat check FILE``: everything that can be known to be wrong without data, device, torch or FedML."""

from __future__ import annotations

import click
import yaml

from calfat_plugin.cli.errors import user_errors, warn
from calfat_plugin.cli.options import load_experiment, recipe_argument, seed_option, set_option
from calfat_plugin.recipe import read_document


@click.command()
@recipe_argument
@set_option
@seed_option
@click.option("--show", is_flag=True, help="Print the recipe in full, every default and derived value written out.")
def check(recipe: str, overrides: tuple[str, ...], seed: int | None, show: bool) -> None:
    """Check RECIPE, or every cell of a suite, without running it."""
    with user_errors():
        document = read_document(recipe)  # once: it may be a pipe
        if "axes" in document.data:
            _check_suite(recipe, overrides, seed)
            return
        experiment = load_experiment(document, overrides, seed)
    if show:
        click.echo(yaml.safe_dump(experiment.as_run(), sort_keys=False, width=120), nl=False)
        return
    train = experiment.recipe.train
    click.echo(
        f"{recipe}: good. {experiment.trainer.name} with {experiment.aggregator.name} on {experiment.dataset.name} "
        f"({experiment.partition.name}), {experiment.model.name}: {train.client_num_in_total} clients, "
        f"{experiment.recipe.clients_per_round} a round, {train.comm_round} rounds, seed {experiment.seed}."
    )


def _check_suite(file: str, overrides: tuple[str, ...], seed: int | None) -> None:
    from calfat_plugin.registry import Registry
    from calfat_plugin.suites import load_suite
    from calfat_plugin.suites.plan import make_plan

    seeds = None if seed is None else (seed,)
    plan = make_plan(load_suite(file), Registry.load(), overrides=overrides, seeds=seeds)
    warn(*plan.warnings)
    click.echo(f"{file}: good. A suite of {len(plan.cells)} cells and {len(plan.runs)} runs.")
