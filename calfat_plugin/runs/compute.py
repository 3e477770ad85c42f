"""What surrounds the computing of a run: threads, priority, its log, and ``environment.json``, which describes it."""

from __future__ import annotations

import io
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.disk import refuse_link
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.installed import version_of
from calfat_plugin.layouts import using_layout
from calfat_plugin.profiling import Profile
from calfat_plugin.registry import Registry

if TYPE_CHECKING:
    import torch

_LOWEST = 19  # the largest nice value
_SESSION = Path("/proc/self/autogroup")  # reads "/autogroup-123 nice 0"; takes the number
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_DISTRIBUTIONS = (
    "calfat-plugin",
    "fedml",
    "flwr",
    "ray",
    "torch",
    "torchvision",
    "numpy",
    "scikit-learn",
    "pyautoattack",
    "pluggy",
    "safetensors",
)

# --- threads and priority ---------------------------------------------------------------------------------------------


@contextmanager
def computing_as(experiment: Experiment) -> Iterator[None]:
    """The recipe's number of threads and memory layout for a while: arithmetic depends on both in the last bits."""
    import torch

    threads, threads_before = experiment.runtime.threads, torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with using_layout(experiment.runtime.layout):
            yield
    finally:
        if threads is not None:
            torch.set_num_threads(threads_before)


def new_profile(device: torch.device) -> Profile:
    import torch

    if device.type == "cuda":
        return Profile(lambda: torch.cuda.synchronize(device))
    return Profile()


@contextmanager
def lowest_priority() -> Iterator[None]:
    """Let this process, and all that it starts meanwhile, run on what others leave of the processor: ``--idle``.

    Linux shares the processor first between sessions ("autogroups"), and only then between the processes of one. A
    process that has begun a session of its own competes with those of another session as an equal, however high its
    nice value is. So three things are set: the nice value, the scheduling class, and the nice value of the session.

    Call it before any library starts threads: they inherit the priority of the thread that starts them. The nice value
    of the process stays lowest afterwards, since the system lets nobody but root raise it again. That of the session is
    put back, since a terminal's session has other processes.
    """
    os.nice(_LOWEST)
    with suppress(OSError, AttributeError):  # another system than Linux, or a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    session_before = None
    with suppress(OSError, ValueError):  # sessions have no nice value here
        session_before = int(_SESSION.read_text(encoding="ascii").rpartition("nice")[2])
    _set_session_nice(_LOWEST)
    try:
        yield
    finally:
        if session_before is not None:
            _set_session_nice(session_before)


def _set_session_nice(value: int) -> None:
    with suppress(OSError):  # no sessions of this kind, or a file system that is read-only in a container
        _SESSION.write_text(str(value), encoding="ascii")


# --- log.txt ----------------------------------------------------------------------------------------------------------


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send records, warnings and prints of this process to ``path`` (appended) and nowhere else, for a while.

    Afterwards the process's handlers, levels, streams and way of showing warnings are what they were.
    """
    refuse_link(path, "the log is written")
    if path.is_fifo():  # opening it would wait for its reader for ever
        raise RunError(f"{path}: is a pipe, so the log cannot be written there. Remove it.")
    root = logging.getLogger()
    handler = _QuietFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    # A logger of its own, not below the root: a library that puts a handler for sys.stderr on the root logger would
    # else log its own output for ever.
    prints = logging.Logger("prints")
    prints.addHandler(handler)
    stream = _PrintsToLog(prints)
    warned = logging.Logger("py.warnings")
    warned.addHandler(handler)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        warned.warning("%s", warnings.formatwarning(message, category, filename, lineno, line).rstrip())

    previous = root.handlers[:], root.level, warnings.showwarning
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        stream.write("\n")
        root.handlers, level, warnings.showwarning = previous
        root.setLevel(level)
        handler.close()


class _QuietFileHandler(logging.FileHandler):
    """A file handler that gives up a record it cannot write: a full disk must not end a run for want of a log line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class's name)
        """Nothing; the base class would print to stderr, which leads back here."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _PrintsToLog(io.TextIOBase):
    """A text stream whose lines become log records; of a bar, which is drawn over itself, the end alone."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._pending = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, pending = (self._pending + text.replace("\r\n", "\n")).split("\n")
        for line in lines:
            self._log(line)
        self._pending = pending[max(0, pending.rstrip("\r").rfind("\r")) :]
        return len(text)

    def flush(self) -> None:
        if "\r" not in self._pending:
            self._log(self._pending)
            self._pending = ""

    def _log(self, line: str) -> None:
        visible = line.rstrip().rpartition("\r")[2]  # what was before it has been overwritten
        if visible:
            self._logger.info("%s", visible)


# --- environment.json -------------------------------------------------------------------------------------------------


def describe_environment(device: Any, registry: Registry, command: list[str], precision: str) -> dict[str, Any]:
    """Versions, device, threads, precision, plugins, commit; ready for JSON."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "device": str(device),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "plugins": [f"{provider} ({provider.plugin})" for provider in registry.plugins()],
        "plugins_not_loaded": [str(failure) for failure in registry.failures],
        "commit": commit_of(Path(__file__).resolve().parents[2]),
        "executable": sys.executable,
    }


def environment_of(experiment: Experiment, device: torch.device, command: list[str]) -> dict[str, Any]:
    """The same of a run, with the host that runs its rounds."""
    environment = describe_environment(device, experiment.registry, command, experiment.runtime.precision)
    return {**environment, "host": experiment.common.host}


def processor() -> str:
    """The processor's name and its vector units as torch uses them, which decide how sums are rounded."""
    import torch

    name = platform.processor() or platform.machine()
    with suppress(OSError):  # another system than Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip() or name
                break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def commit_of(source: Path) -> str | None:
    """Commit of a source tree, ``-dirty`` where files differ from it; None for an installed package or without git.

    Git only looks: ``describe --dirty`` alone would write the index, under a lock that a kill leaves behind, and then
    refuse every command of whoever works in that tree.
    """
    if not (source / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(source), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit = git("describe", "--always", "--abbrev=40")
        changed = git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit
