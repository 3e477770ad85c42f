"""A test that starts one of everything that tests start, and waits: ``test_reaper.py`` runs it to kill it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests import programs
from tests.runs.processes import WarmServer
from tests.silo import federation
from tests.silo.broker import broker, store
from tests.silo.federation import Federation, free_ports

RANK = "import time; time.sleep(1000)  # a rank"
# As `calfat suite` starts its runs: a child that is in no group or session of ours.
DETACHED = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True).wait()"


def test_hold(tmp_path: Path) -> None:
    at_broker, at_store = free_ports(2)
    federation._context.set_forkserver_preload([])  # nothing here lives long enough to need PyTorch
    with ExitStack() as stack:
        stack.enter_context(store(tmp_path / "store", at_store))
        if programs.MOSQUITTO:
            stack.enter_context(broker(tmp_path / "broker", at_broker))
        if programs.CHROMIUM:
            flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile")
            subprocess.Popen([programs.CHROMIUM, *flags, "--remote-debugging-port=0", "about:blank"])
        subprocess.Popen([sys.executable, "-c", DETACHED])
        WarmServer(tmp_path)
        subprocess.Popen([programs.MPIEXEC, "-n", "2", sys.executable, "-c", RANK])
        stack.enter_context(Federation(tmp_path / "silo")).start(0, 1)
        Path(os.environ["READY"]).touch()
        time.sleep(1000)
