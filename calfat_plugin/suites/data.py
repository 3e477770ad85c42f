"""Fetching the data sets of a suite before its runs start side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from calfat_plugin.options import describe_options
from calfat_plugin.suites.plan import Plan


def fetch(plan: Plan) -> Iterator[str]:
    """Read every data set that the runs to do need, downloading what is missing and offered for download.

    Yields:
        A line for people, after each data set.

    Raises:
        DataError: one is missing and not offered for download, or damaged.
    """
    done = set()
    for run in (*plan.choosing.left, *plan.left):
        experiment, pick = run.experiment, run.experiment.dataset
        key = (pick.name, experiment.recipe.data.data_cache_dir, repr(pick.options))
        if key in done:
            continue
        done.add(key)
        if any(info.name == "download" for info in describe_options(pick.entry.config)):
            pick = dataclasses.replace(pick, options=dataclasses.replace(pick.options, download=True))
        dataset = dataclasses.replace(experiment, dataset=pick).load_dataset()
        yield f"{pick.name}: {len(dataset.train)} training and {len(dataset.test)} test examples"
