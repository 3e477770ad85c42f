"""What a run keeps to be resumed: checkpoints, the rows of its rounds, and which recipes may continue it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from calfat_plugin.errors import RunError
from calfat_plugin.experiment.differences import same_but_rounds
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.tensor_files import read_facts, write_tensors
from tests.snapshot import TextSnapshot

AGAIN = "Restore it from a copy, or start the run again in another directory."
C = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def filled() -> Snapshot:
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
    saved, notes = filled(), {"best": {"best-natural": {"round": 3, "accuracy": 0.5}}}
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
    save_checkpoint(tmp_path / "last.safetensors", filled(), {})
    assert sorted(load_file(tmp_path / "last.safetensors")) == [
        "broadcast/fedrbn/at/0/norm.mean",
        "broadcast/scaffold/c/conv.weight",
        "client/1/personal/norm.mean",
        "client/3/scaffold/c/conv.weight",
        "conv.weight",
        "norm.num_batches_tracked",
        "server/scaffold/c/conv.weight",
    ]
    save_checkpoint(tmp_path / "again.safetensors", filled(), {})
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "last.safetensors").read_bytes()


def digest_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """The digest of a checkpoint, from the description of its format alone."""
    content = json.dumps(facts).encode()
    for name, tensor in sorted(tensors.items()):
        content += json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + tensor.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def test_the_metadata_of_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    path, notes = tmp_path / "last.safetensors", {"best": 0.5}
    save_checkpoint(path, filled(), notes)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    facts = {"format": 2, "round": 7, "clients": [1, 3, 10], "files": [], "notes": notes}
    assert list(metadata) == ["calfat"]
    assert json.loads(metadata["calfat"]) == {**facts, "sha256": digest_of(load_file(path), facts)}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.safetensors"]


def test_parameters_that_are_being_trained_are_saved_by_value(tmp_path: Path) -> None:
    weights = torch.nn.Parameter(C)
    save_checkpoint(tmp_path / "last.safetensors", Snapshot(1, {"w": weights, "tied": weights, "too": weights}), {})
    loaded, _ = load_checkpoint(tmp_path / "last.safetensors")
    assert same(loaded.global_state, {"w": C, "tied": C, "too": C})
    assert same(loaded.server_state, {})


@pytest.mark.parametrize("metadata", ["no file", None, {"format": "pt"}, {"calfat": '{"format": 3, "round": 1}'}])
def test_another_safetensors_file_is_no_checkpoint(tmp_path: Path, metadata: Any, snapshot: TextSnapshot) -> None:
    path = tmp_path / "weights.safetensors"
    if metadata != "no file":
        save_file({"w": C}, path, metadata)
    with snapshot.raises(RunError):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ('{"format": 2, "clients": [], "notes": {}}', "'round'"),
        ('{"format": 2, "round": "one", "clients": []}', "'one' is no number of a round or a client"),
        ('{"format": 2, "round": 1, "clients": 3}', "'int' object is not iterable"),
        ("[]", "'list' object has no attribute 'get'"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_facts_of_another_shape_are_reported(tmp_path: Path, facts: str, reason: str) -> None:
    path = tmp_path / "last.safetensors"
    save_file({"w": C}, path, {"calfat": facts})
    with pytest.raises(RunError) as error:
        load_checkpoint(path)
    assert str(error.value) == f"{path}: the checkpoint cannot be read ({reason}). {AGAIN}"


SPLIT = {"dataset": "digits", "partition_alpha": 0.3, "partition_method": "iid"}
OURS = {"runtime": {"threads": 1}, "loggers": ["wandb"], "partition": {"seed": 0}}
THEN = {"train_args": {"comm_round": 5, "epochs": 1}, "data_args": SPLIT, "calfat": OURS}


def test_keys_that_a_resume_may_not_change() -> None:
    now = json.loads(json.dumps(THEN))
    now["train_args"] |= {"comm_round": 9, "batch_size": 8}
    now["device_args"] = {"using_gpu": True}
    now["data_args"] = {"dataset": "svhn", "partition_alpha": 0.5, "partition_method": "dirichlet"}
    now["calfat"] |= {"loggers": [], "silo": {"port": 1}, "runtime": {"threads": 2}, "partition": {"seed": 1}}
    assert same_but_rounds(THEN, THEN) == []
    assert (
        same_but_rounds(THEN, now)
        == same_but_rounds(now, THEN)
        == [
            *("calfat.partition.seed", "calfat.runtime.threads", *(f"data_args.{key}" for key in sorted(SPLIT))),
            "train_args.batch_size",
        ]
    )
    with_null: dict[str, Any] = {"a": {"x": None}}  # null is a value
    assert same_but_rounds(with_null, {"a": {}}) == same_but_rounds({"a": {}}, with_null) == ["a.x"]


def test_a_file_of_tensors_is_written_in_place(tmp_path: Path) -> None:
    """safetensors' own writer makes a temporary file beside it, with a name that nobody removes after a kill."""
    path = tmp_path / "last.safetensors.tmp"
    path.write_bytes(b"what a killed process has left")
    before = path.stat().st_ino
    write_tensors(path, {"c": C}, {"round": 1})
    assert (path.stat().st_ino, read_facts(path)["round"]) == (before, 1)
    assert list(tmp_path.iterdir()) == [path]
