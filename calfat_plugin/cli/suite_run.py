"""A run of a suite: ``calfat`` in a fork of a process that has imported this module (``suites/processes.py``)."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from calfat_plugin.cli.main import let_waiting_threads_sleep
from calfat_plugin.cli.main import main as calfat
from calfat_plugin.compat import quick_imports

_NEEDED = (
    "calfat_plugin.host.launch",  # the first to import torch
    "calfat_plugin.host.simulation",
    "calfat_plugin.builtin",
    "calfat_plugin.trainers.loop",
    "calfat_plugin.cli.run",
    "calfat_plugin.progress",
    "calfat_plugin.report.run_tables",
    "calfat_plugin.runs.session",
)

let_waiting_threads_sleep()
with quick_imports():
    for _name in _NEEDED:
        with suppress(Exception):  # a run fails of the same, and says so
            import_module(_name)
    gc.freeze()  # a look for garbage in a run would copy it, page by page


def main() -> None:
    """Be ``calfat`` with the arguments of this process."""
    calfat(prog_name="calfat")
