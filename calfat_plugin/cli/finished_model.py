"""What ``calfat attack`` and ``calfat trust`` take: a checkpoint of a run, or any PyTorch model with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from calfat_plugin.cli.options import Decorator, plugin_option, together, trust_option
from calfat_plugin.threat import Norm

target_argument: Decorator = click.argument(
    "target", metavar="[CHECKPOINT_OR_RUN_DIR]", required=False, type=click.Path(path_type=Path)
)
#: Which model, on which data; of ``calfat replay``, too.
which_model = together(
    click.option(
        "--checkpoint", metavar="NAME", help="Of a run directory: last (default), best-natural or best-robust."
    ),
    click.option(
        "--model",
        metavar="MODULE:FACTORY",
        help="A model of your own, or a built-in name; needs --weights and --dataset.",
    ),
    click.option("--weights", type=click.Path(path_type=Path), help="Its state dict: safetensors, or torch.save's."),
    click.option("--dataset", metavar="NAME", help="The data set it is attacked on."),
    click.option("--data-dir", metavar="DIR", help="Where data sets are. Default: the recipe's data_cache_dir."),
    plugin_option,
    trust_option,
)
#: The same, how it is attacked, and where to compute.
model_options = together(
    click.option("--norm", type=click.Choice(get_args(Norm)), help="Default: the recipe's, else linf."),
    click.option(
        "--step-size",
        metavar="SIZE",
        help="Default: the recipe's (a multiple of eps follows --eps); eps/4 in another norm or without a recipe.",
    ),
    which_model,
    click.option("--download", is_flag=True, help="Fetch a missing data set."),
    click.option(
        "--batch-size", type=click.IntRange(min=1), metavar="B", help="Images at a time. Default: the recipe's."
    ),
    click.option(
        "--device", metavar="cpu|cuda:0", help="Default: as the recipe says; a GPU if there is one for --model."
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N", help="Seed of random starts. Default: the recipe's."
    ),
    click.option("--plain", is_flag=True, help="Lines instead of a bar, also on a terminal."),
)
