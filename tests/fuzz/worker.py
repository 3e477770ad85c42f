"""Runs one case after the other, each in a process of its own, and reports how it ended and what it cost.

Imports once what its cases need, then forks for each order, as ``tests/runs/warm_server.py`` does, whose orders it
reads. A child has limits, so that a case that hangs or grows ends as a failure, not as the end of this machine.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "runs")]

import warm_server  # noqa: E402 (found by path, as this file is run)

from calfat_plugin.federation import memory  # noqa: E402

_MEGABYTE = 1024  # ru_maxrss counts kilobytes
_ROOM = 4.0  # address space beyond what the imports took, as a multiple of the memory that a case may take
_PATIENCE, _BUSY = 120.0, 20.0  # wall clock: whoever needs so many seconds, and so often its CPU time, hangs


def limited(order: dict[str, Any]) -> None:
    """Bound what this process may use; CPU time is three times what a case may take, to be seen as slow, not killed."""
    seconds = int(3 * order["seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * os.sysconf("SC_PAGE_SIZE") + int(_ROOM * order["megabytes"] * 1_000_000)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def child(order: dict[str, Any]) -> None:
    """Do what an order says, ``calfat`` or its target, and end."""
    os.setpgid(0, 0)
    memory._RESET = Path("/")  # a run would set the mark back that counts all that a case takes
    limited(order)
    if "target" in order:
        import calfat_plugin.cli.main as cli

        module, _, name = order["target"].partition(":")
        cli.main = lambda prog_name: getattr(importlib.import_module(module), name)(*sys.argv[1:])
    warm_server.child(order)


def outcome(pid: int, before: int, seconds: float) -> dict[str, Any]:
    """Wait for a child: its exit code (negative for a signal), CPU seconds, and megabytes beyond the imports."""
    deadline = time.monotonic() + _PATIENCE + _BUSY * seconds
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": used.ru_utime + used.ru_stime,
        "megabytes": max(0, used.ru_maxrss - before) / _MEGABYTE,
    }


def resident() -> int:
    """Memory that this process holds, in kilobytes; its ``ru_maxrss`` would count that of whoever started it, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def serve(modules: list[str]) -> None:
    """Answer orders until there are no more."""
    for module in modules:
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("an import started threads; forking would lose them")
    before = resident()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(order)
        print(json.dumps(outcome(pid, before, order["seconds"])), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1:])
