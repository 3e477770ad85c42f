"""The host's defects that reach our users, and what we put in their place while a run lasts.

Each patch is named after its defect, says why it is there, and applies only to the host versions it was tested with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from calfat_plugin.errors import HostError

TESTED_VERSIONS = ("0.9.6",)


def check_version(version: str) -> None:
    """Refuse a host that the patches were not tested with.

    Raises:
        HostError: with the versions that work.
    """
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
    the process there for the vendor's agent, which no one else reads.
    """
    import fedml

    def no_fetch(args: Any, version: str = "release") -> None:
        args.version = args.config_version = version

    with (
        mock.patch.dict(os.environ),
        mock.patch.object(fedml, "set_env_kv", os.environ.__setitem__),
        mock.patch.object(fedml, "load_env", return_value=None),
        mock.patch.object(fedml.core.mlops, "fetch_config", no_fetch),
        mock.patch.object(fedml.FedMLRunner, "log_runner_result", return_value=None),
    ):
        yield


@contextmanager
def logs_every_step() -> Iterator[None]:
    """Keep the host from logging twice for each client and each aggregation that it has begun or ended something.

    These are the events of the vendor's platform. Without it, which is how we run, nobody else gets them.
    """
    from fedml import mlops

    with mock.patch.object(mlops, "event", _nothing):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """What such an event comes to."""


@contextmanager
def reseeds_the_world() -> Iterator[None]:
    """Give the caller's global random generators back as they were.

    ``fedml.init`` seeds Python's, numpy's and torch's global generators with the run's seed. Our streams are derived
    and need none of it; a notebook that runs a recipe should not find its own randomness reset.
    """
    import torch

    from calfat_plugin.federation.global_rng import generators_kept

    deterministic = torch.backends.cudnn.deterministic
    with generators_kept():
        try:
            yield
        finally:
            torch.backends.cudnn.deterministic = deterministic
