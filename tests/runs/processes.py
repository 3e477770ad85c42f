"""Run ``calfat`` in real processes: cold, as a user starts it, or forked from a server that has imported everything."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cli.runner import Ended
from tests.environment import bare

ROOT = Path(__file__).resolve().parents[2]
SABOTEUR = Path(__file__).parent / "saboteur"
TIMEOUT = 300.0  # for a machine that is busy with other things

# Rounds of some hundredths of a second: a two-layer model, large batches, short attacks.
RECIPE = """\
common_args: {training_type: simulation, random_seed: 0}
data_args: {dataset: digits, partition_method: dirichlet, partition_alpha: 0.3}
model_args: {model: 'tiny_model:build'}
train_args: {client_num_in_total: 5, comm_round: 9, batch_size: 128, learning_rate: 0.05}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural, fgsm]
  monitor: {evaluators: [natural, fgsm], max_examples: 100}
  runtime: {threads: 1}
"""


def environment(home: Path, *path: Path, **extra: str) -> dict[str, str]:
    """A small environment of its own: one thread, an empty home directory, the plugin and ``path`` to import from."""
    home.mkdir(exist_ok=True)
    variables = {
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "",  # the same machine for all: one without a GPU
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SABOTEUR, *path))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WITHOUT_REPORT": "1",
    }
    return bare(**variables | extra)


def cold(*arguments: str, cwd: Path, env: Mapping[str, str], timeout: float = TIMEOUT) -> Ended:
    """Run ``calfat`` as a user does, to the end."""
    command = [sys.executable, "-m", "calfat_plugin.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


class WarmProcess:
    """A started process of :class:`WarmServer`."""

    def __init__(self, server: WarmServer, pid: int, out: Path, err: Path) -> None:
        self._server, self.pid, self._out, self._err = server, pid, out, err

    def wait(self) -> Ended:
        """Wait for its end; one that hangs is killed and fails the test."""
        code = self._server.ask({"wait": self.pid, "seconds": TIMEOUT})
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            raise TimeoutError(f"still running after {TIMEOUT} s:\n{self._out.read_text()}\n{self._err.read_text()}")
        # A process that is killed at once has opened neither.
        out, err = (file.read_text() if file.exists() else "" for file in (self._out, self._err))
        return Ended(code, out, err)


class WarmServer:
    """The client's side of ``warm_server.py``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "warm_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "server-errors.txt").open("w"),
            env=environment(folder / "server-home"),
            text=True,
        )

    def start(self, *arguments: str, cwd: Path, out: Path | None = None, **env: str) -> WarmProcess:
        """Start ``calfat`` with these arguments in ``cwd``; ``out``: where it prints."""
        number = next(self._numbers)
        out, err = out or self._folder / f"{number}.out", self._folder / f"{number}.err"
        order = {
            "arguments": arguments,
            "cwd": str(cwd),
            "env": environment(self._folder / "home", cwd, **env),
            "out": str(out),
            "err": str(err),
        }
        return WarmProcess(self, self.ask(order), out, err)

    def run(self, *arguments: str, cwd: Path, **env: str) -> Ended:
        """Run ``calfat`` to the end."""
        return self.start(*arguments, cwd=cwd, **env).wait()

    def ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError((self._folder / "server-errors.txt").read_text())
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT)


def sabotage(at: str, round: int = 0, signal: str = "SIGKILL") -> dict[str, str]:
    """The environment that makes the saboteur strike; see ``saboteur.py``."""
    return {"SABOTAGE": json.dumps({"at": at, "round": round, "signal": signal})}
