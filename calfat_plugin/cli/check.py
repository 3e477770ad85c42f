"""``calfat check FILE``: everything that can be known to be wrong without data, device, torch or FedML."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from calfat_plugin.cli.errors import user_errors, warn
from calfat_plugin.cli.options import plugin_option, recipe_argument, seed_option, set_option
from calfat_plugin.errors import RecipeError
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.document import Document
from calfat_plugin.runs.request import checked_experiment


@click.command()
@recipe_argument
@set_option
@seed_option
@plugin_option
@click.option("--show", is_flag=True, help="Print the recipe in full, every default and derived value written out.")
@click.option("--strict", is_flag=True, help="Take every warning for an error.")
def check(
    recipe: str, overrides: tuple[str, ...], seed: int | None, plugins: tuple[Path, ...], show: bool, strict: bool
) -> None:
    """Check RECIPE, or every cell of a suite, without running it."""
    with user_errors():
        document = read_document(recipe)  # once: it may be a pipe
        if "axes" in document.data:
            warnings, result = _check_suite(document, overrides, seed, plugins)
        else:
            warnings, result = _check_recipe(document, overrides, seed, plugins, show)
        warn(*warnings)
        if strict and warnings:
            raise RecipeError(f"{recipe}: {len(warnings)} warning{'s' * (len(warnings) > 1)}; --strict allows none.")
    click.echo(result)


def _check_recipe(
    document: Document, overrides: tuple[str, ...], seed: int | None, plugins: tuple[Path, ...], show: bool
) -> tuple[tuple[str, ...], str]:
    """(warnings, what to print)."""
    experiment = checked_experiment(document, overrides, seed, plugins=plugins)
    recipe, train = experiment.recipe, experiment.recipe.train
    if show:
        return recipe.warnings, yaml.safe_dump(experiment.as_run(), sort_keys=False, width=120).rstrip()
    return recipe.warnings, (
        f"{document.file}: good. {experiment.trainer.name} with {experiment.aggregator.name} on "
        f"{experiment.dataset.name} ({experiment.partition.name}), {experiment.model.name}: "
        f"{train.client_num_in_total} clients, {recipe.clients_per_round} a round, {train.comm_round} rounds, "
        f"seed {experiment.seed}."
    )


def _check_suite(
    document: Document, overrides: tuple[str, ...], seed: int | None, plugins: tuple[Path, ...]
) -> tuple[tuple[str, ...], str]:
    """(warnings, what to print)."""
    from calfat_plugin.registry import Registry
    from calfat_plugin.suites.parse import parse_suite
    from calfat_plugin.suites.plan import make_plan

    suite, seeds = parse_suite(document, plugins), None if seed is None else (seed,)
    plan = make_plan(suite, Registry.for_recipe(suite.base_document), overrides=overrides, seeds=seeds)
    return plan.warnings, f"{document.file}: good. A suite of {len(plan.cells)} cells and {len(plan.runs)} runs."
