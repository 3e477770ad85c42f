"""Cases, the process that runs them, and what is a failure."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.environment import bare

ROOT = Path(__file__).parents[2]
GOOD, REFUSED = 0, 2
SECONDS, MEGABYTES = 5.0, 500.0  # what a case may take: CPU time, so that a busy machine is no failure
_TRIES = 60  # to shrink a failing case
_SHOWN = 2000  # characters of a case in a report


@dataclass(frozen=True)
class Case:
    """A command on some input.

    Attributes:
        name: what makes it again: kind, seed and number.
        arguments: of ``calfat``; relative to a folder of its own.
        files: path in that folder to content.
        folder: a directory to copy there first; None: none.
        seconds: CPU time that it may take.
        megabytes: memory that it may take beyond the imports.
        target: ``module:function`` to call instead of ``calfat``.
    """

    name: str
    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    folder: Path | None = None
    seconds: float = SECONDS
    megabytes: float = MEGABYTES
    target: str = ""

    def __str__(self) -> str:
        files = "".join(f"\n--- {path}\n{shown(content)}" for path, content in self.files.items())
        return f"{self.name}: {' '.join(map(repr, self.arguments))}{files}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended: exit code, CPU seconds, megabytes beyond the imports, and what it printed."""

    code: int
    seconds: float
    megabytes: float
    out: str
    err: str

    def failure(self, case: Case) -> str:
        """What is wrong with it in a line that is the same for the same fault; empty: nothing."""
        if "Traceback (most recent call last)" in self.err + self.out:
            frames = re.findall(r'File "[^"]*?(calfat_plugin/[^"]+)", line \d+, in (\S+)', self.err + self.out)
            at = "at {}:{}".format(*frames[-1]) if frames else "outside of the package"
            last = [line for line in (self.err or self.out).splitlines() if line[:1] not in (" ", "")] or [""]
            what = re.sub(r"'[^']*'|[0-9]+", "_", last[-1])[:160]
            return f"traceback {at}: {what}"
        if self.code not in (GOOD, REFUSED):
            return f"exit code {self.code}"
        if self.code == REFUSED and not re.search(r"(?i)error: \S|Usage: ", self.err):
            return "refused without a word"
        if self.seconds > case.seconds:
            return f"more than {case.seconds:g} s of CPU time"
        if self.megabytes > case.megabytes:
            return f"more than {case.megabytes:g} MB"
        return ""


class Bench:
    """Runs cases in a folder, one after the other."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder, self._process = folder, process

    def run(self, case: Case) -> Outcome:
        """Run one case in a fresh folder, in which ``recipes/`` and ``suites/`` are the shipped ones."""
        cwd, out, err = self._folder / "case", self._folder / "out", self._folder / "err"
        shutil.rmtree(cwd, ignore_errors=True)
        if case.folder is None:
            cwd.mkdir()
        else:
            shutil.copytree(case.folder, cwd, symlinks=True)
        for name in ("recipes", "suites"):
            (cwd / name).symlink_to(ROOT / name)
        for name, content in case.files.items():
            (cwd / name).parent.mkdir(parents=True, exist_ok=True)
            (cwd / name).write_bytes(content)
        env = {**bare(HOME=str(self._folder), LANG="C.UTF-8", OMP_NUM_THREADS="1"), "PYTHONPATH": str(ROOT)}
        order = {"arguments": case.arguments, "cwd": str(cwd), "env": env, "out": str(out), "err": str(err)}
        limits = {"seconds": case.seconds, "megabytes": case.megabytes}
        answer = self._ask({**order, **limits, **({"target": case.target} if case.target else {})})
        text = [file.read_text(encoding="utf-8", errors="replace") for file in (out, err)]
        return Outcome(answer["code"], answer["seconds"], answer["megabytes"], *text)

    def _ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def failures(self, cases: Iterable[Case]) -> dict[str, list[Case]]:
        """Run all; failure to the cases that fail so, the first one of each shrunk."""
        found: dict[str, list[Case]] = {}
        for case in cases:
            if failure := self.run(case).failure(case):
                print(f"{failure}: {case.name}", flush=True)  # seen with -s, also of a run that is cut short
                found.setdefault(failure, []).append(case)
        for failure, failing in found.items():
            failing[0] = self._shrunk(failing[0], failure)
        return found

    def _shrunk(self, case: Case, failure: str) -> Case:
        """The case with as many lines of its files left out as it takes not much time to try."""
        tries = _TRIES
        for path in case.files:
            size = max(1, len(lines_of(case, path)) // 2)
            while size and tries:
                start = 0
                while start < len(lines := lines_of(case, path)) and tries:
                    tries -= 1
                    less = b"".join([*lines[:start], *lines[start + size :]])
                    smaller = replace(case, files={**case.files, path: less})
                    if self.run(smaller).failure(smaller) == failure:
                        case = smaller
                    else:
                        start += size
                size //= 2
        return case


def lines_of(case: Case, path: str) -> Sequence[bytes]:
    """A file's lines with their ends."""
    return case.files[path].splitlines(keepends=True)


def shown(content: bytes) -> str:
    """A file's content for people: a text as it is, others as Python writes them, long ones cut."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = repr(content)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(content)} bytes)"


def report(found: Mapping[str, Sequence[Case]]) -> str:
    """All failures, the commonest first, each with its first case."""
    order = sorted(found, key=lambda failure: -len(found[failure]))
    return "\n\n".join(f"== {len(found[each])} x {each}\n{found[each][0]}" for each in order)


@contextmanager
def bench(folder: Path, *modules: str) -> Iterator[Bench]:
    """A bench whose process has imported ``modules``."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**bare(HOME=str(folder), LANG="C.UTF-8", OMP_NUM_THREADS="1"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(Path(__file__).with_name("worker.py")), *modules]
    with (folder / "worker-errors.txt").open("w") as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=folder, text=True
        )
    try:
        yield Bench(folder, process)
    finally:
        process.communicate()
    assert process.returncode == 0, (folder / "worker-errors.txt").read_text()
