"""A run of a suite as a process of its own: ``calfat``, which stops when the process of the suite is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading

_STDIN = 0


def main() -> None:
    """Be ``calfat`` with the arguments of this process; its standard input is a pipe from the suite.

    It stops as after Ctrl-C: finished rounds are kept.
    """
    threading.Thread(target=_stop_without_suite, daemon=True).start()
    sys.argv[0] = "calfat"

    from calfat_plugin.cli.main import main as calfat

    calfat(prog_name="calfat")


def _stop_without_suite() -> None:
    while os.read(_STDIN, 1):  # the suite writes nothing: this returns when its end of the pipe is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
