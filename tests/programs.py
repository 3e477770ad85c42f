"""Programs that some tests need and pip cannot install. A test says so with ``@pytest.mark.needs("mosquitto")``.

Where a program is missing the test is skipped, or fails where ``CALFAT_CI`` is set: CI must not pass without it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

#: Debian puts it where only root's PATH looks.
MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_BESIDE) if _BESIDE.exists() else "mpiexec"  # the package mpich brings it
_FOUND = {"mosquitto": MOSQUITTO, "chromium": CHROMIUM, "g++": shutil.which("g++")}


def require(program: str) -> None:
    """Skip or fail the running test if the program is not here.

    Args:
        program: Debian's name of the package, ``mosquitto``, ``chromium`` or ``g++``.
    """
    if _FOUND[program] is None:
        end = pytest.fail if os.environ.get("CALFAT_CI") else pytest.skip
        end(f"{program} is not installed; on Debian: apt-get install -y {program} (CONTRIBUTING.md, Set-up)")
