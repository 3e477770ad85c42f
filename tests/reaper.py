"""Leaves no process behind, however pytest ends: whatever it started is killed once it is gone, also after SIGKILL.

Every pytest process (xdist's workers are ones, too) marks its environment, which all that it starts inherits: parties,
brokers, fork servers and their children, ranks of MPI jobs, browsers. A small process beside it waits for its end and
then kills whoever has the mark. An environment built from nothing takes the mark along; see ``tests/environment.py``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path

_NAME = "CALFAT_TESTS"  # holds a mark for each pytest process above, separated by colons
_QUIET = 2  # looks without a find that end the search; one may fall between a process's fork and its exec
_PAUSE = 0.05  # seconds between two looks


def watch_this_process() -> None:
    """Mark this process's environment, and start what kills all marked processes after its end.

    Does nothing where the system is not Linux.
    """
    if not hasattr(os, "pidfd_open"):
        return
    unmarked = {name: value for name, value in os.environ.items() if name != _NAME}
    own = f"{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[_NAME] = ":".join(filter(None, (os.environ.get(_NAME), own)))
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), own]
    os.posix_spawn(sys.executable, command, unmarked, file_actions=nowhere)


def mark() -> dict[str, str]:
    """What belongs into the environment of every process that a test starts."""
    return {_NAME: os.environ[_NAME]} if _NAME in os.environ else {}


def _wait_and_kill(pid: int, own: str) -> None:
    os.setsid()  # neither Ctrl-C nor the end of a terminal is for this process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        select.select([os.pidfd_open(pid)], [], [])
    quiet = 0
    while quiet < _QUIET:
        killed = [_kill(each) for each in _marked(own.encode())]
        quiet = 0 if any(killed) else quiet + 1
        time.sleep(_PAUSE)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _marked(own: bytes) -> list[int]:
    """Processes started with the mark; a zombie's environment is empty."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # gone meanwhile, or another user's
                continue
            if any(line.startswith(_NAME.encode() + b"=") and own in line for line in variables):
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    _wait_and_kill(int(sys.argv[1]), sys.argv[2])
