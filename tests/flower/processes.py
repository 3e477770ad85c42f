"""What tests of whole runs on Flower share: their processes, how long they may take, and the bits that they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.flower.federation import digest

MARK = "CALFAT_TEST_RUN"  # variable of the environment
TIMEOUT = 1800  # seconds for what takes some ten


def run_words(recipe: Path, directory: Path, *words: str) -> list[str]:
    """What follows Python in the command that runs a recipe."""
    return ["-m", "calfat_plugin.cli.main", "run", str(recipe), "--plain", "--run-dir", str(directory), *words]


def started_by(directory: Path) -> list[psutil.Process]:
    """Whatever runs of this directory have started and still runs: all of it has it in :data:`MARK`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def bits(directory: Path) -> str:
    return digest(load_checkpoint(directory / "checkpoints" / "last.safetensors")[0].global_state)
