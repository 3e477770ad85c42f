"""``calfat check FILE``: everything that can be known to be wrong without data, device, torch or FedML."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from calfat_plugin.cli.errors import warn
from calfat_plugin.cli.options import json_option, json_output, recipe_options
from calfat_plugin.errors import OptionError, RecipeError
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.document import Document
from calfat_plugin.report.numbers import counted
from calfat_plugin.runs.request import checked_experiment


@click.command()
@recipe_options
@click.option("--show", is_flag=True, help="Print the recipe in full, every default and derived value written out.")
@click.option("--strict", is_flag=True, help="Take every warning for an error.")
@json_option
def check(
    recipe: str,
    overrides: tuple[str, ...],
    seed: int | None,
    of_host: tuple[str, ...],
    plugins: tuple[Path, ...],
    show: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Check RECIPE, or every cell of a suite, without running it."""
    overrides += of_host
    document = read_document(recipe, piped=True)  # once: it may be a pipe
    with json_output(as_json) as print_json:
        if "axes" not in document.data:
            warnings, text, content = _check_recipe(document, overrides, seed, plugins, show)
        elif not show:
            warnings, text, content = _check_suite(document, overrides, seed, plugins)
        else:
            listing = f"calfat suite {shlex.quote(recipe)} --dry-run"
            raise OptionError(f"--show: {document.file} is a suite, not one recipe. List its runs with: {listing}")
        warn(*warnings)
        if strict and warnings:
            raise RecipeError(f"{recipe}: {counted(len(warnings), 'warning')}; --strict allows none.")
        click.echo(text)
        print_json({"file": document.file, "warnings": warnings, **content})


_Checked = tuple[tuple[str, ...], str, dict[str, Any]]  # warnings, a text to print, and the same as JSON


def _check_recipe(
    document: Document, overrides: tuple[str, ...], seed: int | None, plugins: tuple[Path, ...], show: bool
) -> _Checked:
    experiment = checked_experiment(document, overrides, seed, plugins=plugins)
    train, as_run = experiment.train, experiment.as_run()
    if show:
        text = yaml.safe_dump(as_run, sort_keys=False, width=120).rstrip()
    else:
        text = (
            f"{document.file}: good. {experiment.trainer.name} with {experiment.aggregator.name} on "
            f"{experiment.dataset.name} ({experiment.partition.name}), {experiment.model.name}: "
            f"{train.client_num_in_total} clients, {experiment.clients_per_round} a round, {train.comm_round} rounds, "
            f"seed {experiment.seed}, on {experiment.host.title}."
        )
        if experiment.clients:
            from calfat_plugin.report.labels import difference

            groups = [f"{group.name}: {difference(group, experiment)}" for group in experiment.clients]
            text += f" Groups: {'; '.join(groups)}."
    return experiment.warnings, text, {"kind": "recipe", "recipe": as_run}


def _check_suite(
    document: Document, overrides: tuple[str, ...], seed: int | None, plugins: tuple[Path, ...]
) -> _Checked:
    from calfat_plugin.suites import load_suite
    from calfat_plugin.suites.plan import make_plan, registry_of
    from calfat_plugin.suites.suite import MAX_SEED

    if seed is not None and seed > MAX_SEED:
        raise OptionError(f"--seed {seed}: expected a whole number, 0 <= value <= {MAX_SEED}.")
    suite = load_suite(document, plugins)
    seeds = None if seed is None else (seed,)
    plan = make_plan(suite, registry_of(suite, overrides), overrides=overrides, seeds=seeds)
    runs = f" and {plan.num_runs} runs"
    content = {"kind": "suite", "cells": len(plan.cells), "runs": plan.num_runs}
    choice_runs = len(plan.choosing.runs)
    if choice_runs:
        runs = f", {choice_runs} choice runs{runs}"
        content["choice_runs"] = choice_runs
    return plan.warnings, f"{document.file}: good. A suite of {len(plan.cells)} cells{runs}.", content
