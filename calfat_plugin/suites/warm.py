"""The warm process of a suite: it has imported what a run needs, and forks each run, which so starts at once.

It computes nothing, starts no thread and touches no GPU: a fork of it is as good as a fresh process. It lives as long
as the suite holds the other end of its standard input, a socket. There the suite asks for a run, or for how one ended,
by a number, and is answered by one. What a run is to do is the first line of the run's own standard input.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from calfat_plugin.compat import quick_imports

UNKNOWN = -1000  # instead of an exit code, which is above -100 and below 256
_RUNNING = 1000  # likewise
_READY = 1
_START = 0  # asks for a run; any other number, which is a process, for how that ended
_NUMBER = struct.Struct("!i")
_POLL_SECONDS = 0.01


class WarmProcess:
    """The suite's side of it. It may end at any time, or never be ready: then nothing can be started."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``program``, which calls :func:`fork_runs`; does not wait for it."""
        self._ours, theirs = socket.socketpair()
        self.lock = threading.RLock()  # a question and its answer belong together
        with theirs:
            self._process = subprocess.Popen(
                program,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a fresh process fails of the same, and says so
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is not for it
            )
        self._ready: bool | None = None  # None: not known yet

    def ready(self, seconds: float) -> bool | None:
        """Whether runs can be started; None: still importing after so many seconds."""
        if self._ready is None and select.select([self._ours], [], [], seconds)[0]:
            self._ready = self._answer() == _READY
        return self._ready

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> ForkedRun | None:
        """Fork a run once ready; None where that cannot be done."""
        stdin, to_run = os.pipe()
        from_run, stdout = os.pipe()
        run = ForkedRun(self, self.ask(_START, stdin, stdout), to_run, from_run)
        os.close(stdin)
        os.close(stdout)
        if run.pid == UNKNOWN:
            run.close()
            return None
        with suppress(BrokenPipeError):  # it has ended already; its exit code says how
            run.stdin.write(json.dumps([list(words), dict(environment)]).encode() + b"\n")
            run.stdin.flush()
        return run

    def ask(self, number: int, *files: int) -> int:
        """The answer to a number, with files that go with it; :data:`UNKNOWN` when nobody answers."""
        with self.lock, suppress(OSError):
            socket.send_fds(self._ours, [_NUMBER.pack(number)], files)
            return self._answer()
        return UNKNOWN

    def end(self) -> None:
        """End it, but none of what it forked."""
        self._process.kill()
        self._process.wait()
        self._ours.close()

    def _answer(self) -> int:
        with suppress(OSError):
            if received := self._ours.recv(_NUMBER.size):
                return int(_NUMBER.unpack(received)[0])
        return UNKNOWN


class ForkedRun:
    """A run that a warm process forked: what the suite uses of ``subprocess.Popen``."""

    def __init__(self, warm: WarmProcess, pid: int, stdin: int, stdout: int) -> None:
        self._warm = warm
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.returncode: int | None = None

    def __enter__(self) -> ForkedRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its pipes."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs, or when nobody can say."""
        self._ask()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; :data:`UNKNOWN` when nobody can say how it ended, so call this after its output's end."""
        while (code := self._ask()) == _RUNNING:
            time.sleep(_POLL_SECONDS)
        self.returncode = code
        return code

    def terminate(self) -> None:
        """Ask it to stop."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Stop it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with self._warm.lock, suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def _ask(self) -> int:
        with self._warm.lock:  # once it is told that a process has ended, the system gives the number to another
            if self.returncode is not None:
                return self.returncode
            code = self._warm.ask(self.pid)
            if code not in (_RUNNING, UNKNOWN):
                self.returncode = code
            return code


def fork_runs(prepare: Callable[[], None]) -> None:
    """Be the warm process of the suite at standard input; returns in each run, with its arguments and environment."""
    channel = socket.socket(fileno=0)
    with quick_imports():
        prepare()
        gc.freeze()  # a look for garbage in a run would copy it, page by page
    channel.sendall(_NUMBER.pack(_READY))
    while True:
        received, files, *_ = socket.recv_fds(channel, _NUMBER.size, 2)
        if not received:
            sys.exit()
        (number,) = _NUMBER.unpack(received)
        if number == _START:
            answer = _fork()
            if answer == 0:
                channel.detach()
                _become_the_run(*files)
                return
            for file in files:
                os.close(file)
        else:
            ended, status = os.waitpid(number, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else _RUNNING
        channel.sendall(_NUMBER.pack(answer))


def _fork() -> int:
    try:
        return os.fork()
    except OSError:  # no more processes, or no memory
        return UNKNOWN


def _become_the_run(stdin: int, stdout: int) -> None:
    os.setsid()  # as the warm process itself: the suite stops its runs in order
    for source, target in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(stdout)
    with open(0, "rb", buffering=0, closefd=False) as told:
        line = told.readline()
    if not line:
        sys.exit("the suite is gone")
    words, variables = json.loads(line)
    os.environ.update(variables)
    sys.argv[1:] = words
