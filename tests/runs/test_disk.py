"""Files are replaced as a whole and durably, whatever ends the write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calfat_plugin import disk
from calfat_plugin.errors import CalfatError, RunError
from calfat_plugin.evaluators.evidence import read_evidence
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.recipe.document import read_document
from calfat_plugin.recipe.plugin_files import PluginFile
from calfat_plugin.rounds import number_of_rounds, read_rounds
from calfat_plugin.runs.checkpoints import load_checkpoint, named_files, save_checkpoint
from calfat_plugin.runs.compute import log_to
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.record import read_record
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


def test_only_a_regular_file_of_a_limited_size_is_read(tmp_path: Path) -> None:
    """A link to a device would never end, and a pipe would wait for ever."""
    plain, endless, pipe = tmp_path / "plain", tmp_path / "endless", tmp_path / "pipe"
    plain.write_bytes(b"12345")
    endless.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    assert disk.read_whole(plain, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        disk.read_whole(plain, 4)
    assert disk.read_bytes(plain, 3) == b"1234"
    assert disk.read_bytes(endless, 3, piped=True) == bytes(4)
    for path in (endless, pipe):
        with pytest.raises(OSError, match="it is a device or a pipe, not a regular file"):
            disk.read_bytes(path, 5)
        with pytest.raises(OSError, match="it is a device or a pipe, not a regular file"):
            disk.read_whole(path, 5)
        with pytest.raises(OSError, match="it is a device or a pipe, not a regular file"):
            disk.sha256_of(path)
    with pytest.raises(IsADirectoryError):
        disk.read_whole(tmp_path, 5)
    with pytest.raises(FileNotFoundError):
        disk.read_whole(tmp_path / "none", 5)


@pytest.mark.parametrize("made", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo], ids=["device", "pipe"])
def test_no_reader_of_a_run_directory_waits_for_what_is_no_file(tmp_path: Path, made: Callable[[Path], None]) -> None:
    path = tmp_path / "recipe.yaml"
    made(path)
    readers: list[Callable[[Path], object]] = [
        disk.read_json,
        read_rounds,
        number_of_rounds,
        read_record,
        load_checkpoint,
        read_evidence,
        read_document,
        lambda path: PluginFile(path, "").load(),
    ]
    for read in readers:
        with pytest.raises((CalfatError, OSError), match="it is a device or a pipe, not a regular file"):
            read(path)
    assert named_files(path) == {}
    with pytest.raises(RunError, match=r"is a pipe, so the log cannot be written there|is a link"), log_to(path):
        pass


def test_tensors_that_memory_cannot_hold_are_not_read(tmp_path: Path) -> None:
    """Such a file takes no room on the disk, for it is all hole."""
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, Snapshot(1, {"w": torch.ones(1)}), {})
    os.truncate(path, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + 1)
    with pytest.raises(RunError, match="bytes are more than this machine's memory of"):
        load_checkpoint(path)


def test_a_link_is_refused_where_a_run_is_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in (run.last_checkpoint.parent, run.client_states, run.evaluation):
        folder.parent.mkdir(parents=True, exist_ok=True)
        run.refuse_links()
        folder.symlink_to(elsewhere)
        with pytest.raises(RunError, match=f"{folder.name}: is a link, and results are written to no other place"):
            run.refuse_links()
        folder.unlink()


def test_the_working_directory_is_what_it_was_whatever_a_plugin_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with disk.staying_here():
        os.chdir("/")
    assert Path.cwd() == tmp_path


def test_too_many_open_files_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(disk.DiskError) as error, disk.reporting_disk_errors(tmp_path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    text = f"{tmp_path}: cannot be written (Too many open files). Allow more open files, such as ulimit -n 1024."
    assert str(error.value) == text


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
