"""The runtimes: each way in which FedML runs an experiment, what it refuses, how many processes it has, how to run it.

This is the only place that knows what ``common_args.training_type`` and ``comm_args.backend`` mean, and the only module
of the host that other packages need to start a run. Neither torch nor FedML is imported before a run starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import ModelEntry
from calfat_plugin.errors import listed
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.runtime import BACKEND, Package, Runtime
from calfat_plugin.host.silo.runtimes import CrossSiloGRPC, CrossSiloMPI, CrossSiloMQTT
from calfat_plugin.options import describe_options
from calfat_plugin.recipe.document import KeyPath
from calfat_plugin.recipe.silo import SILO

if TYPE_CHECKING:
    from calfat_plugin.host.task import ServerTask
    from calfat_plugin.results import EvaluationResult

_PARTITION: KeyPath = ("data_args", "partition_method")


# --- simulations: any process may train any client --------------------------------------------------------------------


class Simulation(Runtime):
    """FedML's simulator in one process; with workers, its MPI simulator over pipes to processes of this machine."""

    @property
    def num_processes(self) -> int:
        return 1

    def lead(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        if task.workers:
            from calfat_plugin.host.mpi_simulation import lead
            from calfat_plugin.host.transports.pipes import PipeWorkers

            return lead(task, PipeWorkers(task.workers))
        return self._lead_without(task)

    def _lead_without(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        from calfat_plugin.host.simulation import simulate

        return simulate(task)


class MPISimulation(Simulation):
    """FedML's simulator as an MPI job: a server, and workers that share the clients of a round."""

    is_mpi_job = True
    package = Package("mpi4py", "mpi4py", "mpi")

    @property
    def num_processes(self) -> int:
        return self.experiment.clients_per_round + 1  # of those that --local starts; mpiexec may start others

    def _lead_without(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        from calfat_plugin.host.mpi_simulation import lead
        from calfat_plugin.host.transports.mpi import MPIWorkers

        return lead(task, MPIWorkers())


# --- which one --------------------------------------------------------------------------------------------------------

_SIMULATIONS: dict[str, type[Runtime]] = {"sp": Simulation, "MPI": MPISimulation}
_CROSS_SILO: dict[str, type[Runtime]] = {"GRPC": CrossSiloGRPC, "MPI": CrossSiloMPI, "MQTT_S3": CrossSiloMQTT}
_BY_TRAINING_TYPE = {"simulation": _SIMULATIONS, "cross_silo": _CROSS_SILO}


def runtime_of(experiment: Experiment) -> Runtime:
    """The runtime that a recipe asks for.

    Raises:
        RecipeError: the host has no such runtime.
    """
    training_type, backend = experiment.common.training_type, experiment.comm.backend
    runtimes = _BY_TRAINING_TYPE[training_type]
    if backend in runtimes:
        return runtimes[backend](experiment)
    if runtimes is _CROSS_SILO:
        complaint = f"'{backend}' cannot carry a cross-silo run; write {', '.join(runtimes)}."
    else:
        complaint = (
            f"'{backend}' carries cross-silo runs only: the host simulates in one process (sp) or in an MPI job (MPI). "
            "Write one of these, or common_args.training_type: cross_silo for one process a party."
        )
    raise experiment.document.error(BACKEND, complaint)


def supported_runtime(experiment: Experiment) -> Runtime:
    """:func:`runtime_of`, once it is known that it can run the experiment.

    Raises:
        RecipeError: with place, key path and what to write instead.
    """
    _refuse_foreign_partition(experiment)
    _refuse_small_images(experiment)
    runtime = runtime_of(experiment)
    runtime.refuse_unsupported()
    return runtime


def _refuse_foreign_partition(experiment: Experiment) -> None:
    """Refuse data that stays with the parties where there are none, or where a data set cannot be read in parts."""
    if experiment.partition.entry.name != SILO:
        return
    if not experiment.dataset.entry.per_party:
        complaint = (
            f"silo needs a data set that each party can read its own part of; '{experiment.dataset.name}' is one for "
            "all. Take image_folder, or a data set of your own with per_party."
        )
    elif _BY_TRAINING_TYPE[experiment.common.training_type] is not _CROSS_SILO:
        complaint = "silo leaves the data with the parties, so it needs common_args.training_type: cross_silo."
    else:
        return
    raise experiment.document.error(_PARTITION, complaint)


def _refuse_small_images(experiment: Experiment) -> None:
    """A network that halves its maps has a smallest image. Where only the files tell a size, building it complains."""
    model, dataset = experiment.model, experiment.dataset
    shape, smallest = dataset.entry.image_shape, model.entry.min_size(model.options)
    if shape is None or min(shape[1:]) >= smallest:
        return
    offered = [entry for entry, _ in experiment.registry.offers(ModelEntry)]
    by_default = [entry for entry in offered if not any(info.required for info in describe_options(entry.config))]
    fitting = [entry.name for entry in by_default if entry.min_size(entry.config()) <= min(shape[1:])]
    raise experiment.document.error(
        ("model_args", "model"),
        f"'{model.name}' takes images from {smallest}x{smallest} pixels, and those of '{dataset.name}' have "
        f"{shape[1]}x{shape[2]}. Models that fit: {listed(fitting)}.",
    )
