"""Clients of a round over executors that only exist in this process."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from calfat_plugin.errors import HostError
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.executors import Failed, Trained, WorkerError, Workers, this_process, train_client
from calfat_plugin.host.transports.message import bytes_of
from calfat_plugin.observer import BatchProgress, RunObserver
from tests.snapshot import TextSnapshot

DOWNLINK = {"w": torch.ones(2)}
AT_ONCE = BrokenProcessPool("it takes no more tasks")


def start() -> Worker:
    raise ZeroDivisionError("a bug")


def trained(client: int) -> Trained:
    """What a worker sends for a client."""
    wire, state = {"w": torch.full((2,), float(client))}, {"kept": torch.tensor(client)}
    return Trained(bytes_of(wire), bytes_of(state), BatchProgress(client, 3, 3, 0.5))


class Scripted(Executor):
    """Does with each client what a test says: an outcome, an error, or None for a task that is never over."""

    def __init__(self, script: Callable[[int], Any]) -> None:
        self.script, self.clients, self.tasks = script, list[int](), list[tuple[Any, ...]]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(args)
        client = args[2]
        outcome, future = self.script(client), Future[Any]()
        self.clients.append(client)
        if outcome is AT_ONCE:
            raise AT_ONCE
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)
        return future


class Room:
    """Workers over scripted executors, of which each breaks off the one before."""

    def __init__(self, *scripts: Callable[[int], Any]) -> None:
        self.executors, self.closed = [Scripted(script) for script in scripts], 0
        self.warnings, self.seen = list[str](), list[int]()
        self._next = iter(self.executors)
        room = self

        class Seen(RunObserver):
            def client_progress(self, progress: BatchProgress) -> None:
                room.seen.append(progress.client)

        self.workers = Workers("processes", self.open, start, Seen(), self.warnings.append)

    @contextmanager
    def open(self) -> Iterator[Executor]:
        yield next(self._next)
        self.closed += 1


def dies(client: int) -> Exception:
    return BrokenProcessPool("died")


def test_clients_go_out_in_their_order_with_what_they_keep() -> None:
    room = Room(trained)
    with room.workers as workers:
        workers.submit(4, [11, 13, 10], DOWNLINK, {13: {"kept": torch.tensor(7)}})
        assert room.executors[0].clients == [11, 13, 10]
        for task, state in zip(room.executors[0].tasks, ({}, {"kept": torch.tensor(7)}, {}), strict=True):
            assert (task[1], task[3:]) == (this_process(), (4, bytes_of(DOWNLINK), bytes_of(state)))
        wire, state = workers.result(10)
        assert (wire["w"].tolist(), state["kept"].item()) == ([10.0, 10.0], 10)
        assert sorted(room.seen) == [10, 11, 13]  # each client's last batch, once
        workers.result(13)
        workers.result(11)
    assert room.closed == 1


@pytest.mark.timeout(60)
def test_whoever_waits_for_one_client_hears_of_an_error_of_another() -> None:
    """It would else wait for as long as the first one trains."""
    room = Room(lambda client: None if client == 1 else Failed("lower the rate", is_users=True))
    with room.workers as workers:
        workers.submit(1, [1, 2], DOWNLINK, {})
        with pytest.raises(HostError, match=r"^lower the rate$"):
            workers.result(1)


def test_a_bug_names_round_and_client_and_brings_its_traceback() -> None:
    room = Room(lambda client: Failed("Traceback ...\nZeroDivisionError: a bug\n", is_users=False))
    with room.workers as workers:
        workers.submit(3, [2], DOWNLINK, {})
        with pytest.raises(WorkerError, match=r"^round 3: client 2: ZeroDivisionError: a bug$") as error:
            workers.result(2)
    assert "Traceback ..." in str(error.value.__cause__)


def test_after_a_death_only_what_is_left_is_trained_again(snapshot: TextSnapshot) -> None:
    room = Room(lambda client: trained(client) if client == 5 else dies(client), trained)
    with room.workers as workers:
        workers.submit(2, [7, 5, 6], DOWNLINK, {6: {"kept": torch.tensor(1)}})
        assert [workers.result(client)[1]["kept"].item() for client in (5, 6, 7)] == [5, 6, 7]
        assert room.closed == 1
    assert room.executors[1].clients == [7, 6]
    assert room.executors[1].tasks[1][5] == bytes_of({"kept": torch.tensor(1)})
    snapshot("\n".join(room.warnings))


def test_an_executor_that_broke_between_rounds_is_made_anew() -> None:
    room = Room(lambda client: AT_ONCE, trained)
    with room.workers as workers:
        workers.submit(2, [7, 5], DOWNLINK, {})
        assert workers.result(5)[1]["kept"].item() == 5
    assert room.executors[1].clients == [7, 5]


def test_deaths_in_a_row_end_the_run_and_a_trained_client_ends_the_row(snapshot: TextSnapshot) -> None:
    room = Room(dies, dies, lambda client: trained(client) if client == 1 else dies(client), dies, dies, trained)
    with room.workers as workers:
        workers.submit(2, [1, 2], DOWNLINK, {})
        workers.result(1)
        with snapshot.raises(HostError):
            workers.result(2)
    assert [executor.clients for executor in room.executors] == [[1, 2], [1, 2], [1, 2], [2], [2], []]


def kill(number: int) -> Worker:
    faulthandler.disable()  # pytest's; the crash is meant
    os.kill(os.getpid(), number)
    raise AssertionError("it is dead")


def leave() -> Worker:
    os._exit(3)


@pytest.mark.parametrize(
    ("end", "name", "advice"),
    [
        (partial(kill, signal.SIGKILL), "SIGKILL", r"memory has run out\. If so, use fewer workers, or a smaller "),
        (partial(kill, signal.SIGSEGV), "SIGSEGV", r"SIGSEGV is no want of memory: native code .* has crashed\. Try "),
        (partial(kill, signal.SIGTERM), "SIGTERM", r"calfat_plugin ends no worker in this way"),
        (leave, "exit code 3", r"calfat_plugin ends no worker in this way"),
    ],
)
def test_the_end_of_a_worker_is_named(end: Callable[[], Worker], name: str, advice: str) -> None:
    """By the executor of Python that anybody may name; those of --workers are the same."""
    warnings: list[str] = []
    context = multiprocessing.get_context("fork")
    workers = Workers("mine", lambda: ProcessPoolExecutor(2, context), end, RunObserver(), warnings.append)
    with workers:
        workers.submit(2, [1, 2], DOWNLINK, {})
        dead = rf"^round 2: 3 times in a row a worker has died of {name} before .* clients 1, 2 waited\. .*{advice}"
        with pytest.raises(HostError, match=dead):
            workers.result(1)
    text = f"round 2: a worker has died of {name}. New ones train clients 1, 2, with the same result."
    assert warnings == [text] * 2


def test_another_error_of_an_executor_and_threads_of_the_leading_process_are_said(snapshot: TextSnapshot) -> None:
    """Such threads would share random generators with it, so the bits would depend on who comes first."""
    threads = Workers("mine:threads", lambda: ThreadPoolExecutor(2), start, RunObserver(), pytest.fail)
    for open_now in (Room(lambda client: TimeoutError("no worker has come")).workers, threads):
        with open_now as workers:
            workers.submit(2, [1, 2], DOWNLINK, {})
            with snapshot.raises(HostError):
                workers.result(1)


def test_threads_of_another_process_train_one_client_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of Dask may have several; they share one model and the global generators."""
    inside, most = [0], [0]

    class Slow:
        client_states: dict[int, Any] = {}  # noqa: RUF012

        def fit(self, client: int, round: int, downlink: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.05)
            inside[0] -= 1
            return downlink

    monkeypatch.setattr("calfat_plugin.host.executors.started", lambda start: Slow())
    with ThreadPoolExecutor(4) as threads:
        task = (train_client, b"", ("elsewhere", 1))
        futures = [threads.submit(*task, client, 1, bytes_of(DOWNLINK), bytes_of({})) for client in range(4)]
    assert all(isinstance(future.result(), Trained) for future in futures)
    assert most == [1]


def test_a_worker_sends_what_the_client_keeps_and_its_last_batch_and_keeps_nothing_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class One:
        observer = RunObserver()

        def __init__(self) -> None:
            self.client_states: dict[int, Any] = {}

        def fit(self, client: int, round: int, downlink: Any) -> Any:
            self.client_states[client] = {"kept": self.client_states[client]["kept"] + 1}
            for batch in (1, 2):
                self.observer.client_progress(BatchProgress(client, batch, 2, 0.25))
            return downlink

    worker = One()
    monkeypatch.setattr("calfat_plugin.host.executors.started", lambda start: worker)
    kept = bytes_of({"kept": torch.tensor(4)})
    found = train_client(b"", ("elsewhere", 1), 3, 1, bytes_of(DOWNLINK), kept)
    assert found == Trained(bytes_of(DOWNLINK), bytes_of({"kept": torch.tensor(5)}), BatchProgress(3, 2, 2, 0.25))
    assert worker.client_states == {}


def test_a_worker_that_cannot_be_made_is_a_bug_with_its_traceback() -> None:
    import pickle

    failed = train_client(pickle.dumps(start), ("elsewhere", 1), 0, 1, bytes_of(DOWNLINK), bytes_of({}))
    assert isinstance(failed, Failed)
    assert not failed.is_users
    assert failed.text.endswith("ZeroDivisionError: a bug\n")
