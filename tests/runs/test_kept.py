"""What a run keeps to be resumed: checkpoints, the rows of its rounds, and which recipes may continue it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calfat_plugin.errors import RunError
from calfat_plugin.experiment.compare import changes, flat, same_but_rounds, why_not
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.rounds import RoundsFile, last_used, read_rounds, seconds_of
from tests.report.made import record

C = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def snapshot() -> Snapshot:
    """With everything that a snapshot can hold; SCAFFOLD's c is kept and sent, and one tensor is a transposed view."""
    return Snapshot(
        round=7,
        global_state={"conv.weight": C.t(), "norm.num_batches_tracked": torch.tensor(12)},
        server_state={"scaffold/c/conv.weight": C},
        broadcast={"scaffold/c/conv.weight": C, "fedrbn/at/0/norm.mean": torch.zeros(2)},
        client_states={3: {"scaffold/c/conv.weight": C * 2}, 10: {}, 1: {"personal/norm.mean": torch.ones(2)}},
    )


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_gives_back_all_that_was_saved(tmp_path: Path) -> None:
    saved, notes = snapshot(), {"best": {"best-natural": {"round": 3, "accuracy": 0.5}}}
    save_checkpoint(tmp_path / "last.safetensors", saved, notes)
    loaded, kept = load_checkpoint(tmp_path / "last.safetensors")
    assert kept == notes
    assert loaded.round == 7
    assert same(loaded.global_state, saved.global_state)
    assert same(loaded.server_state, saved.server_state)
    assert same(loaded.broadcast, saved.broadcast)
    assert sorted(loaded.client_states) == [1, 3, 10]
    assert all(same(loaded.client_states[client], state) for client, state in saved.client_states.items())


def test_a_checkpoint_is_a_state_dict_with_more_beside_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.safetensors", snapshot(), {})
    assert sorted(load_file(tmp_path / "last.safetensors")) == [
        "broadcast/fedrbn/at/0/norm.mean",
        "broadcast/scaffold/c/conv.weight",
        "client/1/personal/norm.mean",
        "client/3/scaffold/c/conv.weight",
        "conv.weight",
        "norm.num_batches_tracked",
        "server/scaffold/c/conv.weight",
    ]
    save_checkpoint(tmp_path / "again.safetensors", snapshot(), {})
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "last.safetensors").read_bytes()


def test_a_checkpoint_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        load_checkpoint(tmp_path / "last.safetensors")
    assert str(error.value) == f"{tmp_path}/last.safetensors: no such checkpoint."


def rounds_file(folder: Path, count: int) -> RoundsFile:
    file = RoundsFile(folder / "rounds.csv", ["natural"], 2)
    for round in range(1, count + 1):
        file.append(record(round, {"natural": round / 10}, clients=2))
    return file


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path, kept: int) -> None:
    file = rounds_file(tmp_path, 3)
    lines = file.path.read_text().splitlines(keepends=True)
    file.keep_until(kept)
    assert file.path.read_text() == "".join(lines[: kept + 1])


def test_half_a_row_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    file = rounds_file(tmp_path, 2)
    whole = file.path.read_text()
    file.path.write_text(whole + "3,0.")
    file.keep_until(2)
    assert file.path.read_text() == whole


@pytest.mark.parametrize(
    "damage",
    [lambda text: "", lambda text: text[:-1], lambda text: text.replace("\n2,", "\n3,")],
    ids=["empty", "half a row", "a row missing"],
)
def test_rows_that_are_missing_are_reported(tmp_path: Path, damage: Any) -> None:
    file = rounds_file(tmp_path, 2)
    file.path.write_text(damage(file.path.read_text()))
    with pytest.raises(RunError) as error:
        file.keep_until(2)
    assert str(error.value).startswith(f"{file.path}: the rows of rounds 1 to 2, which the checkpoint continues from")


def test_rows_say_what_was_measured(tmp_path: Path) -> None:
    file = rounds_file(tmp_path, 2)
    with file.path.open(newline="") as text:
        assert next(csv.reader(text)) == file.columns
    first, second = read_rounds(file.path)
    assert (first["round"], first["natural"], second["round"], second["natural"]) == ("1", "0.1", "2", "0.2")
    assert [float(second[f"loss_{client}"]) for client in range(2)] == [0.5, 1.5]
    assert [float(second[f"update_norm_{client}"]) for client in range(2)] == pytest.approx([0.1, 0.2])
    assert seconds_of(file.path) == 4.0
    assert last_used(file.path) == {0: 2, 1: 2}


def test_without_rows_nothing_was_spent_or_used(tmp_path: Path) -> None:
    assert seconds_of(tmp_path / "rounds.csv") == 0
    assert last_used(tmp_path / "rounds.csv") == {}
    with pytest.raises(RunError) as error:
        read_rounds(tmp_path / "rounds.csv")
    assert str(error.value) == f"{tmp_path}/rounds.csv: no such file; the run has not finished a round yet."


THEN = {"train_args": {"comm_round": 5, "epochs": 1}, "calfat": {"runtime": {"threads": 1}, "loggers": ["wandb"]}}


def test_keys_that_a_resume_may_not_change() -> None:
    now = json.loads(json.dumps(THEN))
    now["train_args"] |= {"comm_round": 9, "batch_size": 8}
    now["device_args"] = {"using_gpu": True}
    now["calfat"] |= {"loggers": [], "silo": {"port": 1}, "runtime": {"threads": 2}}
    assert same_but_rounds(THEN, THEN) == []
    assert (
        same_but_rounds(THEN, now) == same_but_rounds(now, THEN) == ["calfat.runtime.threads", "train_args.batch_size"]
    )
    with_null: dict[str, Any] = {"a": {"x": None}}  # null is a value
    assert same_but_rounds(with_null, {"a": {}}) == same_but_rounds({"a": {}}, with_null) == ["a.x"]


def test_changes_are_named_with_both_values() -> None:
    now = {"train_args": {"epochs": 2, "a": 1, "b": 2, "c": 3}}
    keys = ["train_args.epochs", "train_args.a", "train_args.b", "train_args.c"]
    assert changes(THEN, now, keys[:1], "then") == "train_args.epochs: 1 then, 2 now"
    assert changes(THEN, now, keys[:3], "then") == (
        "train_args.epochs: 1 then, 2 now; train_args.a: None then, 1 now; train_args.b: None then, 2 now"
    )
    assert changes(THEN, now, keys, "then").endswith("train_args.b: None then, 2 now (and 1 more)")
    assert why_not(["train_args.epochs"]) == ""
    assert why_not(["calfat.runtime.threads", "train_args.epochs"]) == (
        "A different number of threads changes the order of sums, so the last bits of the result would differ. "
    )
    assert flat(THEN)["train_args.epochs"] == 1
