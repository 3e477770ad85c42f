"""How every run is handed to the host: FedML imported in silence, started with our arguments, and put back after.

The host's defects that reach our users are patched while a run lasts. Each patch is named after its defect, says why it
is there, and applies only to the host versions it was tested with.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from calfat_plugin.compat import make_torchvision_importable, quick_imports

with quick_imports():
    import torch

make_torchvision_importable()  # before fedml, which imports torchvision

with warnings.catch_warnings(), quick_imports():
    warnings.simplefilter("ignore")  # what its dependencies deprecate is nothing that our users could fix
    import fedml

from calfat_plugin.errors import HostError  # noqa: E402
from calfat_plugin.federation.global_rng import generators_kept  # noqa: E402
from calfat_plugin.host.arguments import TESTED_VERSIONS  # noqa: E402

__all__ = ["fedml", "run_host"]


def run_host(args: SimpleNamespace, device: torch.device, algorithm: Callable[[Any], Any]) -> None:
    """Let FedML's runner run an algorithm of ours, under the patches that a run needs."""
    check_version(fedml.__version__)
    with reseeds_the_world(), no_telemetry():
        args = fedml.init(args, check_env=False, should_init_logs=False)
        fedml.FedMLRunner(args, device, None, None, algorithm_flow=algorithm(args)).run()


def check_version(version: str) -> None:
    """Refuse a host that the patches were not tested with."""
    if version not in TESTED_VERSIONS:
        raise HostError(
            f"fedml {version} is installed; calfat_plugin is tested with {', '.join(TESTED_VERSIONS)}. "
            f"Install it with: pip install fedml=={TESTED_VERSIONS[-1]}"
        )


@contextmanager
def no_telemetry() -> Iterator[None]:
    """Keep ``fedml.init`` off the network and out of the home directory.

    Even with tracking off, ``fedml.init`` asks the vendor's server for a configuration (five tries, no time-out),
    creates ``~/.fedml``, and on a TLS error appends its own root certificate to certifi's bundle. Its environment name
    is kept in ``~/.fedml`` too; here it lives in this process's environment only. Its runner leaves a file named after
    the process there for the vendor's agent, which no one else reads. And for the vendor's platform it logs twice for
    each client and each aggregation that something has begun or ended.
    """

    def no_fetch(args: Any, version: str = "release") -> None:
        args.version = args.config_version = version

    with (
        mock.patch.dict(os.environ),
        mock.patch.object(fedml, "set_env_kv", os.environ.__setitem__),
        mock.patch.object(fedml, "load_env", return_value=None),
        mock.patch.object(fedml.core.mlops, "fetch_config", no_fetch),
        mock.patch.object(fedml.FedMLRunner, "log_runner_result", return_value=None),
        mock.patch.object(fedml.mlops, "event", lambda *_, **__: None),  # noqa: PT008 (a mock keeps all calls)
    ):
        yield


@contextmanager
def reseeds_the_world() -> Iterator[None]:
    """Give the caller's global random generators back as they were.

    ``fedml.init`` seeds Python's, numpy's and torch's global generators with the run's seed. Our streams are derived
    and need none of it; a notebook that runs a recipe should not find its own randomness reset.
    """
    deterministic = torch.backends.cudnn.deterministic
    with generators_kept():
        try:
            yield
        finally:
            torch.backends.cudnn.deterministic = deterministic
