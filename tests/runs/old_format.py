"""Run directories as earlier versions wrote them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from calfat_plugin.runs.checkpoints import load_checkpoint


def as_format_1(run: Path) -> None:
    """Turn the checkpoints of a run into those of format 1: the states of all clients within, no other file."""
    for path in (run / "checkpoints").glob("*.safetensors"):
        snapshot, notes = load_checkpoint(path)
        tensors = load_file(path)
        for client, state in snapshot.client_states.items():
            tensors |= {f"client/{client}/{name}": tensor for name, tensor in state.items()}
        clients = sorted(snapshot.client_states)
        facts = {"format": 1, "round": snapshot.round, "clients": clients, "notes": notes}
        save_file(tensors, path, {"calfat": json.dumps(facts | {"sha256": _digest(tensors, facts)})})
    shutil.rmtree(run / "checkpoints" / "clients")


def _digest(tensors: dict[str, Tensor], facts: dict[str, object]) -> str:
    """As format 1 had it."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
