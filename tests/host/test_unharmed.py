"""A run in somebody's own process (a notebook, say) leaves that process as it found it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calfat_plugin.entries import ModelEntry
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Server
from calfat_plugin.host import launch
from calfat_plugin.observer import RunObserver
from calfat_plugin.runs.compute import log_to
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.session import run as run_session
from tests.host.federation import experiment
from tests.plugins import offering


def world() -> dict[str, Any]:
    """Whatever a run could leave changed in its process."""
    root = logging.getLogger()
    kind, keys, *rest = np.random.get_state()
    return {
        "python's generator": random.getstate(),
        "numpy's generator": (kind, keys.tolist(), *rest),
        "torch's generator": torch.random.get_rng_state().tolist(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "threads of torch": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "streams": (id(sys.stdout), id(sys.stderr), sys.stdout.write.__qualname__, id(sys.excepthook)),
        "logging": (list(map(id, root.handlers)), root.level, logging.root.manager.disable),
        "warnings": (warnings.showwarning.__module__, len(warnings.filters)),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "processes": multiprocessing.get_start_method(allow_none=True),
        "fetch": launch.fedml.core.mlops.fetch_config.__qualname__,
    }


@contextmanager
def unharmed() -> Iterator[None]:
    """What is inside changes nothing of the process and leaves no thread; one of an earlier test may end meanwhile."""
    before, threads = world(), set(threading.enumerate())
    yield
    after = world()
    assert {key for key in before if before[key] != after[key]} == set()
    assert set(threading.enumerate()) <= threads


def linear(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size[0] * image_size[1], num_classes))


#: A model that trains in no time.
PLUGIN = offering(ModelEntry("linear", build=linear))


def run(tmp_path: Path) -> None:
    threads = 1 if torch.get_num_threads() > 1 else 2  # other than now
    tiny = experiment(PLUGIN, model_args__model="linear", calfat__runtime={"threads": threads})
    directory = RunDirectory.create(tiny, tmp_path / "run")
    run_session(Request(tiny, tmp_path / "run", False, []), directory, RunObserver())


def test_after_a_run_the_world_is_as_before(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with unharmed():
        run(tmp_path)


@pytest.mark.parametrize("error", [RunError("no"), KeyboardInterrupt(), ValueError("a bug")])
def test_after_a_failed_run_the_world_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(server: Server, round: int, uploads: Any) -> Any:
        raise error

    monkeypatch.setattr(Server, "aggregate_round", fail)
    with unharmed(), pytest.raises(type(error)):
        run(tmp_path)


def test_prints_warnings_and_records_go_to_the_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown_by_the_user(*arguments: Any, **keywords: Any) -> None:
        """A notebook's own way to show warnings."""

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown_by_the_user
        with log_to(tmp_path / "log.txt"):
            print("printed")
            print("half a line", end="", file=sys.stderr)
            warnings.warn("beware", stacklevel=1)
            logging.getLogger("anyone").info("noted")
            logging.getLogger("anyone").debug("not noted")
        assert warnings.showwarning is shown_by_the_user
    assert capsys.readouterr() == ("", "")
    lines = (tmp_path / "log.txt").read_text()
    for text in (
        "INFO    prints: printed",
        "INFO    prints: half a line",
        "UserWarning: beware",
        "INFO    anyone: noted",
    ):
        assert text in lines
    assert "not noted" not in lines


@pytest.mark.parametrize(("before", "after", "end"), [("\r", "", "\n"), ("", "\r", "\n"), ("\r", "", "")])
def test_of_a_bar_that_is_drawn_over_itself_the_log_has_the_end(
    tmp_path: Path, before: str, after: str, end: str
) -> None:
    with log_to(tmp_path / "log.txt"):
        for percent in range(101):
            print(f"{before}cifar10 {percent} %{after}", end="", file=sys.stderr, flush=True)
        print(end=end, file=sys.stderr)
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert line.endswith("INFO    prints: cifar10 100 %")


def test_a_library_that_logs_to_stderr_does_not_log_its_own_log(tmp_path: Path) -> None:
    """stderr leads to the log while a run lasts, so a handler for stderr must not feed itself."""
    with log_to(tmp_path / "log.txt"):
        handler = logging.StreamHandler()
        logging.getLogger().addHandler(handler)
        logging.getLogger("anyone").warning("once")
    assert (tmp_path / "log.txt").read_text().count("once") == 2  # as a record, and as what was printed


def test_a_log_on_a_full_disk_ends_nothing() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with log_to(Path("/dev/full")):
        logging.getLogger("anyone").warning("lost")
