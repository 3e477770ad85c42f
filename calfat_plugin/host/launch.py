"""How every run is handed to the host: FedML imported in silence, started with our arguments, and put back after."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from calfat_plugin.compat import make_torchvision_importable

make_torchvision_importable()  # before fedml, which imports torchvision

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its dependencies deprecate is nothing that our users could fix
    import fedml

from calfat_plugin.host import patches  # noqa: E402

__all__ = ["fedml", "run_host"]


def run_host(args: SimpleNamespace, device: torch.device, algorithm: Callable[[Any], Any]) -> None:
    """Let FedML's runner run an algorithm of ours, under the patches that a run needs.

    Args:
        args: the host's arguments.
        device: where to train.
        algorithm: makes the runner's ``algorithm_flow`` from the arguments as ``fedml.init`` leaves them.

    Raises:
        HostError: the installed host is of an untested version.
    """
    patches.check_version(fedml.__version__)
    tracked = args.enable_tracking or args.enable_wandb or args.using_mlops
    with patches.reseeds_the_world(), nullcontext() if tracked else patches.calls_home():
        args = fedml.init(args, check_env=False, should_init_logs=False)
        fedml.FedMLRunner(args, device, None, None, algorithm_flow=algorithm(args)).run()
