"""A party's process in the tests of cross-silo runs: ``calfat run`` with its output in a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LONGEST = 120.0  # seconds that a hanging party waits to be let go


def be_party(words: Sequence[str], output: str, hang_in: int | None) -> None:
    """A party's process."""
    folder = Path(output).parent
    os.chdir(folder)
    with open(output, "a", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    if hang_in is not None:
        _hang(folder, hang_in)
    from calfat_plugin.cli.main import main

    main(args=list(words), prog_name="calfat")


def _hang(folder: Path, hang_in: int) -> None:
    from calfat_plugin.parties import Worker

    fit = Worker.fit

    def hanging(self: Worker, client: int, round: int, downlink: Any) -> Any:
        wire = fit(self, client, round, downlink)
        if round == hang_in and not (folder / "go").exists():
            (folder / f"hanging-{client + 1}").touch()
            until = time.monotonic() + _LONGEST
            while not (folder / "go").exists() and time.monotonic() < until:
                time.sleep(0.02)
        return wire

    Worker.fit = hanging  # type: ignore[method-assign]
