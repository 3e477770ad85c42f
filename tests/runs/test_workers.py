"""A simulation in several workers: the same bits as in one process, also when workers die, and one end for all."""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import calfat_plugin
from calfat_plugin.errors import CalfatError, HostError
from calfat_plugin.federation.server import Server
from calfat_plugin.host.executors import Workers
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.maths import passes
from calfat_plugin.maths.passes import has_bf16_units
from calfat_plugin.recipe import read_document
from calfat_plugin.results import RoundRecord
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.party import _number_on_machine
from calfat_plugin.runs.request import Request, checked_experiment, pick_device
from calfat_plugin.runs.session import run
from calfat_plugin.runs.workers import number_of_workers, with_workers
from tests.cli.runner import calfat
from tests.runs.mortals import METHODS, MORTAL, FailOnWarning, Fates, alone, go, outcome
from tests.runs.processes import TIMEOUT, WarmServer, environment
from tests.silo.federation import assert_they_sleep
from tests.snapshot import TextSnapshot

LONGER = (*METHODS["scaffold"], "train_args.comm_round=4")
DEATH = r"round \d: a worker has died of SIGKILL\. New ones train clients? \d(, \d)*, with the same result\."


@pytest.mark.parametrize("method", METHODS)
def test_two_workers_do_what_one_process_does(folder: Path, method: str) -> None:
    together, warnings = go("together", 2, *METHODS[method])
    assert warnings == []
    assert outcome(together) == alone(*METHODS[method])


def test_workers_train_with_the_threads_and_in_the_arithmetic_of_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the recipe leaves both to the machine, and they would choose otherwise."""
    theirs = has_bf16_units(torch.device("cpu"))
    monkeypatch.setattr(passes, "has_bf16_units", lambda device: not theirs)
    (folder / "fate-0").write_text("threads")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run, _ = go("run", 2, "train_args.comm_round=1", "calfat.runtime={threads: null, precision: auto}")
    finally:
        torch.set_num_threads(before)
    assert (folder / "threads").read_text() == "3"
    found = re.findall(r"clients train in (\w+) on cpu", (run / "log.txt").read_text())
    assert set(found) == {"fp32" if theirs else "bf16"}


@pytest.mark.parametrize(("first", "then"), [(0, 2), (3, 0)])
def test_a_run_continues_with_another_number_of_workers(folder: Path, first: int, then: int) -> None:
    go("run", first, *LONGER, "train_args.comm_round=2")
    resumed, _ = go("run", then, *LONGER, resume=True)
    assert outcome(resumed) == alone(*LONGER)


def test_a_worker_is_killed_in_a_round(folder: Path) -> None:
    killed, warnings = go("killed", 2, *LONGER, observer=Fates("death"))
    (warning,) = warnings
    assert re.fullmatch(DEATH, warning)
    assert outcome(killed) == alone(*LONGER)


def test_whoever_trains_a_client_is_killed(folder: Path) -> None:
    """The error says so; finished rounds are kept, and one process does the rest."""
    with pytest.raises(HostError, match=r"^round \d: 3 times in a row a worker has died of SIGKILL before one "):
        go("run", 2, *LONGER, observer=Fates(*["death"] * 50))
    assert 1 <= len(outcome(Path("run"))[1]) <= 3
    for fate in Path().glob("fate-*"):
        fate.unlink()
    resumed, _ = go("run", 0, *LONGER, resume=True)
    assert outcome(resumed) == alone(*LONGER)


def test_an_error_in_a_worker_is_the_run_s(folder: Path) -> None:
    for number in (0, 2):
        Path("fate-0").write_text("user")
        with pytest.raises(CalfatError, match=r"^this model cannot be trained\.$"):
            go(f"run-{number}", number)


def test_a_bug_in_a_worker_names_the_client_and_shows_where(folder: Path) -> None:
    Path("fate-0").write_text("bug")
    with pytest.raises(RuntimeError) as error:
        go("run", 2)
    assert re.fullmatch(r"round 1: client \d: ZeroDivisionError: a bug", str(error.value))
    assert f'{MORTAL / "mortal_model.py"}", line ' in str(error.value.__cause__)


def test_workers_train_while_the_server_evaluates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round is handed out when the last one is aggregated, and before it is evaluated."""
    events: list[tuple[str, int]] = []
    submit, evaluate = Workers.submit, Server.evaluate_round

    def noted_submission(self: Workers, round: int, *rest: Any) -> None:
        events.append(("submitted", round))
        submit(self, round, *rest)

    def noted_evaluation(self: Server, record: RoundRecord) -> RoundRecord:
        events.append(("evaluated", record.round))
        return evaluate(self, record)

    monkeypatch.setattr(Workers, "submit", noted_submission)
    monkeypatch.setattr(Server, "evaluate_round", noted_evaluation)
    go("run", 2)
    assert events == [
        *(("submitted", 1), ("submitted", 2), ("evaluated", 1)),
        *(("submitted", 3), ("evaluated", 2), ("evaluated", 3)),
    ]


def test_the_largest_client_begins_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins last would keep the others waiting."""
    begun: list[Sequence[int]] = []
    submit = Workers.submit

    def noted(self: Workers, round: int, clients: Sequence[int], *rest: Any) -> None:
        begun.append(clients)
        submit(self, round, clients, *rest)

    monkeypatch.setattr(Workers, "submit", noted)
    run, _ = go("run", 1, "train_args.comm_round=2")
    counts = json.loads((run / "partition.json").read_text())["class_counts"]
    for clients, row in zip(begun, csv.DictReader((run / "rounds.csv").open()), strict=True):
        sizes = [sum(counts[client]) for client in clients]
        assert sizes == sorted(sizes, reverse=True)
        assert sorted(clients) == [int(client) for client in row["clients"].split()]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "0"],
        ["--workers", "two"],
        ["--workers", "2", "--local"],
        ["--workers", "2", "--rank", "1"],
        ["--workers", "2", "--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC"],
    ],
)
def test_what_cannot_be_is_refused(folder: Path, words: list[str], snapshot: TextSnapshot) -> None:
    ended = calfat("run", "mortal.yaml", *words)
    assert (ended.code, ended.out) == (2, "")
    snapshot(ended.err)
    assert not (folder / "runs").exists()


def test_more_workers_than_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are clients; they train instead of the executor that the recipe names."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    ended = calfat(
        *("run", "mortal.yaml", "--workers", "9", "--plain", "--run-dir", "run"),
        *("--set", "train_args.client_num_per_round=2", "--set", "comm_args.backend=MPI"),
    )
    assert (ended.code, ended.err) == (0, "warning: --workers 9: a round has 2 clients; starting 2 workers.\n")
    assert ended.out.startswith("mortal: running 3 rounds in run\n")


@pytest.mark.parametrize(
    ("text", "threads", "cores", "number", "note"),
    [
        ("auto", "1", 4, 4, []),
        ("auto", "1", 8, 5, []),
        ("auto", "2", 4, 2, ["--workers auto: 2 workers of 2 threads on 4 cores. With a smaller calfat.runtime.threa"]),
        ("auto", "null", 4, 1, ["--workers auto: 1 worker of 4 threads on 4 cores. With a smaller calfat.runtime.th"]),
        (
            *("3", "null", 2, 3),
            ["--workers 3: 3 workers of 2 threads share 2 cores. A smaller calfat.runtime.thr"],
        ),
        ("3", "1", 2, 3, ["--workers 3: 3 workers of 1 thread share 2 cores. Fewer workers are as fast."]),
        ("1", "null", 2, 1, []),
    ],
)
def test_how_many(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    threads: str,
    cores: int,
    number: int,
    note: list[str],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    experiment = checked_experiment(read_document("mortal.yaml"), [f"calfat.runtime.threads={threads}"])
    request = Request(experiment, None, False, [])
    said: list[str] = []
    assert with_workers(request, runtime_of(experiment), text, said.append).workers == number
    assert [line.startswith(start) for line, start in zip(said, note, strict=True)] == [True] * len(note)


def test_each_worker_takes_the_next_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    experiment = checked_experiment(
        read_document("mortal.yaml"), ["device_args.using_gpu=true", "device_args.gpu_id=1"]
    )
    assert number_of_workers("auto", experiment) == 2
    cards = [str(pick_device(experiment, pytest.fail, worker)) for worker in range(3)]
    assert cards == ["cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("name", ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
def test_a_worker_knows_its_number_on_its_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(other, raising=False)
    assert _number_on_machine() == 0
    monkeypatch.setenv(name, "3")
    assert _number_on_machine() == 3
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "ForkServerProcess-2")
    assert _number_on_machine() == 1


def test_a_profile_is_that_of_the_process_that_leads(folder: Path) -> None:
    experiment = checked_experiment(read_document("mortal.yaml"))
    request = Request(experiment, Path("run"), False, [], workers=2, profile=True)
    run(request, RunDirectory.open(request), FailOnWarning())
    assert outcome(Path("run")) == alone()
    *rounds, _ = json.loads(Path("run/profile.json").read_text())["parts"]
    for part in rounds:
        assert {span["path"][0] for span in part["spans"]} == {"aggregation", "evaluation", "checkpoint", "loggers"}


def test_a_program_starts_workers_which_do_not_import_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many it asked for, and what they are told about it; nothing trains."""
    main, seen = sys.modules["__main__"], []

    def start(process: Any) -> None:
        seen.append(sys.modules["__main__"])
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess.start", start)
    with pytest.raises(HostError, match=r"^worker processes cannot be started \(Resource temporarily unavailable\)\. "):
        calfat_plugin.run("mortal.yaml", run_dir="run", workers="auto", progress=False)
    (told,) = seen
    assert (told is main, getattr(told, "__file__", None), told.__spec__) == (False, None, None)
    assert sys.modules["__main__"] is main


def _until(what: Callable[[], bool], leader: int) -> None:
    until = time.monotonic() + TIMEOUT
    while not what():
        assert psutil.pid_exists(leader)
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("send", "name", "status"),
    [
        pytest.param(os.killpg, "SIGINT", 130, marks=pytest.mark.slow),  # Ctrl-C on a terminal
        pytest.param(os.killpg, "SIGHUP", 130, marks=pytest.mark.slow),  # it is closed
        pytest.param(os.kill, "SIGTERM", 130, marks=pytest.mark.slow),
        (os.kill, "SIGKILL", -signal.SIGKILL),
    ],
)
def test_the_workers_end_with_the_run(
    warm: WarmServer, folder: Path, send: Callable[[int, int], None], name: str, status: int
) -> None:
    """In the middle of its training, and with nothing to do; the command that resumes has the workers, too."""
    words = ("run", "mortal.yaml", "--plain", "--run-dir", "run", "--workers", "2")
    env = {"PYTHONPATH": environment(folder / "home", MORTAL)["PYTHONPATH"]}
    leader = warm.start(*words, "--set", "train_args.comm_round=9999", cwd=folder, **env)
    try:
        _until((folder / "run" / "checkpoints" / "last.safetensors").exists, leader.pid)
        started = psutil.Process(leader.pid).children(recursive=True)
        assert len(started) >= 3, "two workers, and the server that they are forked from"
        (folder / "new").write_text("sleep")  # one worker; the other trains who is left of the round, and waits
        (folder / "new").rename(folder / "fate-0")
        _until(lambda: not (folder / "fate-0").exists(), leader.pid)
        for process in started:
            process.send_signal(signal.SIGINT)  # a terminal's, which is for the leader to act on
        assert_they_sleep([leader.pid], seconds=1.0)  # the workers do what there is to do
        send(leader.pid, getattr(signal, name))
        ended = leader.wait()
        assert (ended.code, psutil.wait_procs(started, TIMEOUT)[1]) == (status, [])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader.pid, signal.SIGKILL)
    # It clears up after a leader that could not, and stumbles over what the leader had cleared up.
    said = re.sub(r"Traceback \(.*\n(  .*\n)+KeyError: '/loky-.*\n|.*resource_tracker.*\n.*\n", "", ended.err)
    said = "".join(line for line in said.splitlines(keepends=True) if " workers of 1 thread share " not in line)
    hint = (
        "stopped. Finished rounds are kept in run. Resume with:\n"
        "  calfat run mortal.yaml --set train_args.comm_round=9999 --plain --workers 2 --resume --run-dir run\n"
    )
    assert said == (hint if status == 130 else "")  # beside that warning of a machine with one core
