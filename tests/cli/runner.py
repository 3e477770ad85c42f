"""Runs the commands: in this process for speed, or as somebody's shell would."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from calfat_plugin.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def refused(message: str) -> Ended:
    """The end of a command that says what is wrong, and nothing else."""
    return Ended(2, "", f"error: {message}\n")


def calfat(*arguments: object) -> Ended:
    """Run ``calfat`` in this process; an exception that the command lets through comes through here, too."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    on_interrupt = signal.getsignal(signal.SIGINT)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(args=[*map(str, arguments)], prog_name="calfat")
        except SystemExit as stop:
            code = stop.code
        finally:  # a command that was stopped ignores further signals until its process ends: this one goes on
            signal.signal(signal.SIGINT, on_interrupt)
    return Ended(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def python(program: str, *arguments: str, cwd: Path | None = None, path: tuple[Path, ...] = (), **env: str) -> Ended:
    """Run a program text in a process of its own that can import the package, and whatever lies in ``path``."""
    search = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": search, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


COMMAND = "from calfat_plugin.cli.main import main; main(prog_name='calfat')"
"""``calfat`` as a program text, for :func:`python`."""

REPORTING = """
import atexit, sys
heavy = ("torch", "torchvision", "fedml", "numpy", "scipy", "sklearn", "matplotlib", "pandas")
atexit.register(lambda: print("imported:", *sorted(set(heavy) & set(sys.modules)), file=sys.stderr))
"""
"""Goes before :data:`COMMAND`: prints on stderr, as the last line, which heavy packages were imported."""
