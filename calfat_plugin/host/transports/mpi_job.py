"""This process as one of an MPI job: its rank, and how the job ends. Imports neither torch nor fedml.

MPI itself can only wait by spinning, and a process that ends in an error leaves the others waiting for it. So all wait
here, asleep, until the last has come to its end, and whoever fails ends the job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from mpi4py import MPI

from calfat_plugin.errors import HostError

_TAG = 77
_POLL = 0.05  # seconds
_RANK_0_FIRST = 10.0  # seconds that the others wait, so that rank 0 alone reports an error they share
_RANKS_ON_MACHINE = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")  # MPICH's, Open MPI's, srun's
_FORWARDING = 0.3  # seconds in which mpiexec shows the output, before it ends the job and itself

_world = MPI.COMM_WORLD
_calls = threading.Lock()  # one MPI call at a time, whatever the library allows
_sending: list[tuple[Any, bytes]] = []


def rank() -> int:
    """This process's rank; 0 outside of a job."""
    return int(_world.Get_rank())


def size() -> int:
    """Processes of the job; 1 outside of one."""
    return int(_world.Get_size())


def rank_on_machine() -> int:
    """This process's number among those of the job on its machine, as whoever started the job has set it."""
    return next((int(os.environ[name]) for name in _RANKS_ON_MACHINE if os.environ.get(name, "").isdecimal()), rank())


def check_silos(wanted: int) -> None:
    """Refuse a job that has not a process for each party. Rank 0 reports for all: the others give it time to."""
    if size() == wanted:
        return
    if rank() != 0:
        time.sleep(_RANK_0_FIRST)
    raise HostError(
        f"this MPI job has {size()} process{'es' * (size() != 1)}, the recipe needs {wanted}: the server and "
        f"{wanted - 1} client{'s' * (wanted != 2)}. Start it with: mpiexec -n {wanted} calfat run RECIPE, or with "
        "calfat run RECIPE --local."
    )


def check_workers() -> None:
    """Refuse a simulation that has no process besides the server's."""
    if size() == 1:
        raise HostError(
            "this MPI job has 1 process, the recipe needs 2 or more: the server and its workers. Start it with: "
            "mpiexec -n 3 calfat run RECIPE for 2 workers, or without MPI with calfat run RECIPE --workers 2."
        )


def send(data: bytes, peer: int) -> Any:
    """Begin to send; see :func:`is_done`. ``data`` must live until then."""
    with _calls:
        return _world.Isend([data, MPI.BYTE], peer, _TAG)


def is_done(request: Any) -> bool:
    """Whether something begun has come to its end."""
    with _calls:
        return bool(request.Test())


def keep(request: Any, data: bytes) -> None:
    """Wait no longer for a message. MPI may still be reading it, so it is kept until it is sent or the run ends."""
    with _calls:  # of several queues at once, none may lose another's
        _sending[:] = [*(each for each in _sending if not each[0].Test()), (request, data)]


def take() -> tuple[int, bytes] | None:
    """(sender, bytes) of a message that has come; None without waiting."""
    status = MPI.Status()
    with _calls:
        message = _world.Improbe(MPI.ANY_SOURCE, _TAG, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, MPI.BYTE])
    return status.Get_source(), bytes(data)


def leave() -> None:
    """Wait until all processes of the job have come to a good end; call it when nothing is sent or received any more.

    A process may then begin another run: what was meant for the last one is received and dropped before.
    """
    if _world.Get_size() > 1:
        _meet(dropping=True)
        _meet(dropping=False)  # nobody drops messages any more when the first sends again
        _sending.clear()


def end(status: int, message: str = "", *, alone: bool = True) -> None:
    """End the job because this process has failed; returns only outside of a job.

    Args:
        status: exit status of the job.
        alone: whether only this process is known to have failed. If all were stopped alike, rank 0 reports for all.
    """
    if _world.Get_size() == 1:
        return
    if not alone and rank() != 0:
        time.sleep(_RANK_0_FIRST)
    sys.stderr.write(message)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(_FORWARDING)
    _world.Abort(status)
    os._exit(status)  # MPI may return, to end this process with the others


def _meet(*, dropping: bool) -> None:
    with _calls:
        request = _world.Ibarrier()
    while not is_done(request):
        while dropping and take() is not None:
            pass
        time.sleep(_POLL)
