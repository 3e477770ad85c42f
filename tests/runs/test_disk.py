"""Files are replaced as a whole and durably, whatever ends the write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from calfat_plugin import disk


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    disk.write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        disk.write_text(file, "ha" * 10_000 + "\ud800lf")
    assert file.read_text() == "old"
    disk.write_text(file, "new")  # what was left over is in nobody's way
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert file.read_text() == "new"


def test_content_is_on_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure leaves the new name with half of the content."""
    calls: list[tuple[str, str]] = []
    replace = os.replace

    def noted(one: Path, other: Path) -> None:
        calls.append(("replace", one.name))
        replace(one, other)

    monkeypatch.setattr(disk.os, "fsync", lambda handle: calls.append(("fsync", held(handle))))
    monkeypatch.setattr(disk.os, "replace", noted)
    disk.write_text(tmp_path / "best.json", "{}")
    assert calls == [("fsync", "best.json.tmp"), ("replace", "best.json.tmp"), ("fsync", tmp_path.name)]


def held(handle: int) -> str:
    """Name of an open file or folder."""
    return Path(os.readlink(f"/proc/self/fd/{handle}")).name


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    assert disk.read_bytes(tmp_path / "file", 10) == b"0123456789"
    assert disk.read_bytes(tmp_path / "file", 4) == b"01234"


def test_a_scratch_folder_removes_those_of_dead_processes_only(tmp_path: Path) -> None:
    (tmp_path / ".report-dead" / "figures").mkdir(parents=True)
    with disk.scratch_folder(tmp_path, ".report-") as first, disk.scratch_folder(tmp_path, ".report-") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not list(tmp_path.iterdir())
