"""MPI jobs that stay: each takes any number of runs, one after another, through the real ``calfat run``.

Orders are files: ``order-<n>-<rank>.json`` holds the words of the n-th command, and ``done-<n>-<rank>`` says that it
ended well. A command that fails ends the job, as it should.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.silo.federation import PATIENCE, wait_for

_BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_BESIDE) if _BESIDE.exists() else "mpiexec"


class Job:
    """An MPI job of some processes. Use as a context manager: it ends them."""

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.size = folder, size
        self._count = 0
        self._output = (folder / "output.txt").open("wb")
        script = str(Path(__file__).with_name("job_process.py"))
        self._process = subprocess.Popen(
            [MPIEXEC, "-n", str(size), sys.executable, script, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if not self.has_ended() and exc == (None, None, None):
                self.begin([])
                self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._output.close()

    def begin(self, words: Sequence[str], ranks: Iterable[int] | None = None) -> None:
        """Order a command from all, or from some: the others are ordered the same with :meth:`join_in`."""
        self._words, self._number = words, self._count
        self._count += 1
        self.join_in(range(self.size) if ranks is None else ranks)

    def join_in(self, ranks: Iterable[int]) -> None:
        """Order the command under way from these, too."""
        for rank in ranks:
            order = self.folder / f"order-{self._number}-{rank}.json"
            order.with_suffix(".tmp").write_text(json.dumps(list(self._words)))
            order.with_suffix(".tmp").rename(order)

    def finish(self) -> None:
        """Wait for the good end of the command under way."""
        done = [self.folder / f"done-{self._number}-{rank}" for rank in range(self.size)]
        wait_for(lambda: self.has_ended() or all(file.exists() for file in done), "the job's run ends")
        assert all(file.exists() for file in done), self.output()

    def run(self, words: Sequence[str]) -> None:
        """Run a command to its good end."""
        self.begin(words)
        self.finish()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_status(self) -> int:
        """Wait for the end of the whole job."""
        return self._process.wait(PATIENCE)

    def said(self, rank: int) -> str:
        """What a process has printed in the last command."""
        file = self.folder / f"output-{self._number}-{rank}.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def pid(self, rank: int) -> int:
        """Process id, once all that a run needs has been imported."""
        file = self.folder / f"ready-{rank}"
        wait_for(lambda: self.has_ended() or (file.exists() and file.read_text()), f"rank {rank}")
        return int(file.read_text())

    def output(self) -> str:
        """What the job and the last command have printed, for messages."""
        files = [self.folder / "output.txt", *sorted(self.folder.glob(f"output-{self._number}-*.txt"))]
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')}" for file in files)
