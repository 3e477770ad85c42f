"""Checkpoints: a snapshot as one safetensors file, read and written without pickle.

The global model's tensors keep their ``state_dict`` names, so ``safetensors.torch.load_file`` gives a model that loads
(leave out the names with a slash). What else a resumed run needs is stored beside them under ``server/``,
``broadcast/`` and ``client/<id>/``; the metadata says round, experiment and what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calfat_plugin.disk import replacing, reporting_disk_errors
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot

_KEY, _FORMAT = "calfat", 1


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
    # One key, because the format writes several in no fixed order: the same run shall give the same bytes.
    metadata = {_KEY: json.dumps(facts)}
    with reporting_disk_errors(path, SafetensorError), replacing(path) as temporary:
        save_file(_apart(tensors), temporary, metadata)


def load_checkpoint(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    """Read what :func:`save_checkpoint` wrote: (snapshot, notes).

    Raises:
        RunError: there is no such file, or it is damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        facts = json.loads(metadata[_KEY]) if _KEY in metadata else {}
        if facts.get("format") != _FORMAT:
            raise RunError(
                f"{path}: not a checkpoint of calfat_plugin (no '{_KEY}' of format {_FORMAT} in its metadata)."
            )
        number, clients = int(facts["round"]), list(facts["clients"])
        notes: dict[str, Any] = facts["notes"]
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint.") from None
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path}: the checkpoint cannot be read ({error}). Start the run again, or point to another run directory."
        ) from None
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
