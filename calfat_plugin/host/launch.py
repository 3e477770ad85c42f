"""How every run is handed to the host: FedML imported in silence, started with our arguments, and put back after."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from calfat_plugin.compat import all_entry_points, make_torchvision_importable

if "torch" not in sys.modules:  # in the process that workers are forked from, where no plugins were looked for
    list(all_entry_points())  # before torch, which fails where one of them is damaged

import torch

make_torchvision_importable()  # before fedml, which imports torchvision

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its dependencies deprecate is nothing that our users could fix
    import fedml

from calfat_plugin.errors import HostError  # noqa: E402
from calfat_plugin.host import patches  # noqa: E402

__all__ = ["fedml", "run_host"]


def run_host(args: SimpleNamespace, device: torch.device, algorithm: Callable[[Any], Any]) -> None:
    """Let FedML's runner run an algorithm of ours, under the patches that a run needs.

    Args:
        args: the host's arguments.
        device: where to train.
        algorithm: makes the runner's ``algorithm_flow`` from the arguments as ``fedml.init`` leaves them.

    Raises:
        HostError: the installed host is of an untested version, or cannot start its tracking.
    """
    patches.check_version(fedml.__version__)
    with patches.reseeds_the_world(), patches.no_telemetry(), patches.logs_every_step():
        args = _init(args)
        fedml.FedMLRunner(args, device, None, None, algorithm_flow=algorithm(args)).run()


def _init(args: SimpleNamespace) -> Any:
    """``fedml.init``, in which a W&B run may fail to start for want of a login, a network, or a right name."""
    try:
        return fedml.init(args, check_env=False, should_init_logs=False)
    except Exception as error:  # whatever wandb raises
        if not args.enable_wandb:
            raise
        raise HostError(
            f"tracking_args.enable_wandb: FedML could not open a run of Weights & Biases ({type(error).__name__}: "
            f"{error}). Log in with `wandb login`, check the keys wandb_*, or set enable_wandb: false."
        ) from error
