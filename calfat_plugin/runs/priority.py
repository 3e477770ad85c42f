"""The lowest priority for a long training, so that whatever else runs on the machine goes first: ``--idle``.

Linux shares the processor first between sessions ("autogroups"), and only then between the processes of one. A
process that has begun a session of its own competes with those of another session as an equal, however high its nice
value is. So three things are set: the nice value, the scheduling class, and the nice value of the session.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOWEST = 19  # the largest nice value
_SESSION = Path("/proc/self/autogroup")  # reads "/autogroup-123 nice 0"; takes the number


@contextmanager
def lowest_priority() -> Iterator[None]:
    """Let this process, and all that it starts meanwhile, run on what others leave of the processor.

    Call it before any library starts threads: they inherit the priority of the thread that starts them. The nice value
    of the process stays lowest afterwards, since the system lets nobody but root raise it again. That of the session is
    put back, since a terminal's session has other processes.
    """
    os.nice(_LOWEST)
    with suppress(OSError, AttributeError):  # another system than Linux, or a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    session_before = _session_nice()
    _set_session_nice(_LOWEST)
    try:
        yield
    finally:
        if session_before is not None:
            _set_session_nice(session_before)


def _session_nice() -> int | None:
    """The nice value of this process's session; None where sessions have none."""
    try:
        return int(_SESSION.read_text(encoding="ascii").rpartition("nice")[2])
    except (OSError, ValueError):
        return None


def _set_session_nice(value: int) -> None:
    with suppress(OSError):  # no sessions of this kind, or a file system that is read-only in a container
        _SESSION.write_text(str(value), encoding="ascii")
