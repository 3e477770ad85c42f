"""FedML's cross-silo runtimes: a client stays where its data is. No torch or FedML before a run starts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from calfat_plugin.host.runtime import Package, Runtime
from calfat_plugin.recipe.silo import UNPROTECTED, Address

if TYPE_CHECKING:
    from calfat_plugin.host.task import ClientTask, ServerTask
    from calfat_plugin.host.transports.base import Transport
    from calfat_plugin.results import EvaluationResult


class CrossSilo(Runtime):
    """FedML's cross-silo runtime: a process for each party, over one of the backends below."""

    is_cross_silo = True

    @property
    def num_processes(self) -> int:
        return self.experiment.num_clients + 1

    @property
    def process_names(self) -> list[str]:
        return ["server", *(f"client {client}" for client in range(self.experiment.num_clients))]

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        experiment = self.experiment
        if experiment.train.federated_optimizer != "FedAvg":
            raise self._error(
                ("train_args", "federated_optimizer"),
                f"'{experiment.train.federated_optimizer}' cannot be run: the host's cross-silo runtime knows FedAvg "
                "only. Write FedAvg and name the algorithm in calfat.aggregator.",
            )
        if not experiment.silo.insecure:
            self._refuse_insecure()

    @abstractmethod
    def _refuse_insecure(self) -> None:
        """Refuse addresses that other machines can reach, or be asked for, without TLS."""

    @abstractmethod
    def open_transport(self, rank: int, max_message: int) -> Transport:
        """This process's end of the backend.

        Args:
            rank: of this process; 0 is the server's.
            max_message: largest message that is accepted, in bytes.

        Raises:
            HostError: it cannot be opened.
        """

    def security_warnings(self, rank: int) -> Iterator[str]:
        if self.is_unprotected and rank == 0:
            yield UNPROTECTED
        if not self.is_mpi_job and (tls := self.experiment.silo.tls) is not None:
            from calfat_plugin.host.transports.certificates import exposed_key

            yield from filter(None, [exposed_key(tls, rank)])

    def lead(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        from calfat_plugin.host.silo.run import serve

        return serve(task, self.open_transport, all_come=self.is_mpi_job)

    def work(self, task: ClientTask) -> None:
        """Be a client until the server says that the run is over; see ``host.silo.run.work``."""
        from calfat_plugin.host.silo.run import work

        work(task, self.open_transport)


class _Listening(CrossSilo):
    """Backends whose recipe may say where each party listens."""

    def _refuse_insecure(self) -> None:
        silo = self.experiment.silo
        exposed = [str(address) for address in silo.addresses if not address.is_loopback]
        if silo.bind is not None and not Address(silo.bind, 1).is_loopback:
            exposed.append(silo.bind)
        if exposed and silo.tls is None:
            raise self._error(
                ("calfat", "silo"),
                f"{exposed[0]} can be reached from other machines, and there are no certificates. Name them in "
                "calfat.silo.tls (`calfat certs DIR` makes a test set), or write calfat.silo.insecure: true for a "
                "network in which everyone may read and join.",
            )


class CrossSiloGRPC(_Listening):
    """Parties that call each other over gRPC."""

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


class CrossSiloMPI(_Listening):
    """Parties that are the processes of one MPI job."""

    is_mpi_job = True
    package = Package("mpi4py", "mpi4py", "mpi")

    def open_transport(self, rank: int, max_message: int) -> Transport:
        from calfat_plugin.host.transports.mpi import MPITransport

        return MPITransport(rank, self.num_processes, max_message)


class CrossSiloMQTT(CrossSilo):
    """Parties that only connect outwards: to an MQTT broker and an S3-compatible store."""

    package = Package("paho", "paho-mqtt", "mqtt-s3")

    @property
    def is_unprotected(self) -> bool:
        return self.experiment.silo.tls is None and self.experiment.silo.mqtt.username is None

    def open_transport(self, rank: int, max_message: int) -> Transport:
        from calfat_plugin.host.transports.mqtt import MQTTTransport

        return MQTTTransport(rank, self.num_processes, self.experiment.silo, max_message)

    def _refuse_insecure(self) -> None:
        silo = self.experiment.silo
        broker = silo.mqtt.address
        if not (broker.is_loopback or silo.tls or silo.mqtt.tls):
            raise self._error(
                ("calfat", "silo"),
                f"messages would cross the network to the broker {broker} in the open. Name certificates in "
                "calfat.silo.tls (`calfat certs DIR --broker HOST` makes a test set), or write calfat.silo.mqtt.tls: "
                "true for a broker with a certificate of its own, or calfat.silo.insecure: true for a network in which "
                "everyone may read and join.",
            )
        if not silo.s3.is_safe:
            raise self._error(
                ("calfat", "silo", "s3", "endpoint"),
                f"models would cross the network to {silo.s3.endpoint} in the open. Give the store a certificate and "
                "write https://, or write calfat.silo.insecure: true for a network in which everyone may read along.",
            )
