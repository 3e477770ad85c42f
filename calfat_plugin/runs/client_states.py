"""What each client keeps between rounds, in a file of its own: written when it changes, read when the client trains.

So a round costs the states of its own clients, in time, memory and bytes written, however many clients there are.
A file is never changed once a checkpoint names it: the next state of that client goes to another one, called after its
round. A checkpoint names the files that belong to it, with their digests. Files that no checkpoint names are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from calfat_plugin.disk import reporting_disk_errors
from calfat_plugin.errors import RunError
from calfat_plugin.results import State
from calfat_plugin.runs.tensor_files import DIGEST, READ_ERRORS, REMEDY, read_tensors, write_tensors

_NAME = re.compile(r"client-(\d+)-round-(\d+)\.safetensors")


class ClientStateFile(NamedTuple):
    """Which file holds a client's state: that of this round, with this digest."""

    round: int
    sha256: str


Named = Mapping[int, ClientStateFile]
"""Client id to its file, for every client that keeps something."""


class ClientStateFiles(Mapping[int, State]):
    """The states that a checkpoint names, each read when it is asked for.

    Args:
        folder: where the files are.
        named: which files.

    Attributes:
        named: client id to its file.
    """

    def __init__(self, folder: Path, named: Named) -> None:
        self.folder, self.named = folder, dict(named)

    def __getitem__(self, client: int) -> State:
        """Read a client's state.

        Raises:
            KeyError: the client keeps nothing.
            RunError: its file is missing, damaged, or another one.
        """
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
        """Where the state that a client got in a round is."""
        return self.folder / f"client-{client}-round-{round}.safetensors"

    def check_complete(self) -> None:
        """Look for the files, without reading them.

        Raises:
            RunError: one is missing.
        """
        there = _files_in(self.folder)
        for client, file in self.named.items():
            if (client, file.round) not in there:
                path = self.path(client, file.round)
                raise RunError(f"{path}: no such file, but the checkpoint names it. {REMEDY}")


class ClientStates(ClientStateFiles, MutableMapping[int, State]):
    """The states of a run that continues. A client that keeps nothing is not in it.

    Args:
        folder: where the files are; made with the first of them.
        checkpoints: the name of each checkpoint to the files that it names; those of ``last`` are the present states.

    Attributes:
        round: the one that is under way, which new files are called after.
    """

    def __init__(self, folder: Path, checkpoints: Mapping[str, Named], round: int) -> None:
        super().__init__(folder, checkpoints.get("last", {}))
        self.round = round
        self._checkpoints = dict(checkpoints)
        self._written: set[Path] = set()
        self._files = _files_in(folder)
        self._remove_unnamed()

    def __setitem__(self, client: int, state: State) -> None:
        """Write a client's new state.

        Raises:
            RunError: the disk refuses.
        """
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
    """(client, round) of each file."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("*"))
    return {(int(match[1]), int(match[2])) for match in found if match}
