"""What every runtime offers: how many processes it has, what it refuses, and how it is run. No torch, no FedML."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from calfat_plugin.experiment import Experiment
from calfat_plugin.recipe.document import KeyPath

if TYPE_CHECKING:
    from calfat_plugin.host.task import ServerTask
    from calfat_plugin.results import EvaluationResult

BACKEND: KeyPath = ("comm_args", "backend")


class Package(NamedTuple):
    """What a backend needs to be installed: its top-level module, its distribution, and our extra that brings it."""

    module: str
    distribution: str
    extra: str


class Runtime(ABC):
    """One way to run an experiment. A subclass is final and holds nothing but the experiment.

    Attributes:
        is_cross_silo: whether each process is a party with data of its own, and not a worker for any client.
        is_mpi_job: whether ``mpiexec`` starts the processes and gives them their ranks.
        package: what the backend needs beside the host.
    """

    is_cross_silo: ClassVar[bool] = False
    is_mpi_job: ClassVar[bool] = False
    package: ClassVar[Package | None] = None

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """Processes of a run, the server's included."""

    @property
    def process_names(self) -> list[str]:
        """What each process is called on the console, by rank; empty where only the server has much to report."""
        return [""] * self.num_processes

    @property
    def lacks_addresses(self) -> bool:
        """Whether processes listen on addresses that the recipe leaves open."""
        return False

    @property
    def is_unprotected(self) -> bool:
        """Whether a process can take part that nobody invited."""
        return False

    def security_warnings(self, rank: int) -> Iterator[str]:
        """What the user of party ``rank`` should know before it starts."""
        yield from ()

    def refuse_unsupported(self) -> None:
        """Refuse what the host, or this version of the plugin, cannot do.

        Raises:
            RecipeError: with place, key path and what to write instead.
        """
        if self.package is not None and importlib.util.find_spec(self.package.module) is None:
            raise self._error(
                BACKEND,
                f"{self.experiment.comm.backend} needs the package {self.package.distribution}: "
                f"pip install 'calfat-plugin[{self.package.extra}]'.",
            )

    @abstractmethod
    def lead(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        """Be the process that holds the global model: all remaining rounds, then the final evaluation.

        Raises:
            HostError: the installed host is of an untested version, or the other processes do not come.
            UpdateError: a round without a single usable update.
        """

    def _error(self, path: KeyPath, complaint: str) -> Exception:
        return self.experiment.document.error(path, complaint)
