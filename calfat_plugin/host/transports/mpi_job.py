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
_FORWARDING = 0.3  # seconds in which mpiexec shows the output, before it ends the job and itself

_world = MPI.COMM_WORLD
_calls = threading.Lock()  # one MPI call at a time, whatever the library allows
_abandoned: list[tuple[Any, bytes]] = []


def rank() -> int:
    """This process's rank; 0 outside of a job."""
    return int(_world.Get_rank())


def check_size(wanted: int, other: str) -> None:
    """Refuse a job of another size than the recipe needs. Rank 0 reports for all: the others give it time to.

    Args:
        wanted: number of processes.
        other: what a process besides the server is: ``client`` or ``worker``.

    Raises:
        HostError: with the command that starts the right one.
    """
    size = _world.Get_size()
    if size == wanted:
        return
    if rank() != 0:
        time.sleep(_RANK_0_FIRST)
    found, others = _count(size, "process", "es"), _count(wanted - 1, other, "s")
    raise HostError(
        f"this MPI job has {found}, the recipe needs {wanted}: the server and {others}. Start it with: "
        f"mpiexec -n {wanted} calfat run RECIPE, or with calfat run RECIPE --local."
    )


def _count(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def send(data: bytes, peer: int) -> Any:
    """Begin to send; see :func:`is_done`. ``data`` must live until then."""
    with _calls:
        return _world.Isend([data, MPI.BYTE], peer, _TAG)


def is_done(request: Any) -> bool:
    """Whether something begun has come to its end."""
    with _calls:
        return bool(request.Test())


def abandon(request: Any, data: bytes) -> None:
    """Give up on a message that was not received. MPI may still be reading it, so it is kept until the job ends."""
    _abandoned.append((request, data))


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
        _abandoned.clear()


def end(status: int, message: str = "", *, alone: bool = True) -> None:
    """End the job because this process has failed; returns only outside of a job.

    Args:
        status: exit status of the job.
        message: for stderr.
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
