"""One process of an MPI job that runs ``calfat`` again and again: started once, it imports PyTorch and FedML once.

``mpiexec -n N python job_process.py FOLDER``; see ``mpi_jobs.py`` for the files by which it takes orders.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import silo_party

_POLL = 0.02  # seconds


def main(folder: Path) -> None:
    from mpi4py import MPI

    import calfat_plugin.cli.progress
    import calfat_plugin.host.mpi_simulation
    import calfat_plugin.host.silo.server
    import calfat_plugin.runs.party  # noqa: F401
    from calfat_plugin.cli.main import main as calfat

    silo_party.without_report()
    rank = MPI.COMM_WORLD.Get_rank()
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    for number in itertools.count():
        order = folder / f"order-{number}-{rank}.json"
        while not order.exists():
            time.sleep(_POLL)
        words = json.loads(order.read_text())
        if not words:
            return
        output = folder / f"output-{number}-{rank}.txt"
        with output.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
            calfat(args=words, prog_name="calfat", standalone_mode=False)
        (folder / f"done-{number}-{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
