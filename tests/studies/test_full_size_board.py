"""The board of the study at full size: its entries are whole, fit their track, and replay wherever the tests run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from calfat_plugin.board.entry import misfits, read_entry
from calfat_plugin.board.page import write_page
from calfat_plugin.board.standing import standing
from calfat_plugin.board.tracks import open_board
from tests.cli.runner import ROOT, calfat

BOARD = open_board(ROOT / "studies" / "full_size" / "board")


@pytest.mark.parametrize(("track", "name"), [("digits", "calfat"), ("digits", "fedpgd")])
def test_an_entry_is_whole_and_fits_its_track(track: str, name: str, tmp_path: Path) -> None:
    """And is on the page."""
    page = write_page(BOARD, tmp_path / "index.html").read_text(encoding="utf-8")
    assert (name in page, "no entry" in page) == (True, False)
    entry = read_entry(BOARD, track, name)
    assert list(misfits(entry, BOARD.tracks[track])) == []
    assert entry.seeds == (4001, 4002, 4003, 4004, 4005)
    found = standing(entry)
    for seed in found.by_seed.values():
        assert seed.worst <= seed.claimed <= seed.natural
        assert seed.images == 359


@pytest.mark.parametrize(("track", "name"), BOARD.entries())
def test_its_first_seed_replays(track: str, name: str, tmp_path: Path) -> None:
    """Only borderline images may differ on another processor: then no number falls."""
    shutil.copytree(BOARD.folder(track, name) / "seed-4001", tmp_path / "run")
    done = calfat("replay", str(tmp_path / "run"))
    assert done.code == 0, done.out + done.err
