"""TensorBoard and W&B hear what the run writes down, offline, and say what they lack."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.errors import PluginError
from calfat_plugin.loggers.base import final_scalars, public_recipe, public_recipe_text, round_scalars
from calfat_plugin.loggers.tensorboard import TensorBoard, TensorBoardOptions
from calfat_plugin.loggers.wandb import Wandb, WandbOptions
from calfat_plugin.results import RunInfo, RunResult
from tests.report.made import evaluation, idle, record
from tests.report.real import RealRun
from tests.snapshot import TextSnapshot

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def rows(run: RealRun) -> list[dict[str, str]]:
    with (run.directory / "rounds.csv").open() as file:
        return list(csv.DictReader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag to (step, value), as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def info(directory: Path, start_round: int = 1) -> RunInfo:
    recipe = {"tracking_args": {"wandb_key": "hunter2"}, "train_args": {"epochs": 1}}
    return RunInfo("made", directory, recipe, num_rounds=4, start_round=start_round)


# --- a real run -------------------------------------------------------------------------------------------------------


@needs_tensorboard
def test_tensorboard_has_the_rows_of_a_real_run(real: RealRun) -> None:
    found = scalars(real.directory / "tensorboard")
    for tag, column in (
        ("accuracy/natural", "natural"),
        ("accuracy/fgsm_release", "fgsm_release"),
        ("heterogeneity", "heterogeneity"),
        ("loss/client_1", "loss_1"),
        ("update_norm/client_0", "update_norm_0"),
        ("bytes/up", "bytes_up"),
    ):
        expected = [(int(row["round"]), pytest.approx(float(row[column]), rel=1e-6)) for row in rows(real)]
        assert found[tag] == expected
    results = json.loads((real.directory / "results.json").read_text())
    (natural,) = (e["accuracy"] for e in results["evaluations"] if e["label"] == "natural")
    assert found["final/natural"] == [(2, pytest.approx(natural, rel=1e-6))]


def wandb_records(file: Path) -> Iterator[Any]:
    """The messages of an offline run, which ``wandb sync`` would send."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        message = Record()
        message.ParseFromString(data)
        yield message


def test_wandb_keeps_a_real_run_offline(real: RealRun) -> None:
    (folder,) = (real.directory / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    messages = list(wandb_records(file))
    history = [
        {item.key: json.loads(item.value_json) for item in message.history.item}
        for message in messages
        if message.WhichOneof("record_type") == "history"
    ]
    assert [row["accuracy/natural"] for row in history] == [float(row["natural"]) for row in rows(real)]
    assert [row["heterogeneity"] for row in history] == [float(row["heterogeneity"]) for row in rows(real)]
    summary = {
        item.key: json.loads(item.value_json)
        for message in messages
        if message.WhichOneof("record_type") == "summary"
        for item in message.summary.update
    }
    results = json.loads((real.directory / "results.json").read_text())
    assert summary["final/fgsm"] == results["evaluations"][1]["accuracy"]
    assert [message.exit.exit_code for message in messages if message.WhichOneof("record_type") == "exit"] == [0]
    assert not (folder / "files" / "wandb-metadata.json").exists()  # host name, command line, repository


def test_a_run_with_loggers_leaves_an_empty_home_empty(real: RealRun) -> None:
    assert list(real.home.rglob("*")) == []


def test_loggers_say_nothing_on_the_console(real: RealRun) -> None:
    assert real.err == ""
    assert "wandb" not in real.out.lower()


# --- TensorBoard ------------------------------------------------------------------------------------------------------


@needs_tensorboard
def test_rounds_done_again_after_a_resume_are_shown_once(tmp_path: Path) -> None:
    first = TensorBoard(TensorBoardOptions())
    first.calfat_run_started(info(tmp_path))
    for number in (1, 2, 3):
        first.calfat_round_finished(record(number, {"natural": 0.1}))
    first.calfat_run_stopped()
    again = TensorBoard(TensorBoardOptions())
    again.calfat_run_started(info(tmp_path, start_round=3))
    for number in (3, 4):
        again.calfat_round_finished(record(number, {"natural": 0.7}))
    again.calfat_run_finished(RunResult((evaluation("natural", 0.75),), 4, 1.0))
    found = scalars(tmp_path / "tensorboard")
    shown = [(step, round(value, 6)) for step, value in found["accuracy/natural"]]
    assert shown == [(1, 0.1), (2, 0.1), (3, 0.7), (4, 0.7)]
    assert found["final/natural"] == [(4, 0.75)]


def test_tensorboard_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with snapshot.raises(PluginError):
        TensorBoard(TensorBoardOptions())


# --- W&B --------------------------------------------------------------------------------------------------------------


class FakeRun:
    """Stands in for a W&B run."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.logged, self.summary = arguments, list[tuple[int, Any]](), dict[str, float]()
        self.exit_code: int | None = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that W&B was asked to begin."""
    import wandb

    runs: list[FakeRun] = []

    def init(**arguments: Any) -> FakeRun:
        runs.append(FakeRun(**arguments))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


def test_wandb_is_reported_what_may_be_known(tmp_path: Path, begun: list[FakeRun]) -> None:
    logger = Wandb(WandbOptions(project="fat", entity="us"))
    logger.calfat_run_started(info(tmp_path))
    logger.calfat_round_finished(record(1, {"natural": 0.5}))
    logger.calfat_run_finished(RunResult((evaluation("natural", 0.75),), 4, 1.0))
    (run,) = begun
    told = {"project": "fat", "entity": "us", "mode": "offline", "dir": str(tmp_path), "save_code": False}
    assert {**told, "config": {"train_args": {"epochs": 1}}}.items() <= run.arguments.items()
    assert "hunter2" not in repr(run.arguments)
    assert [(step, numbers["accuracy/natural"]) for step, numbers in run.logged] == [(1, 0.5)]
    assert run.summary == {"final/natural": 0.75, "final/natural_release": 0.76}
    assert run.exit_code == 0


def test_a_resumed_directory_is_the_same_wandb_run(tmp_path: Path, begun: list[FakeRun]) -> None:
    for directory in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        logger = Wandb(WandbOptions())
        logger.calfat_run_started(info(directory))
        logger.calfat_run_stopped()
    ids = [run.arguments["id"] for run in begun]
    assert ids[0] == ids[1] != ids[2]
    assert [run.exit_code for run in begun] == [1, 1, 1]


def test_wandb_online_without_a_key_does_not_wait_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[FakeRun], snapshot: TextSnapshot
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    import wandb

    monkeypatch.setattr(wandb, "api", wandb.apis.InternalApi())
    with snapshot.raises(PluginError):
        Wandb(WandbOptions(mode="online"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "api", wandb.apis.InternalApi())
    Wandb(WandbOptions(mode="online")).calfat_run_started(info(tmp_path))
    assert begun[0].arguments["mode"] == "online"


# --- what all loggers share -------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_left_out() -> None:
    broken = record(1, {}, heterogeneity=math.nan)
    numbers = round_scalars(broken)
    assert "heterogeneity" not in numbers
    assert numbers["loss/mean"] == pytest.approx(1.5)
    assert all(math.isfinite(number) for number in numbers.values())


def test_sections_that_may_hold_secrets_are_not_public() -> None:
    recipe = {
        "comm_args": {"mqtt_password": "hunter2"},
        "tracking_args": {"wandb_key": "hunter2"},
        "something_new": {"token": "hunter2"},
        "train_args": {"epochs": 1},
        "calfat": {"trainer": "calfat"},
    }
    assert public_recipe(recipe) == {"train_args": {"epochs": 1}, "calfat": {"trainer": "calfat"}}
    assert public_recipe_text(recipe) == "train_args:\n  epochs: 1\ncalfat:\n  trainer: calfat\n"


def test_an_attack_that_did_not_run_is_no_scalar() -> None:
    assert final_scalars(idle("apgd-t")) == {}
    numbers = round_scalars(record(1, {"natural": 0.5, "apgd-t": None}))
    assert [name for name in numbers if "apgd-t" in name] == []
    assert numbers["accuracy/natural"] == 0.5
