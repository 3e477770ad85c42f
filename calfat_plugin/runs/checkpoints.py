"""Checkpoints: a snapshot as one file of tensors, and what clients keep in files beside it.

The global model's tensors keep their ``state_dict`` names, so ``safetensors.torch.load_file`` gives a model that loads
(leave out the names with a slash). What else a resumed run needs is stored beside them under ``server/``,
``broadcast/`` and, for a client that keeps its own checkpoints, ``client/<id>/``; the facts say round and what was
measured, and name the files of all other clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from calfat_plugin.disk import put_in_place, reporting_disk_errors, temporary_of
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import State
from calfat_plugin.runs.client_states import ClientStateFile, ClientStateFiles, Named
from calfat_plugin.runs.directory import CLIENTS
from calfat_plugin.runs.tensor_files import (
    KEY,
    READ_ERRORS,
    REMEDY,
    read_facts,
    read_tensors,
    write_tensors,
)

_FORMAT = 2


def save_checkpoint(path: Path, snapshot: Snapshot, notes: Mapping[str, Any]) -> None:
    """Write atomically: after a crash there is the old file or the new one, never half of one.

    Args and errors: see :func:`write_checkpoint`.
    """
    write_checkpoint(path, snapshot, notes)
    with reporting_disk_errors(path):
        put_in_place([path])


def write_checkpoint(path: Path, snapshot: Snapshot, notes: Mapping[str, Any]) -> None:
    """Write what is to be put in the place of ``path``, as :func:`~calfat_plugin.disk.temporary_of` names it.

    Args:
        path: where it belongs.
        snapshot: what to keep. Client states that are files of the folder beside ``path`` are named, others written.
        notes: JSON-ready facts for people and tools, such as accuracies.

    Raises:
        RunError: the disk refuses.
    """
    states = snapshot.client_states
    named, within = (states.named, {}) if isinstance(states, ClientStateFiles) else ({}, states)
    tensors: dict[str, Tensor] = dict(snapshot.global_state)
    tensors.update({f"server/{name}": tensor for name, tensor in snapshot.server_state.items()})
    tensors.update({f"broadcast/{name}": tensor for name, tensor in snapshot.broadcast.items()})
    for client, state in within.items():
        tensors.update({f"client/{client}/{name}": tensor for name, tensor in state.items()})
    facts = {
        "format": _FORMAT,
        "round": snapshot.round,
        "clients": sorted(within),
        "files": [[client, *named[client]] for client in sorted(named)],
        "notes": notes,
    }
    with reporting_disk_errors(path):
        write_tensors(temporary_of(path), tensors, facts)


def load_checkpoint(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    """Read what :func:`save_checkpoint` wrote: (snapshot, notes). Client states in files are read when asked for.

    Raises:
        RunError: there is no such file, or it is damaged or of another kind.
    """
    try:
        tensors, facts = read_tensors(path)
        if facts.get("format") != _FORMAT:
            raise RunError(
                f"{path}: not a checkpoint of calfat_plugin (no '{KEY}' of format {_FORMAT} in its metadata)."
            )
        number, within, named = int(facts["round"]), list(facts["clients"]), _named(facts)
        notes: dict[str, Any] = facts["notes"]
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint.") from None
    except READ_ERRORS as error:
        raise RunError(f"{path}: the checkpoint cannot be read ({error}). {REMEDY}") from None
    states: Mapping[int, State] = {client: _below(tensors, f"client/{client}/") for client in within}
    return (
        Snapshot(
            round=number,
            global_state={name: tensor for name, tensor in tensors.items() if "/" not in name},
            server_state=_below(tensors, "server/"),
            broadcast=_below(tensors, "broadcast/"),
            client_states=ClientStateFiles(path.parent / CLIENTS, named) if named else states,
        ),
        notes,
    )


def named_files(path: Path) -> Named:
    """The client states that a checkpoint names; none where it cannot be read."""
    try:
        return _named(read_facts(path))
    except READ_ERRORS:
        return {}


def _named(facts: Mapping[str, Any]) -> Named:
    return {int(client): ClientStateFile(int(round), str(sha256)) for client, round, sha256 in facts.get("files", ())}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
