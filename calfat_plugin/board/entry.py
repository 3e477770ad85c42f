"""An entry of a board: a folder that anybody may have written, and how one is made of runs.

The folder of a seed is a run directory, so that `calfat replay` and `calfat attack` take it as it is.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from calfat_plugin import __version__
from calfat_plugin.board.tracks import NAME, NAMED, Board, Track
from calfat_plugin.disk import TRY_AGAIN, read_json, sha256_of, write_json
from calfat_plugin.errors import OptionError, RunError
from calfat_plugin.experiment.differences import FREE, flat
from calfat_plugin.judging.examine import FILE as TRUST
from calfat_plugin.recipe.document import Document, read_document
from calfat_plugin.recipe.plugin_files import plugin_files
from calfat_plugin.report import shapes
from calfat_plugin.report.shapes import check_shape
from calfat_plugin.results import EVIDENCE
from calfat_plugin.rounds_csv import read_rounds
from calfat_plugin.runs.directory import CLIENTS, TWO_LEFT, RunDirectory
from calfat_plugin.suites.schema import SEED_KEY

ENTRY = "entry.json"
CHALLENGES = "challenges"
TRUST_EVIDENCE = f"trust.{EVIDENCE}"
LAST, BEFORE = (f"checkpoints/{name}.safetensors" for name in ("last", TWO_LEFT))
FILES = ("recipe.yaml", "results.json", "rounds.csv", "partition.json", TRUST, TRUST_EVIDENCE, EVIDENCE, LAST, BEFORE)
OPTIONAL = ("clients.csv",)
_STATE = re.compile(rf"checkpoints/{CLIENTS}/client-\d+-round-\d+\.safetensors")
_PLUGIN = re.compile(r"plugins/[A-Za-z_]\w*\.py")
_LARGEST = 64 * 10**6  # bytes of a file that is no tensors
_SHAPE = {
    "format": shapes.COUNT,
    "track": shapes.TEXT,
    "name": shapes.TEXT,
    "by": shapes.TEXT,
    "seeds": [shapes.COUNT],
    "files": {"*": shapes.TEXT},
}
_PARTITION = {
    "class_names": [shapes.TEXT],
    "class_counts": [[shapes.COUNT]],
    "dataset_sha256": shapes.TEXT,
    "partition_sha256": shapes.TEXT,
    "attackers?": [shapes.COUNT],
}


@dataclass(frozen=True)
class Entry:
    """An entry whose files are all there, are what ``entry.json`` says, and are no others."""

    folder: Path
    track: str
    name: str
    by: str
    seeds: tuple[int, ...]
    digest: str  # SHA-256 of entry.json, which has those of all other files
    plugins: tuple[str, ...]  # modules whose code came with it

    def of(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def recipe(self, seed: int) -> Document:
        return read_document(self.of(seed) / "recipe.yaml")

    @property
    def challenges(self) -> list[Path]:
        """Files of others about its models."""
        return sorted((self.folder / CHALLENGES).glob("*.safetensors"))


@contextmanager
def entry_errors(entry: Entry) -> Iterator[None]:
    """Let what files of anybody's may raise be an error about the entry: of it alone, whatever else is on the board."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        text = f"{entry.folder}: its files cannot be used ({type(error).__name__}: {error})."
        raise RunError(text) from error


def read_entry(board: Board, track: str, name: str) -> Entry:
    """Check that an entry is whole.

    Raises:
        RunError: a file is missing, is too much, is a link, or is not what ``entry.json`` says.
    """
    folder = board.folder(track, name)
    for part in (folder.parent.parent, folder.parent, folder, folder / ENTRY):
        if part.is_symlink():
            raise RunError(f"{part}: is a link, which an entry must not have.")
    if track not in board.tracks or not NAME.fullmatch(name) or not (folder / ENTRY).is_file():
        raise RunError(f"{folder}: is no entry: its folder is entries/TRACK/NAME of {', '.join(board.tracks)}.")
    there = set(_files_in(folder))
    facts = read_json(folder / ENTRY)
    check_shape(facts, _SHAPE, folder / ENTRY)
    files, seeds = facts["files"], facts["seeds"]
    if (facts["track"], facts["name"]) != (track, name) or facts["format"] != 1:
        raise RunError(f"{folder / ENTRY}: is about '{facts['track']}/{facts['name']}', or of another format.")
    if not seeds or len(set(seeds)) != len(seeds):
        raise RunError(f"{folder / ENTRY}: names {'a seed twice' if seeds else 'no seed'}.")
    own = {file for file in there if not file.startswith(f"{CHALLENGES}/")} - {ENTRY}
    allowed = {f"seed-{seed}/{file}" for seed in seeds for file in (*FILES, *OPTIONAL)}
    for file in sorted(own ^ set(files)):
        raise RunError(f"{folder / file}: is {'missing' if file in files else 'not named in ' + ENTRY}.")
    for file in sorted(files):
        of_seed = re.fullmatch(r"seed-(\d+)/(.*)", file)
        is_state = of_seed and int(of_seed[1]) in seeds and _STATE.fullmatch(of_seed[2])
        if file not in allowed and not is_state and not _PLUGIN.fullmatch(file):
            raise RunError(f"{folder / file}: has no place in an entry.")
        if sha256_of(folder / file) != files[file]:
            raise RunError(f"{folder / file}: is not the file that {ENTRY} names (SHA-256).")
    for file in sorted({f"seed-{seed}/{file}" for seed in seeds for file in FILES} - set(files)):
        raise RunError(f"{folder / file}: is missing.")
    plugins = tuple(Path(file).stem for file in sorted(files) if _PLUGIN.fullmatch(file))
    digest = sha256_of(folder / ENTRY)
    entry = Entry(folder, track, name, facts["by"], tuple(sorted(seeds)), digest, plugins)
    for seed in seeds:
        for file, shape in (("partition.json", _PARTITION), (TRUST, shapes.TRUST)):
            check_shape(read_json(entry.of(seed) / file), shape, entry.of(seed) / file)
    return entry


def misfits(entry: Entry, track: Track) -> Iterator[str]:
    """Why an entry does not belong in its track, by its files alone."""
    if complaint := track.seed_complaint(set(entry.seeds)):
        yield complaint
    recipes = {seed: entry.recipe(seed) for seed in entry.seeds}
    first = {key: value for key, value in flat(recipes[entry.seeds[0]].data).items() if not _may_differ(key)}
    for seed, recipe in recipes.items():
        here = flat(recipe.data)
        if here.get(SEED_KEY) != seed:
            yield f"seed {seed}: its recipe has the seed {here.get(SEED_KEY)}"
        for complaint in track.complaints(recipe):
            yield f"seed {seed}: {complaint}"
        here = {key: value for key, value in here.items() if not _may_differ(key)}
        for key in sorted(key for key in here.keys() | first.keys() if here.get(key) != first.get(key)):
            yield f"seed {seed}: {key} is {here.get(key)!r}; seed {entry.seeds[0]} has {first.get(key)!r}"
        used = passes(entry.of(seed))
        if track.passes is not None and not used <= track.passes:
            yield f"seed {seed}: made {used:,.0f} passes; the track allows {track.passes:,.0f}"


def _may_differ(key: str) -> bool:
    return key in (SEED_KEY, "calfat.name") or key.startswith((*FREE, "calfat.plugins."))


def passes(run: Path) -> float:
    """How often a training image went forward through the network, by ``rounds.csv``; nan where it is not counted."""
    texts = [row.get("passes") or "nan" for row in read_rounds(run / "rounds.csv")]
    try:
        return sum(map(float, texts))
    except ValueError:
        raise RunError(f"{run / 'rounds.csv'}: passes are {', '.join(texts[:3])}; expected numbers.") from None


def add(board: Board, track: str, name: str, by: str, runs: Sequence[Path]) -> Entry:
    """Copy runs of one recipe into the board as an entry."""
    if not NAME.fullmatch(name):
        raise OptionError(f"--name {name}: expected {NAMED}: it names a folder.")
    folder = board.folder(track, name)
    if folder.exists():
        raise RunError(f"{folder}: is there already. Choose another --name, or remove it.")
    by_seed: dict[int, Path] = {}
    for run in runs:
        _refuse_unfit(run)
        document = read_document(RunDirectory(run).recipe)
        seed = document.get(tuple(SEED_KEY.split(".")))
        if seed in by_seed:
            raise RunError(f"{run}: has the seed {seed}, as {by_seed[seed]} has; an entry has each seed once.")
        by_seed[seed] = run
    made = temporary = folder.with_name(f".{name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for seed, run in by_seed.items():
            _copy(run, temporary / f"seed-{seed}")
            for module, file in plugin_files(read_document(RunDirectory(run).recipe)).items():
                (temporary / "plugins").mkdir(exist_ok=True)
                (temporary / "plugins" / f"{module}.py").write_bytes(file.read())
        files = {file: sha256_of(temporary / file) for file in sorted(_files_in(temporary))}
        facts = {"format": 1, "track": track, "name": name, "by": by, "calfat_plugin": __version__}
        content = {**facts, "seeds": sorted(by_seed), "files": files}
        write_json(temporary / ENTRY, content, TRY_AGAIN)
        made = temporary.rename(folder)
        entry = read_entry(board, track, name)
        if problems := list(misfits(entry, board.tracks[track])):
            raise RunError(f"these runs are no entry of '{track}': {'; '.join(problems[:5])}.")
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{folder}: cannot be written ({error.strerror or error}).") from None
        raise
    return entry


def _refuse_unfit(run: Path) -> None:
    """Refuse a run that is not finished, was not judged, or did not keep what is needed to train its end again."""
    here, recipe = (shlex.quote(str(path)) for path in (run, run / "recipe.yaml"))
    again = f"Remove {TRUST} and judge it anew" if read_json(run / TRUST).get("finished") else "Judge it to the end"
    for file, remedy in (
        ("recipe.yaml", "Give run directories."),
        ("results.json", f"Finish it: calfat run {recipe} --resume --run-dir {here}"),
        (EVIDENCE, "Its recipe says calfat.evaluation.evidence_mb: 0; measure it again with room for evidence."),
        (TRUST, f"Judge it first: calfat trust {here}"),
        (TRUST_EVIDENCE, f"{again}: calfat trust {here}"),
        (BEFORE, "Only runs of three rounds or more, in one go, keep the model two rounds before the end."),
    ):
        if not (run / file).is_file():
            raise RunError(f"{run}: has no {file}. {remedy}")


def _copy(run: Path, to: Path) -> None:
    from calfat_plugin.runs.checkpoints import named_files

    (to / "checkpoints").mkdir(parents=True)
    for file in (*FILES, *OPTIONAL):
        if (run / file).is_file():
            shutil.copyfile(run / file, to / file)
    for client, state in named_files(run / BEFORE).items():
        name = f"checkpoints/{CLIENTS}/client-{client}-round-{state.round}.safetensors"
        (to / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(run / name, to / name)


def _files_in(folder: Path) -> Iterator[str]:
    """Relative names of all files below; refuses links and what is no file."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise RunError(f"{path}: is a link, which an entry must not have.")
        if path.is_dir():
            continue
        if not path.is_file():
            raise RunError(f"{path}: is no file.")
        if path.suffix != ".safetensors" and path.stat().st_size > _LARGEST:
            raise RunError(f"{path}: has {path.stat().st_size:,} bytes; at most {_LARGEST:,} are expected.")
        yield path.relative_to(folder).as_posix()
