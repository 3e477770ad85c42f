"""The same messages over MPI, for a run whose parties are one MPI job: ``mpiexec -n N calfat run RECIPE``.

Who may send is settled by whoever starts the job, and when one party dies, MPI ends them all; the host's own MPI
backend pickles, spins, and cannot end while messages are queued.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from mpi4py import MPI

from calfat_plugin.errors import HostError
from calfat_plugin.host.messages import RefusedError
from calfat_plugin.host.transport import Parcel, Transport, UnreachableError

log = logging.getLogger(__name__)

_POLL = 0.005  # seconds; MPI can only wait by spinning
_TAG = 77
_GOODBYE = 10.0  # seconds that the parties have to end together


class MPITransport(Transport):
    """One party of an MPI job.

    Args:
        rank: of this party, which is its rank in the job.
        num_parties: server and clients.
        max_message: largest message that is accepted, in bytes.

    Raises:
        HostError: the job has another number of processes.
    """

    def __init__(self, rank: int, num_parties: int, max_message: int) -> None:
        self._world = MPI.COMM_WORLD
        check_job(num_parties)
        self._max_message = max_message
        self._calls = threading.Lock()  # one MPI call at a time, whatever the library allows
        super().__init__(rank, num_parties)
        self._receiver = threading.Thread(target=self._receive_all, name="mpi", daemon=True)
        self._receiver.start()

    def deliver(self, peer: int, parcel: Parcel) -> None:
        with self._calls:
            request = self._world.Isend([parcel.data, MPI.BYTE], peer, _TAG)
        while not self._done(request):
            if parcel.cancelled.is_set() or time.monotonic() > parcel.deadline:
                with self._calls:
                    request.Cancel()
                    request.Free()
                raise UnreachableError("it does not receive")
            time.sleep(_POLL)

    def stop_receive_message(self) -> None:
        """End together: what is under way is received first, for MPI cannot end with messages in its queues."""
        first = not self._stopped
        super().stop_receive_message()
        if not first:
            return
        self._receiver.join()
        with self._calls:
            barrier = self._world.Ibarrier()
        until = time.monotonic() + _GOODBYE
        while not self._done(barrier) and time.monotonic() < until:
            self._take_one()
            time.sleep(_POLL)

    def _done(self, request: Any) -> bool:
        with self._calls:
            return bool(request.Test())

    def _receive_all(self) -> None:
        while not self._stopped:
            received = self._take_one()
            if received is None:
                time.sleep(_POLL)
                continue
            source, data = received
            try:
                if len(data) > self._max_message:
                    raise RefusedError(f"{len(data)} bytes, {self._max_message} are allowed")
                self.receive(data, f"rank {source}", frozenset({source}))
            except RefusedError as refused:
                log.debug("refused: %s", refused)  # already told with the peer

    def _take_one(self) -> tuple[int, bytes] | None:
        status = MPI.Status()
        with self._calls:
            message = self._world.Improbe(MPI.ANY_SOURCE, _TAG, status)
            if message is None:
                return None
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
        return status.Get_source(), bytes(data)


def job_rank() -> int:
    """This process's rank in its MPI job; 0 outside of one."""
    return int(MPI.COMM_WORLD.Get_rank())


def check_job(num_parties: int) -> None:
    """Refuse a job of another size than the recipe.

    Raises:
        HostError: with the command that starts the right one.
    """
    size = MPI.COMM_WORLD.Get_size()
    if size != num_parties:
        raise HostError(
            f"this MPI job has {size} process{'es' if size > 1 else ''}, the recipe has {num_parties} parties (the "
            f"server and {num_parties - 1} clients). Start it with: mpiexec -n {num_parties} calfat run RECIPE, or "
            "with calfat run RECIPE --local."
        )
