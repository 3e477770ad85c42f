"""What a process of a run is to do, as a host's adapter is given it; and on what the parties of a run agree."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.experiment import Experiment
from calfat_plugin.options import Tag
from calfat_plugin.recipe.tagged_keys import without
from calfat_plugin.results import RoundRecord, State
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from calfat_plugin.datasets import ImageData
    from calfat_plugin.federation.server import Server, Snapshot
    from calfat_plugin.federation.worker import Worker
    from calfat_plugin.host.executors import Workers
    from calfat_plugin.host.transports.base import Transport

_LIMIT_FACTOR = 8  # an update may bring control variates, several sets of statistics and the like
_LIMIT_FLOOR = 1_000_000
#: Opens this process's transport from its rank and the largest message that it accepts, in bytes.
OpenTransport = Callable[[int, int], "Transport"]


@dataclass(frozen=True)
class ServerTask:
    """All remaining rounds of an experiment, then its final evaluation."""

    server: Server  # at the end of the last finished round; its device is also that of training in this process
    on_round: Callable[[RoundRecord, Snapshot], None]  # is given each record and a snapshot to save
    shards: Mapping[int, ImageData] = field(default_factory=dict)  # by client; empty where each party has its own
    client_states: MutableMapping[int, State] = field(default_factory=dict)  # where clients keep theirs here
    used: Mapping[int, int] = field(default_factory=dict)  # client to the last round that used its update
    scratch: Path | None = None  # intermediate results of the final evaluation, to continue from after a stop
    workers: Workers | None = None  # train a simulation's clients; None: this process does
    start_elsewhere: Callable[[], Worker] | None = None  # picklable; for processes that the host starts
    warn: Callable[[str], None] = logging.getLogger(__name__).warning
    run_name: str = ""  # of the run's directory; the clients are told which run they join


@dataclass(frozen=True)
class ClientTask:
    """A client's part of a cross-silo run: train whenever the server asks, until it says that the run is over.

    A round that is trained again (the server was restarted, the update came too late) begins from the state that
    belongs to the model, so SCAFFOLD's variates never run ahead of the server's.
    """

    worker: Worker
    rank: int  # from 1; the client's id is one less
    state_after: Callable[[int], State]  # of the round that the server last used; 0 is before the first
    keep_state: Callable[[int, State, int], None]  # (round, state after it, round last used); others are forgotten
    on_round: Callable[[int, str], None]
    on_notice: Callable[[str], None]  # what the server has to say to the user
    on_joined: Callable[[str, int], None]  # (name of the server's run, round), whenever it is another run than before
    on_finished: Callable[[int], None]  # with the rounds that were done, before the goodbye is acknowledged, in a
    # receiving thread; the server may leave


def fingerprint(experiment: Experiment) -> str:
    """A digest of all in a recipe that two parties of one run must agree on."""
    plain = without(experiment.as_run(), Tag.OF_A_PARTY)
    text = json.dumps([__version__, plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def max_message(experiment: Experiment, model_bytes: int) -> int:
    """Size of the largest message that a party accepts, in bytes, from the size of the model."""
    limit = experiment.silo.max_message_mb
    if limit is not None:
        return limit * 1_000_000
    return _LIMIT_FACTOR * model_bytes + _LIMIT_FLOOR
