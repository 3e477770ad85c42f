"""``board.yaml``: the tracks of a board, and what a run must be to take part in one."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, ValidationError

from calfat_plugin import __version__
from calfat_plugin.disk import sha256_of, write_new_folder
from calfat_plugin.errors import OptionError, RunError, did_you_mean
from calfat_plugin.exact import parse_number
from calfat_plugin.experiment.differences import flat
from calfat_plugin.recipe.document import BOARD, Document, read_document
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.parse import first_of
from calfat_plugin.suites.schema import AtError, Changes, Count, Positive, Section, Seed

FILE = "board.yaml"
FEWEST = 5  # seeds of an entry
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")  # of tracks, entries and challengers: it is a folder's or a file's
NAMED = "small letters, digits, - and ."
#: Keys without which a track says neither what is measured nor on what.
_FIXED = (
    *("data_args.dataset", "data_args.partition_method", "model_args.model", "train_args.client_num_in_total"),
    *("calfat.threat.norm", "calfat.threat.eps", "calfat.evaluators"),
)
_MEASURED = ("data_args.", "model_args.", "calfat.dataset.", "calfat.partition.", "calfat.model.", *_FIXED)
_NOT_MEASURED = ("data_args.data_cache_dir", "calfat.dataset.download", "calfat.dataset.sha256")
_CI = """\
# GitHub Actions: an entry or a challenge is a pull request, and this verifies the board with it.
on: [push, pull_request]
permissions: {{contents: read}}
jobs:
  verify:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.11"}}
      - run: pip install calfat-plugin=={version}
      - run: calfat board verify . --data-dir data --download
      - run: calfat board page .
        if: always()
      - uses: actions/upload-artifact@v4
        if: always()
        with: {{name: board, path: index.html}}
"""


def _named(tracks: dict[str, Any]) -> dict[str, Any]:
    for name in tracks:
        if not NAME.fullmatch(name):
            raise AtError((name,), f"expected {NAMED}: it names a folder.")
    return tracks


def _complete(recipe: dict[str, Any]) -> dict[str, Any]:
    if missing := [key for key in _FIXED if key not in recipe]:
        raise ValueError(f"lacks {', '.join(missing)}; without them its entries would not compare.")
    return recipe


def _several(seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if seeds is not None and len(set(seeds)) < FEWEST:
        raise ValueError(f"has {len(set(seeds))} different seeds; expected {FEWEST} or more.")
    return seeds


class Track(Section):
    """What entries must have in common to be compared."""

    title: str = Field("", description="one line above the table")
    recipe: Annotated[Changes, AfterValidator(_complete)] = Field(
        description="recipe values that every entry has, such as {calfat.threat.eps: 8/255}"
    )
    passes: Positive | None = Field(None, description="most passes of training images of a run; null: any number")
    seeds: Annotated[tuple[Seed, ...] | None, AfterValidator(_several)] = Field(
        None, description="the seeds of every entry, so that nobody picks; null: any at_least different ones"
    )
    at_least: Annotated[Count, Field(ge=FEWEST)] = Field(FEWEST, description="seeds of an entry")

    def complaints(self, recipe: Document) -> Iterator[str]:
        """Why a recipe, as run, is none of this track."""
        for key, wanted in self.recipe.items():
            if not _same(found := recipe.get(tuple(key.split("."))), wanted):
                yield f"{key} is {found!r}; the track has {wanted!r}"
        groups = recipe.get(("calfat", "clients")) or ()
        if "calfat.clients" not in self.recipe and any(group.get("attacker") for group in groups):
            yield "calfat.clients has attackers, whom worst clients leave out; the track has none"

    def seed_complaint(self, seeds: set[int]) -> str:
        """What is wrong with the seeds of an entry; empty when nothing is."""
        if self.seeds is not None and seeds != set(self.seeds):
            return f"has the seeds {_listed(seeds)}; the track prescribes {_listed(set(self.seeds))}"
        if len(seeds) < self.at_least:
            return f"has {len(seeds)} seeds; the track asks for {self.at_least} or more"
        return ""


class BoardFile(Section):
    """All that ``board.yaml`` may say."""

    title: str = Field("Leaderboard", description="the title of the page")
    tracks: Annotated[dict[str, Track], Field(min_length=1), AfterValidator(_named)] = Field(
        description="name to track"
    )


@dataclass(frozen=True)
class Board:
    """A folder with ``board.yaml``."""

    path: Path
    title: str
    tracks: Mapping[str, Track]

    def entries(self) -> list[tuple[str, str]]:
        """(track, name) of every folder that claims to be an entry; one that begins with a dot is being made."""
        return sorted((path.parent.name, path.name) for path in (self.path / "entries").glob("*/[!.]*"))

    def find(self, entry: str) -> tuple[str, str]:
        """(track, name) of ``track/name``, or of a name alone."""
        there = self.entries()
        found = [each for each in there if entry in (each[1], "/".join(each))]
        if len(found) == 1:
            return found[0]
        names = ["/".join(each) for each in there]
        hint = did_you_mean(entry, names) or f" There are: {', '.join(names) or 'none'}."
        raise RunError(f"{self.path}: {'several entries are' if found else 'no entry is'} called '{entry}'.{hint}")

    def folder(self, track: str, name: str) -> Path:
        return self.path / "entries" / track / name

    def record(self, track: str, name: str) -> Path:
        """What ``verify`` last found, outside the entry, which is its entrant's."""
        return self.path / "verified" / track / f"{name}.json"

    def revision(self) -> str:
        """The commit of the repository that the board lies in; of none, a digest of its files."""
        with suppress(OSError):  # without git
            done = subprocess.run(
                ["git", "-C", str(self.path), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return done.stdout.strip()
        digest = hashlib.sha256()
        for file in sorted((self.path / "entries").rglob("*")):
            if file.is_file() and not file.is_symlink():
                digest.update(f"{file.relative_to(self.path)} {sha256_of(file)}\n".encode())
        return digest.hexdigest()


def open_board(path: Path) -> Board:
    """Read ``board.yaml``."""
    if not (path / FILE).is_file():
        raise RunError(
            f"{path}: there is no board here (no {FILE}). Make one of a run: calfat board init "
            f"{shlex.quote(str(path))} RUN"
        )
    document = read_document(path / FILE, BOARD)
    try:
        found = BoardFile.model_validate(document.data)
    except ValidationError as error:
        raise first_of(error, document, BoardFile, {"tracks": Track}) from None
    return Board(path, found.title, found.tracks)


def make_board(path: Path, run: Path, track: str) -> None:
    """A board with one track, which is for recipes that are measured as that of a run."""
    if not NAME.fullmatch(track):
        raise OptionError(f"--track {track}: expected {NAMED}: it names a folder.")
    if not (file := RunDirectory(run).recipe).is_file():
        raise RunError(f"{run}: there is no run here (no recipe.yaml).")
    recipe = flat(read_document(file).data)
    keys = {key: value for key, value in recipe.items() if key.startswith(_MEASURED) and key not in _NOT_MEASURED}
    content = {
        "title": "Leaderboard",
        "tracks": {track: {"title": "", "recipe": keys, "passes": None, "seeds": None, "at_least": FEWEST}},
    }
    about = (
        "# What entries of a track have in common. Prescribe seeds, such as [0, 1, 2, 3, 4]: then nobody picks them.\n"
    )
    files = {
        FILE: about + yaml.safe_dump(content, sort_keys=False, width=120),
        ".github/workflows/verify.yml": _CI.format(version=__version__),
        ".gitignore": "verified/\nindex.html\n",
    }
    write_new_folder(path, files, f"Add an entry: calfat board add {shlex.quote(str(path))} RUN...")


def _same(found: Any, wanted: Any) -> bool:
    if found == wanted:
        return True
    try:
        return not isinstance(found, bool) and parse_number(found) == parse_number(wanted)
    except ValueError:
        return False


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
