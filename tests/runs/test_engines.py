"""Clients that other engines train, of one machine or of several: the same bits as in one process, and clear errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calfat_plugin.cli import run as command
from calfat_plugin.cli.party import ResumeHint
from calfat_plugin.errors import RecipeError
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request, checked_experiment
from tests.cli.runner import calfat
from tests.programs import MPIEXEC
from tests.runs.mortals import METHODS, MORTAL, Fates, alone, go, outcome
from tests.runs.processes import TIMEOUT, environment, sabotage
from tests.snapshot import TextSnapshot

NAMED = "calfat.runtime.executor="
FACTORIES = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

number = 3

def processes():
    return ProcessPoolExecutor(2, get_context("forkserver"))

def nothing():
    return [1, 2]

def broken():
    raise OSError("no such cluster")
"""


@pytest.fixture
def factories(folder: Path) -> Path:
    """A module of the user's, in the current folder."""
    (folder / "mine").mkdir()
    (folder / "mine" / "factories.py").write_text(FACTORIES)
    return folder


# --- mpi --------------------------------------------------------------------------------------------------------------


def test_a_job_of_mpi_does_what_one_process_does(folder: Path) -> None:
    """And ends with all of its processes at an error that a user can fix; what it has done is resumed without it."""
    scaffold = [word for change in METHODS["scaffold"] for word in ("--set", change)]
    program = [MPIEXEC, "-n", "3", sys.executable, "-m", "mpi4py.futures", "-m", "calfat_plugin.cli.main"]
    backend = ("--set", "comm_args.backend=MPI")  # as FedML calls the executor
    ended = subprocess.run(
        [*program, "run", "mortal.yaml", "--plain", "--run-dir", "run", *backend, *scaffold],
        env=environment(folder / "home", MORTAL) | sabotage("refusals", 3),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.startswith("mortal: running 3 rounds in run\n")
    assert "error: round 3: not one client delivered a usable update.\n" in ended.stderr
    go("run", 0, *METHODS["scaffold"], resume=True)
    assert outcome(Path("run")) == alone(*METHODS["scaffold"])


def test_without_a_job_there_is_no_mpi(folder: Path, snapshot: TextSnapshot) -> None:
    ended = calfat("run", "mortal.yaml", "--set", NAMED + "mpi")
    assert (ended.code, ended.out) == (2, "")
    snapshot(ended.err)
    assert not (folder / "runs").exists()


def test_a_stopped_job_can_be_resumed_without_mpi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How it was started is not known; the result is that of any number of workers."""

    def stopped(request: Request, directory: RunDirectory, plain: bool, hint: ResumeHint) -> None:
        directory.last_checkpoint.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "mpi_workers", lambda: 3)
    monkeypatch.setattr(command, "_run", stopped)
    before = signal.getsignal(signal.SIGINT)
    ended = calfat("run", "mortal.yaml", "--set", NAMED + "mpi", "--run-dir", "run")
    signal.signal(signal.SIGINT, before)  # a stopped command ignores it until it ends, and here it ends in this process
    assert ended.code == 130
    assert ended.err.endswith(f" run mortal.yaml --set {NAMED}mpi --workers 3 --resume --run-dir run\n")


# --- dask -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(folder: Path) -> Iterator[str]:
    """The address of a cluster with one process, of two threads."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


def test_a_cluster_of_dask_does_what_one_process_does(folder: Path, scheduler: str) -> None:
    """Also where a worker of it dies: Dask starts another, and trains its clients again."""
    changes = (NAMED + "dask", f"calfat.runtime.scheduler='{scheduler}'")
    killed, warnings = go("run", 0, *METHODS["scaffold"], *changes, observer=Fates("death"))
    assert warnings == []
    assert not Path("fate-0").exists()
    assert outcome(killed) == alone(*METHODS["scaffold"])


def test_a_scheduler_that_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calfat_plugin.runs.workers._TO_CONNECT", 0.5)
    with pytest.raises(RecipeError, match=r"calfat\.runtime\.scheduler: no scheduler of Dask answers at 'tcp://127"):
        go("run", 0, NAMED + "dask", "calfat.runtime.scheduler='tcp://127.0.0.1:9'")


# --- the user's own ---------------------------------------------------------------------------------------------------


def test_the_users_own_executor_does_what_one_process_does(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of its processes dies: another executor is made."""
    monkeypatch.syspath_prepend(str(factories / "mine"))
    run, warnings = go("run", 0, *METHODS["scaffold"], NAMED + "factories:processes", observer=Fates("death"))
    assert len(warnings) == 1
    assert outcome(run) == alone(*METHODS["scaffold"])


@pytest.mark.parametrize(
    "name",
    [
        *("dusk", "factories:", ":processes", "factorys:processes", "factories:process", "factories:number"),
        *("dask", "sp"),
    ],
)
def test_a_name_that_leads_to_no_executor(
    factories: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot, name: str
) -> None:
    monkeypatch.syspath_prepend(str(factories / "mine"))
    (factories / "named.yaml").write_text(Path("mortal.yaml").read_text().replace("threads: 1", f"executor: '{name}'"))
    with snapshot.raises(RecipeError):
        checked_experiment(read_document("named.yaml"))


@pytest.mark.parametrize("name", ["nothing", "broken"])
def test_a_factory_that_makes_no_executor(
    factories: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot, name: str
) -> None:
    monkeypatch.syspath_prepend(str(factories / "mine"))
    with snapshot.raises(RecipeError):
        go("run", 0, f"{NAMED}factories:{name}")


@pytest.mark.parametrize(
    "changes",
    [
        [NAMED + "mpi", "common_args.training_type=cross_silo", "comm_args.backend=GRPC"],
        [NAMED + "mpi", "common_args.host=flower"],
        ["calfat.runtime.scheduler='tcp://10.0.0.1:8786'"],
        ["common_args.training_type=cross_silo", "comm_args.backend=MPI"],
    ],
)
def test_what_has_no_executor(folder: Path, snapshot: TextSnapshot, changes: list[str]) -> None:
    with snapshot.raises(RecipeError):
        checked_experiment(read_document("mortal.yaml"), changes)


@pytest.mark.parametrize(("module", "executor"), [("mpi4py", "mpi"), ("distributed", "dask")])
def test_an_engine_that_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot, module: str, executor: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what find_spec takes for missing
    scheduler = ["calfat.runtime.scheduler='tcp://10.0.0.1:8786'"] if executor == "dask" else []
    with snapshot.raises(RecipeError):
        checked_experiment(read_document("mortal.yaml"), [NAMED + executor, *scheduler])
