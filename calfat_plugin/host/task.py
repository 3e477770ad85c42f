"""What a process of a run is to do: the one that holds the global model, and a client of a cross-silo run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from calfat_plugin.experiment import Experiment
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import RoundRecord, State

if TYPE_CHECKING:
    import torch

    from calfat_plugin.datasets import Dataset, ImageData
    from calfat_plugin.federation.server import Server, Snapshot


class WorkerProcess(NamedTuple):
    """A process on this machine that trains clients, and the pipe to it."""

    process: BaseProcess
    pipe: Connection


@dataclass(frozen=True)
class ServerTask:
    """All remaining rounds of an experiment, then its final evaluation.

    Attributes:
        experiment: what to run.
        dataset: only its test split is used, except where this process also trains.
        device: where to evaluate, and to train if this process does.
        observer: is informed of progress.
        on_round: called with each record and a snapshot to save, before observers are informed of the round.
        shards: client id to its training examples, on ``device``; empty where each party has its own.
        resume_from: the snapshot to continue from, made by any runtime.
        client_states: client id to what it keeps so far, where clients keep theirs in this process; rounds change it.
        used: client to the last round in which its update was used, for a resumed cross-silo run.
        scratch: where the final evaluation keeps intermediate results, to continue from after a stop.
        workers: the processes that train instead of this one, where a simulation was given some.
        warn: shows the user a finding that does not stop the run.
    """

    experiment: Experiment
    dataset: Dataset
    device: torch.device
    observer: RunObserver
    on_round: Callable[[RoundRecord, Snapshot], None]
    shards: Mapping[int, ImageData] = field(default_factory=dict)
    resume_from: Snapshot | None = None
    client_states: MutableMapping[int, State] = field(default_factory=dict)
    used: Mapping[int, int] = field(default_factory=dict)
    scratch: Path | None = None
    workers: Sequence[WorkerProcess] = ()
    warn: Callable[[str], None] = logging.getLogger(__name__).warning

    def start_server(self) -> Server:
        """The server, at the end of the last finished round.

        Raises:
            UpdateError: when the snapshot does not fit this experiment's model.
            CalfatError: an evaluator fails, which the first process of a run tries.
        """
        from calfat_plugin.federation.server import Server

        server = Server(self.experiment, self.dataset, self.device, self.observer)
        if self.resume_from is None:
            server.try_evaluators()
        else:
            server.restore(self.resume_from)
        return server


@dataclass(frozen=True)
class ClientTask:
    """A client's part of a cross-silo run: train whenever the server asks, until it says that the run is over.

    A round that is trained again (the server was restarted, the update came too late) begins from the state that
    belongs to the model, so SCAFFOLD's variates never run ahead of the server's.

    Attributes:
        experiment: what to run; the server's must be the same.
        dataset: for shapes and augmentation.
        data: this client's training examples, on ``device``.
        rank: 1 to the number of clients; the client's id is one less.
        device: where to train.
        state_after: what the client keeps after the round that the server last used; 0 is before the first round.
        keep_state: stores (round, what the client keeps after it, round last used), and forgets all other rounds.
        on_round: called for each round with (number, what happens).
        on_notice: called with what the server has to say to the user.
        on_finished: called when the server says that the run is over, before that is acknowledged; afterwards the
            server may leave, and a client that was killed would wait for it. Runs in a receiving thread.
    """

    experiment: Experiment
    dataset: Dataset
    data: ImageData
    rank: int
    device: torch.device
    state_after: Callable[[int], State]
    keep_state: Callable[[int, State, int], None]
    on_round: Callable[[int, str], None]
    on_notice: Callable[[str], None]
    on_finished: Callable[[], None]
