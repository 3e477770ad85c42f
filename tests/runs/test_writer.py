"""How a round gets to disk: content, then names in order, while the next round trains; who waits for it, and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.directory import CHECKPOINTS, RunDirectory
from calfat_plugin.runs.writer import RunWriter
from tests.report.made import experiment, record
from tests.runs.processes import TIMEOUT
from tests.runs.test_client_states import names, state
from tests.snapshot import TextSnapshot


class Disk:
    """Notes what is forced to disk together, and what takes its place; each forcing waits to be let through.

    Attributes:
        events: a sorted list of names for what was forced to disk together, and the name of what took its place.
        open: whether forcing goes through.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[list[str] | str] = []
        self.open = threading.Event()
        self.open.set()
        replace = os.replace

        def synced(paths: Collection[Path]) -> None:
            assert self.open.wait(TIMEOUT)
            self.events.append(sorted(path.name for path in paths if path.exists()))

        def replaced(old: Path, new: Path) -> None:
            replace(old, new)
            self.events.append(new.name)

        monkeypatch.setattr("calfat_plugin.disk.sync_together", synced)
        monkeypatch.setattr("calfat_plugin.disk.os.replace", replaced)

    def close(self) -> None:
        """Let everything through, so that a failing test ends."""
        self.open.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.last_checkpoint.parent.mkdir(parents=True)
    return directory


def play(run: RunWriter, round: int, accuracy: float = 0.5) -> None:
    """A round in which client 0 trained."""
    run.client_states[0] = state(round)
    snapshot = Snapshot(round, {"w": torch.full((1,), round)}, client_states=run.client_states)
    run.round_finished(record(round, {"natural": accuracy, "pgd20": accuracy}), snapshot)


def on_disk(directory: RunDirectory, name: str = "last") -> int:
    """The round of a checkpoint, all of whose client states are there; 0 without one."""
    path = directory.checkpoint(name)
    if not path.exists():
        return 0
    snapshot = load_checkpoint(path)[0]
    assert snapshot.client_states[0]["scaffold/c/w"].max() == snapshot.global_state["w"] == snapshot.round
    return snapshot.round


def test_the_values_of_many_clients_are_on_disk_before_the_checkpoint(directory: RunDirectory, disk: Disk) -> None:
    many = experiment("train_args.client_num_in_total=11", "train_args.client_num_per_round=1")
    with RunWriter(directory, many) as run:
        play(run, 1)
    together, *_ = disk.events
    assert {"rounds.jsonl", "clients.csv", "rounds.csv"} <= set(together)


def test_a_round_ends_in_the_order_that_a_crash_survives(directory: RunDirectory, disk: Disk) -> None:
    """All content on disk, then the names in order; nothing is removed that the checkpoint on disk names."""
    best, last = ["best-natural.safetensors", "best-robust.safetensors"], "last.safetensors"

    def of_round(number: int, *names: str) -> list[list[str] | str]:
        rounds = ["rounds.jsonl", "rounds.csv"]
        first = [f"client-0-round-{number}.safetensors", "clients", *rounds, "run", *(f"{n}.tmp" for n in names)]
        return [sorted(first), *names, ["checkpoints"]]

    with RunWriter(directory, experiment()) as run:
        play(run, 1, 0.5)
        run.settle()
        assert disk.events == of_round(1, *best, last)
        disk.events.clear()
        play(run, 2, 0.4)
    assert disk.events == of_round(2, last)
    both = ["client-0-round-1.safetensors", "client-0-round-2.safetensors"]
    assert names(directory.client_states) == both
    with RunWriter(directory, experiment(), run.best, load_checkpoint(directory.last_checkpoint)[0]) as run:
        assert names(directory.client_states) == both
        assert run.client_states[0]["scaffold/c/w"].max() == 2
        disk.events.clear()
        play(run, 3, 0.6)
    assert disk.events == of_round(3, *best, last)
    assert names(directory.client_states) == ["client-0-round-3.safetensors"]


def test_only_the_last_checkpoint_has_the_models_that_clients_sent(directory: RunDirectory) -> None:
    weights = {"w": torch.ones(1)}
    with RunWriter(directory, experiment()) as run:
        round = record(1, {"natural": 0.5, "pgd20": 0.5})  # better than none: every checkpoint is of it
        run.round_finished(round, Snapshot(1, weights, client_models={3: weights}))
    written = [name for name in CHECKPOINTS if directory.checkpoint(name).is_file()]
    kept = {name: [*load_checkpoint(directory.checkpoint(name))[0].client_models] for name in written}
    assert kept == {"last": [3], "best-natural": [], "best-robust": []}


def test_the_last_checkpoint_knows_the_best_rounds_so_far(directory: RunDirectory) -> None:
    """From which a resumed run goes on choosing."""
    with RunWriter(directory, experiment()) as run:
        for round, accuracy in enumerate((0.4, 0.6, 0.5), start=1):
            play(run, round, accuracy)
    _, notes = load_checkpoint(directory.last_checkpoint)
    assert {name: best["round"] for name, best in notes["best"].items()} == {"best-natural": 2, "best-robust": 2}


def test_the_next_round_trains_while_one_goes_to_disk_and_no_second_one_does(
    directory: RunDirectory, disk: Disk
) -> None:
    with RunWriter(directory, experiment()) as run, contextlib.closing(disk):
        play(run, 1)
        run.settle()
        disk.open.clear()
        play(run, 2, 0.6)  # returns at once
        assert [on_disk(directory, name) for name in ("last", "best-natural")] == [1, 1]
        later = threading.Thread(target=play, args=(run, 3))
        later.start()
        later.join(0.2)
        assert later.is_alive()
        assert on_disk(directory) == 1
        assert len(directory.rounds.read_text().splitlines()) == 2  # nothing of the third is written
        disk.open.set()
        later.join(TIMEOUT)
    assert [on_disk(directory, name) for name in ("last", "best-natural")] == [3, 2]
    assert names(directory.client_states) == ["client-0-round-2.safetensors", "client-0-round-3.safetensors"]


def test_a_stop_and_the_last_round_wait_for_the_disk(directory: RunDirectory, disk: Disk) -> None:
    rounds = experiment().num_rounds
    for number, stop in ((1, KeyboardInterrupt), (rounds, None)):
        disk.open.clear()
        release = threading.Timer(0.2, disk.open.set)
        with contextlib.suppress(KeyboardInterrupt), RunWriter(directory, experiment()) as run:
            if stop is None:
                release.start()  # the last round waits
                play(run, number)
                assert on_disk(directory) == number
            else:
                play(run, number)
                assert on_disk(directory) == 0
                release.start()  # only now, however long the machine took: the end waits
                raise stop
        assert on_disk(directory) == number


@pytest.mark.parametrize("another", [True, False])
def test_a_disk_that_refuses_a_round_is_reported_with_the_next_one_or_at_the_end(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, another: bool, snapshot: TextSnapshot
) -> None:
    def full(paths: Collection[Path]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def three_rounds() -> None:
        with RunWriter(directory, experiment()) as run:
            play(run, 1)
            run.settle()
            monkeypatch.setattr("calfat_plugin.disk.sync_together", full)
            play(run, 2)
            if another:
                play(run, 3)

    with snapshot.raises(RunError):
        three_rounds()
    assert on_disk(directory) == 1
    assert len(directory.rounds.read_text().splitlines()) == 2
