"""Messages between a server and the workers that it has started on its machine, over a pipe to each.

A pipe belongs to its two processes and to nobody else, so there is nothing to protect; and each of the two notices at
once when the other has ended, however it did.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from calfat_plugin.host.task import WorkerProcess
from calfat_plugin.host.transports.base import Outgoing, Transport, UnreachableError
from calfat_plugin.host.transports.pool import Workers

_SERVER = frozenset({0})


class PipeWorkers(Workers):
    """The server's ends.

    Args:
        workers: the processes, each with a pipe to it.
    """

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = dict(enumerate(workers, start=1))

    @property
    def numbers(self) -> range:
        return range(1, len(self._workers) + 1)

    def send(self, worker: int, data: bytes) -> None:
        with suppress(OSError):  # it has ended, which listen() reports
            self._workers[worker].pipe.send_bytes(data)

    def listen(self) -> Iterator[tuple[int, bytes | str]]:
        left = dict(self._workers)
        while left:
            ready = wait([worker.pipe for worker in left.values()])
            for number in [number for number, worker in left.items() if worker.pipe in ready]:
                try:
                    yield number, left[number].pipe.recv_bytes()
                except (EOFError, OSError):
                    yield number, _how_it_ended(left.pop(number).process)

    def close(self) -> None:
        """Nothing: the workers end, and with them their pipes."""


class PipeTransport(Transport):
    """A worker's end.

    Args:
        rank: the worker's number.
        pipe: to the server.
    """

    def __init__(self, rank: int, pipe: Connection) -> None:
        super().__init__(rank, rank + 1)
        self._pipe = pipe
        threading.Thread(target=self._receive_all, name="pipe", daemon=True).start()

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        try:
            self._pipe.send_bytes(outgoing.data)
        except OSError as error:
            raise UnreachableError(str(error)) from None

    def _receive_all(self) -> None:
        try:
            while True:
                self.receive(self._pipe.recv_bytes(), "the server", _SERVER)
        except (EOFError, OSError):
            os._exit(1)  # the server is gone: what is being trained is for nobody


def _how_it_ended(process: BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    if code >= 0:
        return f"(process {process.pid}) ended with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"(process {process.pid}) was killed by signal {-code} ({name})"
