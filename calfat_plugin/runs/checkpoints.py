"""Checkpoints: a snapshot as one file of tensors, and what clients keep in files beside it.

Files are safetensors, without pickle. Each has a digest of its content, so a byte that a disk or a copy has changed is
found when the file is read. The global model's tensors keep their ``state_dict`` names, so
``safetensors.torch.load_file`` gives a model that loads (leave out the names with a slash); with ``calfat.ema`` it is
the average. What else a resumed run needs is stored beside them under ``server/``, ``broadcast/``, ``trained/`` (the
model that is averaged) and, for a client that keeps its own checkpoints, ``client/<id>/``. The facts say round and what
was measured, and name the files of all other clients. Where the final evaluation needs the models that the clients of
the last round sent, they are under ``sent/<id>/``.

What each client keeps between rounds is in a file of its own. It is written when it changes, and read when the client
trains. So a round takes time, memory and disk for the clients that train in it, however many there are in all. Later
rounds do not change a file that a checkpoint names: the next state of that client goes to another file, called after
its round. The same round, done again after a crash, writes it again. Files that no checkpoint names are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from calfat_plugin.disk import put_in_place, reporting_disk_errors, temporary_of
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import State
from calfat_plugin.stored_run import CLIENT_STATES
from calfat_plugin.tensor_files import DIGEST, KEY, READ_ERRORS, REMEDY, read_facts, read_tensors, write_tensors

_NAME = re.compile(r"client-(\d+)-round-(\d+)\.safetensors")
_FORMAT = 2
_FIELDS = {"server": "server_state", "broadcast": "broadcast", "trained": "trained"}  # of a snapshot, by namespace


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
            sha256 = facts[DIGEST]
        except READ_ERRORS as error:
            raise RunError(f"{path}: the state of client {client} cannot be read ({error}). {REMEDY}") from None
        if sha256 != file.sha256:
            raise RunError(f"{path}: not the file that the checkpoint names (SHA-256). {REMEDY}")
        return tensors

    def __iter__(self) -> Iterator[int]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)

    def path(self, client: int, round: int) -> Path:
        return self.folder / f"client-{client}-round-{round}.safetensors"

    def check_complete(self) -> None:
        """Refuse a missing file, and one whose facts have another digest than the checkpoint; no tensor is read."""
        for client, file in self.named.items():
            path = self.path(client, file.round)
            try:
                sha256 = read_facts(path)[DIGEST]
            except FileNotFoundError:
                raise RunError(f"{path}: no such file, but the checkpoint names it. {REMEDY}") from None
            except READ_ERRORS as error:
                raise RunError(f"{path}: the state of client {client} cannot be read ({error}). {REMEDY}") from None
            if sha256 != file.sha256:
                raise RunError(f"{path}: not the file that the checkpoint names (SHA-256). {REMEDY}")


class ClientStates(ClientStateFiles, MutableMapping[int, State]):
    """The states of a run that continues. A client that keeps nothing is not in it.

    Each of ``checkpoints`` names files; those of ``last`` are the present states. New files are called after ``round``.
    """

    def __init__(self, folder: Path, checkpoints: Mapping[str, Named], round: int) -> None:
        super().__init__(folder, checkpoints.get("last", {}))
        self.round = round
        self._checkpoints = dict(checkpoints)
        self._written: set[Path] = set()
        self._files: set[tuple[int, int]] = set()  # (client, round) of each state in the folder
        for path in folder.glob("*"):
            match = _NAME.fullmatch(path.name)
            if match:
                self._files.add((int(match[1]), int(match[2])))
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
        if not self._written:
            return []
        written = [*sorted(self._written), self.folder]
        self._written = set()
        return written

    def saved(self, checkpoints: Iterable[str], named: Named) -> None:
        """Note that these checkpoints, on disk, name ``named``; remove what is neither named by any nor present."""
        self._checkpoints.update(dict.fromkeys(checkpoints, named))
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        named: set[tuple[int, int]] = set()
        for files in (*self._checkpoints.values(), self.named):
            named.update((client, file.round) for client, file in files.items())
        for client, round in self._files - named:
            self.path(client, round).unlink(missing_ok=True)
        self._files &= named


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
    named: Named = {}
    within: Mapping[int, State] = {}  # states that are written into the checkpoint
    if isinstance(snapshot.client_states, ClientStateFiles):
        named = snapshot.client_states.named
    else:
        within = snapshot.client_states
    states_below: dict[str, State] = {}  # by namespace
    for namespace, field in _FIELDS.items():
        states_below[namespace] = getattr(snapshot, field)
    for client, state in within.items():
        states_below[f"client/{client}"] = state
    for client, state in snapshot.client_models.items():
        states_below[f"sent/{client}"] = state
    tensors: dict[str, Tensor] = dict(snapshot.global_state)
    for namespace, state in states_below.items():
        for name, tensor in state.items():
            tensors[f"{namespace}/{name}"] = tensor
    facts = {
        "format": _FORMAT,
        "round": snapshot.round,
        "clients": sorted(within),
        "files": [[client, *named[client]] for client in sorted(named)],
        "notes": notes,
    }
    if snapshot.client_models:
        facts["sent"] = sorted(snapshot.client_models)
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
        round = _checked_number(facts["round"])
        if round == 0:
            raise ValueError("it is of round 0, and the first round is 1")
        client_states: Mapping[int, State]
        named = _files_named_in(facts)
        if named:
            client_states = ClientStateFiles(path.parent / CLIENT_STATES, named)
        else:
            client_states = _states_below(tensors, "client", facts.get("clients", ()))
        client_models = _states_below(tensors, "sent", facts.get("sent", ()))
        _check_notes(facts["notes"])
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint.") from None
    except READ_ERRORS as error:
        raise RunError(f"{path}: the checkpoint cannot be read ({error}). {REMEDY}") from None
    fields = {field: _below(tensors, f"{namespace}/") for namespace, field in _FIELDS.items()}
    snapshot = Snapshot(
        round=round,
        global_state={name: tensor for name, tensor in tensors.items() if "/" not in name},
        **fields,
        client_states=client_states,
        client_models=client_models,
    )
    return snapshot, facts["notes"]


def named_files(path: Path) -> Named:
    """The client states that a checkpoint names, without a look at its digest; none where it cannot be read."""
    try:
        return _files_named_in(read_facts(path))
    except READ_ERRORS:
        return {}


def _files_named_in(facts: Mapping[str, Any]) -> Named:
    return {int(client): ClientStateFile(int(round), str(sha256)) for client, round, sha256 in facts.get("files", ())}


def _states_below(tensors: Mapping[str, Tensor], namespace: str, clients: Iterable[Any]) -> dict[int, State]:
    """The state of each of these clients, of which a checkpoint has the tensors below ``<namespace>/<client>/``."""
    states: dict[int, State] = {}
    for client in clients:
        states[_checked_number(client)] = _below(tensors, f"{namespace}/{client}/")
    return states


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _checked_number(value: Any) -> int:
    """The number of a round or a client, as JSON has it: not 1.5, not true, not a text."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of a round or a client")
    return value


def _check_notes(notes: Any) -> None:
    """Refuse notes other than a mapping, whose ``best`` has a mapping with an accuracy for each name."""
    if not isinstance(notes, dict):
        raise ValueError(f"its notes are {notes!r}, expected a mapping")
    best = notes.get("best", {})
    if not isinstance(best, dict):
        raise ValueError(f"its best rounds are {best!r}, expected a mapping")
    for name, facts in best.items():
        if not isinstance(facts, dict) or not isinstance(facts.get("accuracy"), float):
            raise ValueError(f"its best round of {name} is {facts!r}, expected a mapping with an accuracy")
