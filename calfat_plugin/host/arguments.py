"""Recipe to the flat ``args`` object that the host reads.

Only the host's own sections go there. The ``calfat:`` section never does: the host flattens everything onto one
object, where an attack's ``epsilon`` would land on the ``epsilon`` of its differential privacy.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

from calfat_plugin.experiment import Experiment


def host_arguments(experiment: Experiment, *, run_id: str) -> SimpleNamespace:
    """The host's view of a recipe. Its own sections only: ``calfat`` keys would collide with the host's."""
    recipe = experiment.recipe
    args = SimpleNamespace(
        yaml_config_file=recipe.document.file,
        run_id=run_id,
        rank=0,
        local_rank=0,
        role="server",
        using_mlops=False,
    )
    for extra in recipe.host_extra.values():
        vars(args).update(extra)
    for section in (
        recipe.common,
        recipe.data,
        recipe.model,
        recipe.train,
        recipe.device,
        recipe.comm,
        recipe.tracking,
    ):
        vars(args).update(dataclasses.asdict(section))
    args.data_cache_dir = str(Path(recipe.data.data_cache_dir).expanduser())
    args.client_num_per_round = recipe.clients_per_round
    args.worker_num = recipe.clients_per_round
    # The host asks us after every round; calfat.monitor decides what is evaluated.
    args.frequency_of_the_test = 1
    return args


def refuse_unsupported(experiment: Experiment) -> None:
    """Refuse what the host, or this version of the plugin, cannot do.

    Raises:
        RecipeError: with place, key path and what to write instead.
    """
    document, recipe = experiment.recipe.document, experiment.recipe
    if recipe.common.training_type != "simulation":
        raise document.error(
            ("common_args", "training_type"),
            f"'{recipe.common.training_type}' cannot be run by this version; write simulation.",
        )
    if recipe.comm.backend != "sp":
        raise document.error(
            ("comm_args", "backend"),
            f"'{recipe.comm.backend}' cannot be run by this version; write sp (one process).",
        )
