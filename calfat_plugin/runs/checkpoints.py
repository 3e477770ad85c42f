"""Checkpoints: a snapshot as one safetensors file, read and written without pickle.

The global model's tensors keep their ``state_dict`` names, so ``safetensors.torch.load_file`` gives a model that loads
(leave out the names with a slash). What else a resumed run needs is stored beside them under ``server/``,
``broadcast/`` and ``client/<id>/``; the metadata says round, experiment and what was measured, with a digest of it all:
a byte that a disk or a copy changed is found when the file is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calfat_plugin.disk import replacing, reporting_disk_errors
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot

_KEY, _FORMAT, _DIGEST = "calfat", 1, "sha256"
_REMEDY = "Restore it from a copy, or start the run again in another directory."


def save_checkpoint(path: Path, snapshot: Snapshot, notes: Mapping[str, Any]) -> None:
    """Write atomically: after a crash there is the old file or the new one, never half of one.

    Args:
        path: where to.
        snapshot: what to keep.
        notes: JSON-ready facts for people and tools, such as accuracies.

    Raises:
        RunError: the disk refuses.
    """
    tensors: dict[str, Tensor] = dict(snapshot.global_state)
    tensors.update({f"server/{name}": tensor for name, tensor in snapshot.server_state.items()})
    tensors.update({f"broadcast/{name}": tensor for name, tensor in snapshot.broadcast.items()})
    for client, state in snapshot.client_states.items():
        tensors.update({f"client/{client}/{name}": tensor for name, tensor in state.items()})
    facts = {"format": _FORMAT, "round": snapshot.round, "clients": sorted(snapshot.client_states), "notes": notes}
    apart = _apart(tensors)
    # One key, because the format writes several in no fixed order: the same run shall give the same bytes.
    metadata = {_KEY: json.dumps({**facts, _DIGEST: _digest(apart, facts)})}
    with reporting_disk_errors(path, SafetensorError), replacing(path) as temporary:
        save_file(apart, temporary, metadata)


def load_checkpoint(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    """Read what :func:`save_checkpoint` wrote: (snapshot, notes).

    Raises:
        RunError: there is no such file, or it is damaged or of another kind.
    """
    try:
        tensors, facts = read_tensors(path)
        if facts.get("format") != _FORMAT:
            raise RunError(
                f"{path}: not a checkpoint of calfat_plugin (no '{_KEY}' of format {_FORMAT} in its metadata)."
            )
        number, clients = int(facts["round"]), list(facts["clients"])
        notes: dict[str, Any] = facts["notes"]
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint.") from None
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: the checkpoint cannot be read ({error}). {_REMEDY}") from None
    return (
        Snapshot(
            round=number,
            global_state={name: tensor for name, tensor in tensors.items() if "/" not in name},
            server_state=_below(tensors, "server/"),
            broadcast=_below(tensors, "broadcast/"),
            client_states={client: _below(tensors, f"client/{client}/") for client in clients},
        ),
        notes,
    )


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a safetensors file; the facts of one that we did not write are empty.

    Raises:
        RunError: its content is not what was written.
        SafetensorError, OSError, TypeError, ValueError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    facts: dict[str, Any] = json.loads(metadata[_KEY]) if _KEY in metadata else {}
    written = facts.pop(_DIGEST, None)  # checkpoints of earlier versions have none
    if written is not None and written != _digest(tensors, facts):
        raise RunError(f"{path}: the checkpoint is damaged: its content is not what was written (SHA-256). {_REMEDY}")
    return tensors, facts


def _digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """SHA-256 of the facts, and of names, types, shapes and bytes of the tensors: contiguous ones on the CPU."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and none sharing memory with another, which the format forbids.

    An aggregator may well keep and send one tensor (SCAFFOLD's c), and a client may keep what it sent.
    """
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return apart


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
