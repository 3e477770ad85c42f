"""A run of a suite as a process of its own: ``calfat``, which stops when the process of the suite is gone.

Without arguments this is the warm process, which forks such processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module

from calfat_plugin.cli.main import main as calfat
from calfat_plugin.cli.main import wait_passively
from calfat_plugin.suites.warm import fork_runs

_STDIN = 0
_NEEDED = (
    "calfat_plugin.host.launch",  # the first to import torch
    "calfat_plugin.host.simulation",
    "calfat_plugin.builtin",
    "calfat_plugin.trainers.loop",
    "calfat_plugin.cli.run",
    "calfat_plugin.cli.progress",
    "calfat_plugin.cli.results",
    "calfat_plugin.runs.session",
    "calfat_plugin.report.run_page",
    "jinja2.loaders",
)
_NEEDED_TO_DRAW = ("agg", "pdf", "svg")  # matplotlib's backends


def main() -> None:
    """Be ``calfat`` with the arguments of this process; its standard input is a pipe from the suite.

    It stops as after Ctrl-C: finished rounds are kept.
    """
    if len(sys.argv) == 1:
        wait_passively()
        fork_runs(_import_what_runs_need)
    threading.Thread(target=_stop_without_suite, daemon=True).start()
    sys.argv[0] = "calfat"
    calfat(prog_name="calfat")


def _import_what_runs_need() -> None:
    for name in _NEEDED:
        import_module(name)

    from calfat_plugin.report.charts import matplotlib_at_hand

    with matplotlib_at_hand():
        for name in _NEEDED_TO_DRAW:
            import_module(f"matplotlib.backends.backend_{name}")


def _stop_without_suite() -> None:
    while os.read(_STDIN, 1):  # the suite writes nothing more: this returns when its end of the pipe is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
