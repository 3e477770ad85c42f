"""``calfat board challenge``: images of anybody's that lower an entry."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from calfat_plugin.analyses.attack import loaded
from calfat_plugin.board.entry import CHALLENGES, Entry, entry_errors, read_entry
from calfat_plugin.board.own import Means, own_run
from calfat_plugin.board.standing import Standing, of_model, standing
from calfat_plugin.board.tracks import NAME, NAMED, Board
from calfat_plugin.board.verify import refused
from calfat_plugin.disk import TRY_AGAIN, reporting_disk_errors, sync
from calfat_plugin.errors import OptionError, RunError
from calfat_plugin.observer import Observer


def challenge(board: Board, track: str, name: str, evidence: Path, by: str, means: Means) -> tuple[Standing, Standing]:
    """Check a file of evidence with one forward pass, and keep it with the entry: (standing before, and after)."""
    if not NAME.fullmatch(by):
        raise OptionError(f"--by {by}: expected {NAMED}: it names a file.")
    if not evidence.is_file():
        raise RunError(f"{evidence}: no such file.")
    entry = read_entry(board, track, name)
    kept = entry.folder / CHALLENGES / f"{by}.safetensors"
    if kept.exists():
        raise RunError(f"{kept}: is there already. Choose another name, such as --by {by}-2.")
    seed = of_model(entry, evidence)
    with tempfile.TemporaryDirectory(prefix="calfat-board-") as temporary, entry_errors(entry):
        # By the name that it will have: a file called evidence.safetensors is held to the recipe's ball alone.
        copy = Path(temporary) / kept.name
        shutil.copyfile(evidence, copy)
        *_, plan = own_run(entry, seed, means, Path(temporary))
        if reasons := list(refused(loaded(plan, Observer()), copy)):
            raise RunError(f"{evidence}: proves nothing: {'; '.join(reasons[:5])}.")
        before = standing(entry)
        _place(copy, kept, entry)
    return before, _lowered(entry, kept, evidence)


def _place(copy: Path, kept: Path, entry: Entry) -> None:
    """Put it there whole or not at all; what a kill leaves lies beside the entry, whose files are counted."""
    waiting = entry.folder.with_name(f".{kept.name}.tmp")
    with reporting_disk_errors(kept, TRY_AGAIN):
        try:
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(copy, waiting)
            sync(waiting)
            waiting.replace(kept)
        finally:
            waiting.unlink(missing_ok=True)


def _lowered(entry: Entry, kept: Path, evidence: Path) -> Standing:
    after = standing(entry)
    if not after.challengers[kept.stem]:
        kept.unlink()
        raise RunError(f"{evidence}: lowers nothing: every image in it that falls is known to fall.")
    return after
