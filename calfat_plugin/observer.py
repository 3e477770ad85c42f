"""Progress of a run, and who is informed of it while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calfat_plugin.results import RoundRecord, RunInfo


@dataclass(frozen=True)
class BatchProgress:
    """Where a client is inside its local training; ``loss`` is the running mean of this epoch."""

    client: int
    batch: int
    num_batches: int
    loss: float


class Observer:
    """Is informed of the progress of whatever takes long; this one ignores everything. The console is an observer."""

    def warn(self, message: str) -> None:
        """A finding that does not stop anything."""

    def say(self, line: str) -> None:
        """What was done, in a line."""

    def evaluation_progress(self, label: str, done: int, total: int, correct: int) -> None:
        """During an evaluation, in examples."""


class RunObserver(Observer):
    """Is informed of a run's progress in the process that trains; this one ignores everything."""

    def run_started(self, run: RunInfo) -> None:
        """Before the first round."""

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        """Clients of this round, ascending."""

    def client_progress(self, progress: BatchProgress) -> None:
        """After each mini-batch."""

    def round_finished(self, record: RoundRecord) -> None:
        """After each round."""
