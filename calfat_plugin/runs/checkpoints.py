"""Checkpoints: a snapshot as one file of tensors, and what clients keep in files beside it.

Files are safetensors, so without pickle, with a digest of it all: a byte that a disk or a copy changed is found when
the file is read. The global model's tensors keep their ``state_dict`` names, so ``safetensors.torch.load_file`` gives a
model that loads (leave out the names with a slash); with ``calfat.ema`` it is the average. What else a resumed run
needs is stored beside them under ``server/``, ``broadcast/``, ``trained/`` (the model that is averaged) and, for a
client that keeps its own checkpoints, ``client/<id>/``; the facts say round and what was measured, and name the files
of all other clients. Where the final evaluation needs the models that the clients of the last round sent, they are
under ``sent/<id>/``.

What each client keeps between rounds is in a file of its own: written when it changes, read when the client trains. So
a round costs the states of its own clients, in time, memory and bytes written, however many clients there are. A file
that a checkpoint names is not changed by later rounds: the next state of that client goes to another one, called after
its round. The same round, done again after a crash, writes it again. Files that no checkpoint names are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from calfat_plugin.disk import put_in_place, reporting_disk_errors, temporary_of
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import State
from calfat_plugin.runs.directory import CLIENTS

#: What reading a file that we did not write, or that was damaged, may raise.
READ_ERRORS = (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError)
#: What to do about one.
REMEDY = "Restore it from a copy, or start the run again in another directory."
#: The key of the file's metadata that is ours.
KEY = "calfat"
DIGEST = "sha256"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """Write a file, in place where it is there already, and return its digest; tensors may share memory."""
    apart = _apart(tensors)
    digest = _digest(apart, facts)
    if path.is_symlink():  # of a run directory from elsewhere: it may lead anywhere
        path.unlink()
    # One key, because the format writes several in no fixed order: the same run shall give the same bytes.
    # Not the library's save_file, which writes a temporary file beside ``path`` that a kill leaves behind.
    path.write_bytes(save(apart, {KEY: json.dumps({**facts, DIGEST: digest})}))
    return digest


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a file; the facts of one that we did not write are empty.

    The digest is among the facts, as :data:`DIGEST`.
    """
    facts = read_facts(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    written = facts.get(DIGEST)
    if written is not None and written != _digest(tensors, {key: facts[key] for key in facts if key != DIGEST}):
        raise RunError(f"{path}: the checkpoint is damaged: its content is not what was written (SHA-256). {REMEDY}")
    return tensors, facts


def read_facts(path: Path) -> dict[str, Any]:
    """The facts alone, which are not checked against the digest; errors as of :func:`read_tensors`."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    facts: dict[str, Any] = json.loads(metadata[KEY]) if KEY in metadata else {}
    return facts


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


_NAME = re.compile(r"client-(\d+)-round-(\d+)\.safetensors")


# --- what clients keep ------------------------------------------------------------------------------------------------


class ClientStateFile(NamedTuple):
    """Which file holds a client's state: that of this round, with this digest."""

    round: int
    sha256: str


Named = Mapping[int, ClientStateFile]
"""Client id to its file, for every client that keeps something."""


class ClientStateFiles(Mapping[int, State]):
    """The states that a checkpoint names, each read when it is asked for."""

    def __init__(self, folder: Path, named: Named) -> None:
        self.folder, self.named = folder, dict(named)

    def __getitem__(self, client: int) -> State:
        file = self.named[client]
        path = self.path(client, file.round)
        try:
            tensors, facts = read_tensors(path)
            found = facts[DIGEST]
        except READ_ERRORS as error:
            raise RunError(f"{path}: the state of client {client} cannot be read ({error}). {REMEDY}") from None
        if found != file.sha256:
            raise RunError(f"{path}: not the file that the checkpoint names (SHA-256). {REMEDY}")
        return tensors

    def __iter__(self) -> Iterator[int]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)

    def path(self, client: int, round: int) -> Path:
        return self.folder / f"client-{client}-round-{round}.safetensors"

    def check_complete(self) -> None:
        """Look for the files, without reading them."""
        there = _files_in(self.folder)
        for client, file in self.named.items():
            if (client, file.round) not in there:
                path = self.path(client, file.round)
                raise RunError(f"{path}: no such file, but the checkpoint names it. {REMEDY}")


class ClientStates(ClientStateFiles, MutableMapping[int, State]):
    """The states of a run that continues. A client that keeps nothing is not in it.

    Each of ``checkpoints`` names files; those of ``last`` are the present states. New files are called after ``round``.
    """

    def __init__(self, folder: Path, checkpoints: Mapping[str, Named], round: int) -> None:
        super().__init__(folder, checkpoints.get("last", {}))
        self.round = round
        self._checkpoints = dict(checkpoints)
        self._written: set[Path] = set()
        self._files = _files_in(folder)
        self._remove_unnamed()

    def __setitem__(self, client: int, state: State) -> None:
        if not state:
            self.named.pop(client, None)
            return
        path = self.path(client, self.round)
        self._files.add((client, self.round))
        self._written.add(path)
        with reporting_disk_errors(path):
            self.folder.mkdir(exist_ok=True)
            digest = write_tensors(path, state, {"client": client, "round": self.round})
        self.named[client] = ClientStateFile(self.round, digest)

    def __delitem__(self, client: int) -> None:
        del self.named[client]

    def take_written(self) -> list[Path]:
        """What was written since the last call, and its folder: to be forced to disk before a checkpoint names it."""
        written, self._written = sorted(self._written), set()
        return [*written, self.folder] if written else []

    def saved(self, checkpoints: Iterable[str], named: Named) -> None:
        """Note that these checkpoints, on disk, name ``named``; remove what is neither named by any nor present."""
        self._checkpoints.update(dict.fromkeys(checkpoints, named))
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        in_use = (*self._checkpoints.values(), self.named)
        named = {(client, file.round) for files in in_use for client, file in files.items()}
        for client, round in self._files - named:
            self.path(client, round).unlink(missing_ok=True)
        self._files &= named


def _files_in(folder: Path) -> set[tuple[int, int]]:
    found = (_NAME.fullmatch(path.name) for path in folder.glob("*"))
    return {(int(match[1]), int(match[2])) for match in found if match}


_FORMAT = 2
_FIELDS = {"server": "server_state", "broadcast": "broadcast", "trained": "trained"}  # of a snapshot, by namespace


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(path: Path, snapshot: Snapshot, notes: Mapping[str, Any]) -> None:
    """Write atomically: after a crash there is the old file or the new one, never half of one."""
    write_checkpoint(path, snapshot, notes)
    with reporting_disk_errors(path):
        put_in_place([path])


def write_checkpoint(path: Path, snapshot: Snapshot, notes: Mapping[str, Any]) -> None:
    """Write what is to be put in the place of ``path``, as :func:`~calfat_plugin.disk.temporary_of` names it.

    Client states that are files of the folder beside ``path`` are named, others written; ``notes`` are JSON-ready.
    """
    states = snapshot.client_states
    named, within = (states.named, {}) if isinstance(states, ClientStateFiles) else ({}, states)
    tensors: dict[str, Tensor] = dict(snapshot.global_state)
    for kind, field in _FIELDS.items():
        tensors.update({f"{kind}/{name}": tensor for name, tensor in getattr(snapshot, field).items()})
    for kind, by_client in (("client", within), ("sent", snapshot.client_models)):
        for client, state in by_client.items():
            tensors.update({f"{kind}/{client}/{name}": tensor for name, tensor in state.items()})
    facts = {
        "format": _FORMAT,
        "round": snapshot.round,
        "clients": sorted(within),
        "files": [[client, *named[client]] for client in sorted(named)],
        "notes": notes,
        **({"sent": sorted(snapshot.client_models)} if snapshot.client_models else {}),
    }
    with reporting_disk_errors(path):
        write_tensors(temporary_of(path), tensors, facts)


def load_checkpoint(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    """Read what :func:`save_checkpoint` wrote: (snapshot, notes). Client states in files are read when asked for."""
    try:
        tensors, facts = read_tensors(path)
        if facts.get("format") != _FORMAT:
            raise RunError(
                f"{path}: not a checkpoint of calfat_plugin (no '{KEY}' of format {_FORMAT} in its metadata)."
            )
        number, within, named = int(facts["round"]), list(facts["clients"]), _named(facts)
        notes: dict[str, Any] = facts["notes"]
        sent = list(facts.get("sent", ()))
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint.") from None
    except READ_ERRORS as error:
        raise RunError(f"{path}: the checkpoint cannot be read ({error}). {REMEDY}") from None
    states: Mapping[int, State] = {client: _below(tensors, f"client/{client}/") for client in within}
    models = {client: _below(tensors, f"sent/{client}/") for client in sent}
    return (
        Snapshot(
            round=number,
            global_state={name: tensor for name, tensor in tensors.items() if "/" not in name},
            **{field: _below(tensors, f"{kind}/") for kind, field in _FIELDS.items()},
            client_states=ClientStateFiles(path.parent / CLIENTS, named) if named else states,
            client_models=models,
        ),
        notes,
    )


def named_files(path: Path) -> Named:
    """The client states that a checkpoint names, without a look at its digest; none where it cannot be read."""
    try:
        return _named(read_facts(path))
    except READ_ERRORS:
        return {}


def _named(facts: Mapping[str, Any]) -> Named:
    return {int(client): ClientStateFile(int(round), str(sha256)) for client, round, sha256 in facts.get("files", ())}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
