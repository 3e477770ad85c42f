"""How every run is handed to FedML: imported in silence, started with our arguments and trainers, and put back after.

The host's defects that reach our users are patched while a run lasts. Each patch is named after its defect, says why it
is there, and applies only to the host versions it was tested with.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from calfat_plugin.compat import quick_imports

with quick_imports():
    import torch

with warnings.catch_warnings(), quick_imports():
    warnings.simplefilter("ignore")  # what its dependencies deprecate is nothing that our users could fix
    import fedml

from fedml.core.alg_frame.client_trainer import ClientTrainer
from torch import Tensor

from calfat_plugin.disk import expanded
from calfat_plugin.errors import HostError
from calfat_plugin.federation.side_effects import generators_kept
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.installed import TESTED_FEDML

if TYPE_CHECKING:
    from calfat_plugin.experiment import Experiment

__all__ = ["MessageTrainer", "WorkerTrainer", "fedml", "host_arguments", "run_host", "silo_arguments"]


def run_host(args: SimpleNamespace, device: torch.device, algorithm: Callable[[Any], Any]) -> None:
    """Let FedML's runner run an algorithm of ours, under the patches that a run needs."""
    check_version(fedml.__version__)
    with reseeds_the_world(), no_telemetry():
        args = fedml.init(args, check_env=False, should_init_logs=False)
        fedml.FedMLRunner(args, device, None, None, algorithm_flow=algorithm(args)).run()


def host_arguments(experiment: Experiment) -> SimpleNamespace:
    """The host's view of a recipe: one flat object, with its own sections only.

    With the section ``calfat``, an attack's ``epsilon`` would become that of the host's differential privacy.
    """
    args = SimpleNamespace(
        yaml_config_file=experiment.document.file,
        run_id="0",
        rank=0,
        local_rank=0,
        process_id=0,
        role="server",
        using_mlops=False,
        enable_wandb=False,
    )
    for section in experiment.host_sections.values():
        for key, value in dataclasses.asdict(section).items():
            if value is not None:  # the host asks of some keys only whether they are there
                setattr(args, key, value)
    args.data_cache_dir = str(expanded(experiment.data.data_cache_dir))
    args.client_num_per_round = experiment.clients_per_round
    args.worker_num = experiment.clients_per_round
    # The host calls the evaluation after every round; calfat.monitor decides what is evaluated.
    args.frequency_of_the_test = 1
    return args


def silo_arguments(experiment: Experiment, *, rank: int) -> SimpleNamespace:
    """The same for one party of a cross-silo run; rank 0 is the server."""
    args = host_arguments(experiment)
    num_clients = experiment.num_clients
    args.scenario = "horizontal"
    args.rank = rank
    args.worker_num = num_clients
    # The host would take the first ``client_num_per_round`` ranks for the whole federation.
    if rank == 0:
        args.role = "server"
        args.client_id_list = str(list(range(1, num_clients + 1)))
    else:
        args.role = "client"
        args.client_id_list = str([rank])
    return args


def check_version(version: str) -> None:
    """Refuse a host that the patches were not tested with."""
    if version != TESTED_FEDML:
        raise HostError(
            f"fedml {version} is installed; calfat_plugin is tested with {TESTED_FEDML}. "
            f"Install it with: pip install fedml=={TESTED_FEDML}"
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


class MessageTrainer(ClientTrainer):
    """The host's trainer interface: parameters in, local training, parameters out."""

    def __init__(self, args: Any) -> None:
        super().__init__(None, args)
        self._message: Mapping[str, Tensor] = {}

    def get_model_params(self) -> Mapping[str, Tensor]:
        return self._message

    def set_model_params(self, model_parameters: Mapping[str, Tensor]) -> None:
        self._message = model_parameters


class WorkerTrainer(MessageTrainer):
    """The host's trainer with our :class:`Worker` inside."""

    def __init__(self, worker: Worker, args: Any) -> None:
        super().__init__(args)
        self.worker = worker
        self.round = 0

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        """Train client ``self.id``, which the host sets before each call."""
        self._message = self.worker.fit(self.id, self.round, self._message)
