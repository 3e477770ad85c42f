"""The runtimes: each way in which a host runs an experiment, what it refuses, how many processes it has, how to run it.

This is the only place that knows what ``common_args.host``, ``training_type`` and ``comm_args.backend`` mean, and the
only module of ``host/`` that others need to start a run. Neither torch nor a host is imported before one starts.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from calfat_plugin import returned
from calfat_plugin.entries import ModelEntry
from calfat_plugin.errors import HostError, did_you_mean, listed, one_line
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.installed import refuse_without_fedml, refuse_without_flower
from calfat_plugin.options import describe_options
from calfat_plugin.peer_text import error_text
from calfat_plugin.recipe.document import KeyPath
from calfat_plugin.recipe.schema import BACKENDS, DASK, MPI, PROCESSES, TRAINING_TYPES
from calfat_plugin.recipe.silo import SILO, UNPROTECTED, Address

if TYPE_CHECKING:
    from calfat_plugin.host.tasks import ClientTask, ServerTask
    from calfat_plugin.host.transports.base import Transport
    from calfat_plugin.results import EvaluationResult

BACKEND: KeyPath = ("comm_args", "backend")
EXECUTOR: KeyPath = ("calfat", "runtime", "executor")
SCHEDULER: KeyPath = ("calfat", "runtime", "scheduler")


class Package(NamedTuple):
    """What a backend needs to be installed: its top-level module, its distribution, and our extra that brings it."""

    module: str
    distribution: str
    extra: str


#: What the executors of other packages need.
_ENGINES = {MPI: Package("mpi4py", "mpi4py", "mpi"), DASK: Package("distributed", "distributed", "dask")}


class Runtime(ABC):
    """One way to run an experiment. A subclass is final and holds nothing but the experiment."""

    is_cross_silo: ClassVar[bool] = False  # each process is a party with data of its own, not a worker for any client
    trains_elsewhere: ClassVar[bool] = False  # the host itself starts the processes that train clients
    package: ClassVar[Package | None] = None  # what the backend needs beside the host

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def lacks_addresses(self) -> bool:
        """Whether processes listen on addresses that the recipe leaves open."""
        return False

    @property
    def is_unprotected(self) -> bool:
        return False

    def security_warnings(self, rank: int) -> Iterator[str]:
        """What the user of party ``rank`` should know before it starts."""
        yield from ()

    def refuse_unsupported(self) -> None:
        """Refuse what the host, or this version of the plugin, cannot do."""
        self._refuse_without(self.package, BACKEND, self.experiment.comm.backend)
        executor = self.experiment.runtime.executor
        scheduler = self.experiment.runtime.scheduler
        if executor != PROCESSES and not isinstance(self, Simulation):
            raise self._error(
                EXECUTOR,
                f"'{executor}' trains the clients of FedML's simulation, and this run has processes of its own for "
                "them. Remove the key.",
            )
        if executor == DASK and scheduler is None:
            raise self._error(
                SCHEDULER, "there is no address. Write that of Dask's scheduler, such as tcp://10.0.0.1:8786."
            )
        if executor != DASK and scheduler is not None:
            raise self._error(
                SCHEDULER,
                f"'{scheduler}' has no effect: it is for calfat.runtime.executor: {DASK}. Remove the key.",
            )

    def refuse_without_host(self) -> None:
        """Refuse to run where the framework that runs the rounds is not installed; to check a recipe needs none."""
        refuse_without_fedml()

    @abstractmethod
    def run_server(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        """Be the process that holds the global model: all remaining rounds, then the final evaluation."""

    def _refuse_without(self, package: Package | None, path: KeyPath, user: str) -> None:
        if package is not None and importlib.util.find_spec(package.module) is None:
            raise self._error(
                path,
                f"{user} needs the package {package.distribution}: pip install 'calfat-plugin[{package.extra}]'.",
            )

    def _error(self, path: KeyPath, complaint: str) -> Exception:
        return self.experiment.document.error(path, complaint)


# --- cross-silo: a client stays where its data is ---------------------------------------------------------------------


class CrossSilo(Runtime):
    """FedML's cross-silo runtime: a process for each party, over one of the backends below."""

    is_cross_silo = True

    @property
    def num_processes(self) -> int:
        return self.experiment.num_clients + 1

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        experiment = self.experiment
        if experiment.train.federated_optimizer != "FedAvg":
            raise self._error(
                ("train_args", "federated_optimizer"),
                f"'{experiment.train.federated_optimizer}' cannot be run: the host's cross-silo runtime knows FedAvg "
                "only. Write FedAvg and name the algorithm in calfat.aggregator.",
            )

    @abstractmethod
    def open_transport(self, rank: int, max_message: int) -> Transport:
        """This process's end of the backend; a larger message, in bytes, is not accepted."""

    def security_warnings(self, rank: int) -> Iterator[str]:
        if self.is_unprotected and rank == 0:
            yield UNPROTECTED

    def run_server(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        from calfat_plugin.host.silo.server import run_server

        self._refuse_unfit_certificate(0)
        return run_server(task, self.open_transport)

    def run_client(self, task: ClientTask) -> None:
        from calfat_plugin.host.silo.client import run_client

        self._refuse_unfit_certificate(task.rank)
        run_client(task, self.open_transport)

    def _refuse_unfit_certificate(self, rank: int) -> None:
        """Refuse the certificate of another rank at once; the other parties would refuse it later."""
        settings = self.experiment.silo.tls
        if settings is not None:
            from calfat_plugin.host.transports.certificates import refuse_unfit_certificate

            refuse_unfit_certificate(settings, rank)


class CrossSiloGRPC(CrossSilo):
    package = Package("grpc", "grpcio", "grpc")

    @property
    def lacks_addresses(self) -> bool:
        return not self.experiment.silo.addresses

    @property
    def is_unprotected(self) -> bool:
        return self.experiment.silo.tls is None

    def open_transport(self, rank: int, max_message: int) -> Transport:
        from calfat_plugin.host.transports.grpc import GRPCTransport

        return GRPCTransport(rank, self.experiment.silo, max_message)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        silo = self.experiment.silo
        if silo.tls is not None or silo.insecure:
            return
        exposed = [str(address) for address in silo.addresses if not address.is_loopback]
        if silo.bind is not None and not Address(silo.bind, 1).is_loopback:
            exposed.append(silo.bind)
        if exposed:
            raise self._error(
                ("calfat", "silo"),
                f"{exposed[0]} can be reached from other machines, and there are no certificates. Name them in "
                "calfat.silo.tls (docs/cross_silo.md has the lines that make them), or write calfat.silo.insecure: "
                "true for a network in which everyone may read and join.",
            )


class CrossSiloMQTT(CrossSilo):
    """Parties that only connect outwards: to an MQTT broker and an S3-compatible store."""

    package = Package("paho", "paho-mqtt", "mqtt-s3")

    @property
    def is_unprotected(self) -> bool:
        return self.experiment.silo.tls is None and self.experiment.silo.mqtt.username is None

    def security_warnings(self, rank: int) -> Iterator[str]:
        yield from super().security_warnings(rank)
        silo = self.experiment.silo
        if rank == 0 and silo.tls is None and silo.mqtt.username is not None:
            topics = f"calfat/{silo.mqtt.run}"
            yield (
                f"passwords alone keep no party from acting for another: the broker {silo.mqtt.address} must let the "
                f"user of rank K write to {topics}/rank-K.calfat/+ only, and read {topics}/+/rank-K.calfat only"
            )

    def open_transport(self, rank: int, max_message: int) -> Transport:
        from calfat_plugin.host.transports.mqtt import MQTTTransport

        return MQTTTransport(rank, self.num_processes, self.experiment.silo, max_message)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        silo = self.experiment.silo
        broker = silo.mqtt.address
        if silo.insecure:
            return
        if not (broker.is_loopback or silo.tls or silo.mqtt.tls):
            raise self._error(
                ("calfat", "silo"),
                f"messages would cross the network to the broker {broker} in the open. Name certificates in "
                "calfat.silo.tls (docs/cross_silo.md has the lines that make them), or write calfat.silo.mqtt.tls: "
                "true for a broker with a certificate of its own, or calfat.silo.insecure: true for a network in which "
                "everyone may read and join.",
            )
        if not silo.s3.is_safe:
            raise self._error(
                ("calfat", "silo", "s3", "endpoint"),
                f"models would cross the network to {silo.s3.endpoint} in the open. Give the store a certificate and "
                "write https://, or write calfat.silo.insecure: true for a network in which everyone may read along.",
            )


# --- simulations: any process may train any client --------------------------------------------------------------------


class Simulation(Runtime):
    """FedML's simulator in one process, which may have its clients trained by workers."""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        executor = self.experiment.executor
        if executor in _ENGINES:
            path = BACKEND  # which may name the executor, too
            if self.experiment.document.has(EXECUTOR):
                path = EXECUTOR
            self._refuse_without(_ENGINES[executor], path, executor)
        elif executor != PROCESSES:
            self.executor_factory()

    def executor_factory(self) -> Callable[[], Executor]:
        """What makes the executor that a recipe names as ``package.module:factory``."""
        name = self.experiment.executor
        module_name, _, attribute = name.partition(":")
        if not (module_name and attribute):
            known = (PROCESSES, *_ENGINES)
            raise self._error(
                EXECUTOR,
                f"got '{name}', expected one of {', '.join(known)}, or package.module:factory of your own."
                f"{did_you_mean(name, known)}",
            )
        try:
            factory: Callable[[], Executor] = getattr(importlib.import_module(module_name), attribute)
        except Exception as error:  # somebody else's module may fail to import in any way
            raise self._error(
                EXECUTOR,
                f"'{name}' cannot be imported ({error_text(error)}). Is it installed, or on PYTHONPATH?",
            ) from error
        if not callable(factory):
            raise self._error(
                EXECUTOR,
                f"'{name}' is {one_line(factory)}; expected a function without arguments that returns a "
                "concurrent.futures.Executor.",
            )
        return factory

    def run_server(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        from calfat_plugin.host.simulation import simulate

        return simulate(task)


# --- Flower: its engine runs the rounds, in a simulation or between SuperNodes ----------------------------------------


class Flower(Runtime):
    """What Flower's runtimes share. Flower carries their messages, so there is one for each training type."""

    def __init__(self, experiment: Experiment, grid: Any = None) -> None:
        super().__init__(experiment)
        self._grid = grid  # of Flower, where it has started this process; None: this process starts Flower

    def refuse_without_host(self) -> None:
        refuse_without_flower()

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        experiment = self.experiment
        device = experiment.device
        client_gpus = experiment.flower.client_gpus
        if experiment.comm.backend != "sp":
            raise self._error(
                BACKEND, f"'{experiment.comm.backend}' is a backend of FedML; Flower has its own. Remove the key."
            )
        if device.using_gpu and device.gpu_id:
            raise self._error(
                ("device_args", "gpu_id"),
                f"got {device.gpu_id}, but Ray gives each client its GPU. Remove the key; CUDA_VISIBLE_DEVICES says "
                "which GPUs there are.",
            )
        if client_gpus is not None and bool(client_gpus) != device.using_gpu:
            raise self._error(
                ("calfat", "flower", "client_gpus"),
                f"got {client_gpus:g}, but device_args.using_gpu is {str(device.using_gpu).lower()}, and a client sees "
                "no GPU but its own. Change one of the two.",
            )
        if experiment.document.has(("calfat", "silo")):
            raise self._error(
                ("calfat", "silo"),
                "these addresses, certificates, deadlines and quorum are of FedML's cross-silo runtime. Remove the "
                "section: Flower's SuperLink and SuperNodes have addresses and certificates of their own, and a round "
                "waits for all of its clients.",
            )


class FlowerSimulation(Flower):
    trains_elsewhere = True

    def run_server(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        from calfat_plugin.host.flower.server import simulate

        return simulate(task, self._grid)


class FlowerSilos(Flower):
    is_cross_silo = True

    def run_server(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        if self._grid is None:
            raise HostError(
                "with Flower, parties with data of their own are an app that `flwr run` starts: put the recipe into a "
                "copy of examples/flower_app, of the repository. For a simulation: "
                "--set common_args.training_type=simulation."
            )
        from calfat_plugin.host.flower.server import serve

        return serve(task, self._grid)


# --- which one --------------------------------------------------------------------------------------------------------

#: Host to training type to backend to runtime. Where a host has its own backends, the runtime itself refuses FedML's.
_RUNTIMES: Mapping[str, Mapping[str, Mapping[str, type[Runtime]]]] = {
    "fedml": {
        "simulation": {"sp": Simulation, "MPI": Simulation},
        "cross_silo": {"GRPC": CrossSiloGRPC, "MQTT_S3": CrossSiloMQTT},
    },
    "flower": {
        "simulation": dict.fromkeys(BACKENDS, FlowerSimulation),
        "cross_silo": dict.fromkeys(BACKENDS, FlowerSilos),
    },
}


def runtime_of(experiment: Experiment) -> Runtime:
    """The runtime that a recipe asks for; it may be one that cannot run the experiment."""
    training_type = experiment.common.training_type
    backend = experiment.comm.backend
    runtimes = _RUNTIMES[experiment.common.host][training_type]
    if backend in runtimes:
        return runtimes[backend](experiment)
    if TRAINING_TYPES[training_type]:
        complaint = f"'{backend}' cannot carry a cross-silo run; write {', '.join(runtimes)}."
    else:
        complaint = (
            f"'{backend}' carries cross-silo runs only. Write sp for a simulation (calfat.runtime.executor says who "
            "trains its clients), or common_args.training_type: cross_silo for one process a party."
        )
    raise experiment.document.error(BACKEND, complaint)


def runtime_on(experiment: Experiment, grid: Any) -> Runtime:
    """:func:`runtime_of` a recipe of Flower, where Flower has started this process and gave it its grid."""
    runtime = runtime_of(experiment)
    assert isinstance(runtime, Flower)
    return type(runtime)(experiment, grid)


def supported_runtime(experiment: Experiment) -> Runtime:
    """:func:`runtime_of`, once it is known that it can run the experiment."""
    if experiment.partition.entry.name == SILO:
        path = ("data_args", "partition_method")
        if not experiment.dataset.entry.per_party:
            raise experiment.document.error(
                path,
                f"silo needs a data set that each party can read its own part of; '{experiment.dataset.name}' is one "
                "for all. Take image_folder, or a data set of your own with per_party.",
            )
        if experiment.common.training_type != "cross_silo":
            raise experiment.document.error(
                path, "silo leaves the data with the parties, so it needs common_args.training_type: cross_silo."
            )
    _refuse_small_images(experiment)
    runtime = runtime_of(experiment)
    runtime.refuse_unsupported()
    return runtime


def _refuse_small_images(experiment: Experiment) -> None:
    """Refuse images that are too small for a network that halves its maps.

    Where only the data set's files tell their size, the network's construction complains later.
    """
    model = experiment.model
    dataset = experiment.dataset
    shape = dataset.entry.image_shape
    with experiment.attribute_errors_to(model):
        smallest = returned.instance(model.entry.min_size(model.options), int, "min_size returned")
    if shape is None:
        return
    size = min(shape[1:])
    if size >= smallest:
        return
    fitting = []  # of the models that need no options
    for entry, _ in experiment.registry.offers(ModelEntry):
        if not any(info.required for info in describe_options(entry.config)):
            min_size = entry.min_size(entry.config())
            if isinstance(min_size, int) and min_size <= size:
                fitting.append(entry.name)
    raise experiment.document.error(
        ("model_args", "model"),
        f"'{model.name}' takes images from {smallest}x{smallest} pixels, and those of '{dataset.name}' have "
        f"{shape[1]}x{shape[2]}. Models that fit: {listed(fitting)}.",
    )
