"""Files are replaced as a whole and durably, whatever ends the write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from calfat_plugin import disk
from calfat_plugin.errors import RunError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs.checkpoints import save_checkpoint
from calfat_plugin.runs.logs import log_to
from calfat_plugin.tensor_files import write_tensors


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    disk.write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        disk.write_text(file, "ha" * 10_000 + "\ud800lf")
    assert file.read_text() == "old"
    disk.write_text(file, "new")  # what was left over is in nobody's way
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert file.read_text() == "new"


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    """In a run directory from elsewhere it may lead to any file of the user."""
    elsewhere, run = tmp_path / "precious", tmp_path / "run"
    elsewhere.write_text("precious")
    run.mkdir()
    for name in ("trust.json", "last.safetensors"):
        disk.temporary_of(run / name).symlink_to(elsewhere)
    disk.write_text(run / "trust.json", "new")
    save_checkpoint(run / "last.safetensors", Snapshot(1, {"w": torch.ones(1)}), {})
    (run / "client-0-round-2.safetensors").symlink_to(elsewhere)
    write_tensors(run / "client-0-round-2.safetensors", {"c": torch.ones(1)}, {})
    assert elsewhere.read_text() == "precious"
    assert (run / "trust.json").read_text() == "new"
    assert not [path for path in run.iterdir() if path.is_symlink()]


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "precious", tmp_path / "log.txt"
    elsewhere.write_text("precious")
    link.symlink_to(elsewhere)
    with pytest.raises(RunError, match=r"log\.txt: is a link, and the log is written to no other place"), log_to(link):
        pass
    assert elsewhere.read_text() == "precious"


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
