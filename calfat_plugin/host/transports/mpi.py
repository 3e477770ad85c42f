"""The same messages over MPI, for a run whose processes are one MPI job: ``mpiexec -n N calfat run RECIPE``.

Who may send is settled by whoever starts the job, and when one party dies, MPI ends them all; the host's own MPI
backend pickles, spins, and cannot end while messages are queued.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress

from calfat_plugin.host.transports import mpi_job
from calfat_plugin.host.transports.base import Outgoing, RefusedError, Transport, UnreachableError
from calfat_plugin.host.transports.pool import Workers

_POLL = 0.005  # seconds; MPI can only wait by spinning


class MPITransport(Transport):
    """One process of an MPI job, which ``mpi_job`` has found to be of the right size."""

    def __init__(self, rank: int, num_parties: int, max_message: int) -> None:
        self._max_message = max_message
        super().__init__(rank, num_parties)
        self._receiver = threading.Thread(target=self._receive_all, name="mpi", daemon=True)
        self._receiver.start()

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        request = mpi_job.send(outgoing.data, peer)
        while not mpi_job.is_done(request):
            if outgoing.cancelled.is_set() or time.monotonic() > outgoing.deadline:
                mpi_job.keep(request, outgoing.data)
                raise UnreachableError("it does not receive")
            time.sleep(_POLL)

    def stop_receive_message(self) -> None:
        """End the loop and all sending. What still comes, ``mpi_job.leave`` receives."""
        super().stop_receive_message()
        self._receiver.join()

    def _receive_all(self) -> None:
        try:
            while not self.stopped:
                received = mpi_job.take()
                if received is None:
                    time.sleep(_POLL)
                else:
                    self._let_in(*received)
        except Exception:  # our bug; without this thread everyone would wait for ever
            mpi_job.end(1, traceback.format_exc())
            raise

    def _let_in(self, source: int, data: bytes) -> None:
        if len(data) > self._max_message:
            self.refusals.add(f"rank {source}", f"{len(data)} bytes, {self._max_message} are allowed")
            return
        with suppress(RefusedError):  # already logged
            self.receive(data, f"rank {source}", frozenset({source}))


class MPIWorkers(Workers):
    """The other processes of rank 0's job. When one of them dies, MPI ends the job, so that none is seen to end."""

    def __init__(self) -> None:
        self._closed = False
        self._taking = threading.Lock()

    @property
    def numbers(self) -> range:
        return range(1, mpi_job.size())

    def send(self, worker: int, data: bytes) -> None:
        mpi_job.keep(mpi_job.send(data, worker), data)

    def listen(self) -> Iterator[tuple[int, bytes | str]]:
        while True:
            with self._taking:
                if self._closed:
                    return
                received = mpi_job.take()
            if received is None:
                time.sleep(_POLL)
            else:
                yield received

    def close(self) -> None:
        """From here on no message is taken: the next run of this job may have sent it."""
        with self._taking:
            self._closed = True
