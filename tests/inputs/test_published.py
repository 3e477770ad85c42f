"""CIFAR, SVHN and the MNIST twins, on small files in their true formats."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import pytest
import torch

from calfat_plugin.compat import make_torchvision_importable
from calfat_plugin.datasets import Augmentation, Dataset, files, published
from calfat_plugin.errors import DataError, RunError
from tests.cli.runner import calfat
from tests.inputs import on_disk

make_torchvision_importable()
import torchvision.datasets as theirs  # noqa: E402  (the line above makes it importable)


class Case(NamedTuple):
    name: str
    shape: tuple[int, int, int]
    num_classes: int
    augment: Augmentation
    damaged: str  # a file to damage, below the root

    @property
    def load(self) -> Callable[..., Dataset]:
        return getattr(published, f"load_{self.name}")

    @property
    def write(self) -> Callable[..., on_disk.Written]:
        return getattr(on_disk, f"write_{self.name}")

    @property
    def theirs(self) -> type:
        return getattr(theirs, published._READERS[self.name])


NONE, CIFAR = Augmentation(), Augmentation(crop_padding=4, flip=True)
CASES = [
    Case("cifar10", (3, 32, 32), 10, CIFAR, "cifar-10-batches-py/data_batch_3"),
    Case("cifar100", (3, 32, 32), 100, CIFAR, "cifar-100-python/test"),
    Case("svhn", (3, 32, 32), 10, NONE, "test_32x32.mat"),
    Case("mnist", (1, 28, 28), 10, NONE, "MNIST/raw/t10k-images-idx3-ubyte"),
    Case("fmnist", (1, 28, 28), 10, NONE, "FashionMNIST/raw/train-labels-idx1-ubyte"),
]
FASHION = CASES[-1]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of a system with no data set: this one may have Debian's package."""
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "system"))
    return tmp_path / "system"


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def expect_checksums_of(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchvision (and our table for idx files) expect the small files that lie below root."""
    cls = case.theirs
    if case.name.startswith("cifar"):
        folder = root / cls.base_folder
        for attribute in ("train_list", "test_list"):
            listed = [[file, md5(folder / file)] for file, _ in getattr(cls, attribute)]
            monkeypatch.setattr(cls, attribute, listed)
        meta = cls.meta["filename"]
        monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": md5(folder / meta)})
    elif case.name == "svhn":
        listed = [(split, *cls.split_list[split]) for split in ("train", "test")]
        splits = {split: [url, file, md5(root / file)] for split, url, file, _ in listed}
        monkeypatch.setattr(cls, "split_list", splits)
    else:
        raw = next(root.glob("*/raw"))
        table = {file: md5(raw / file) for file in published._IDX_MD5[case.name]}
        monkeypatch.setitem(published._IDX_MD5, case.name, table)


@every_case
def test_small_files_in_the_true_format_are_read_whole(case, tmp_path):
    wrote = case.write(tmp_path / case.name)
    data = case.load(tmp_path, verify=False)
    assert data.name == case.name
    assert data.num_classes == len(data.class_names) == case.num_classes
    assert data.augment == case.augment
    for split, x, y in ((data.train, wrote.x_train, wrote.y_train), (data.test, wrote.x_test, wrote.y_test)):
        assert split.x.dtype == torch.uint8
        assert split.x.shape[1:] == case.shape
        assert split.x.is_contiguous()
        assert np.array_equal(split.x.numpy(), x)
        assert np.array_equal(split.y.numpy(), y)


@every_case
def test_a_changed_byte_is_refused_by_file_name(case, tmp_path, monkeypatch):
    wrote = case.write(tmp_path)
    expect_checksums_of(case, tmp_path, monkeypatch)
    assert len(case.load(tmp_path).train) == len(wrote.y_train)
    path = tmp_path / case.damaged
    before = md5(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    text = (
        f"data set {case.name}: {path} is corrupt: its MD5 is {md5(path)}, the published one {before}. Delete it and "
    )
    with pytest.raises(DataError, match=f"^{re.escape(text)}"):
        case.load(tmp_path)


@every_case
def test_a_file_cut_short_is_refused_by_name_without_checksums_too(case, tmp_path):
    case.write(tmp_path)
    path = tmp_path / case.damaged
    path.write_bytes(path.read_bytes()[:30])
    start = re.escape(f"data set {case.name}: {path} cannot be read (")
    end = re.escape("). It is damaged or not in the expected format; replace it.")
    with pytest.raises(DataError, match=f"(?s)^{start}.+{end}$"):
        case.load(tmp_path, verify=False)


@every_case
@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_data_set_says_what_to_get_from_where_and_how_large(case, verify, tmp_path, snapshot):
    with snapshot.raises(DataError):
        case.load(tmp_path, verify=verify)


@every_case
def test_download_lets_torchvision_fetch_what_is_missing(case, tmp_path, monkeypatch):
    expected = tmp_path / "elsewhere"
    wrote = case.write(expected)
    expect_checksums_of(case, expected, monkeypatch)
    fetched = []

    def download(self):
        fetched.append(Path(self.root))
        shutil.copytree(expected, self.root, dirs_exist_ok=True)

    monkeypatch.setattr(case.theirs, "download", download)
    root = tmp_path / "data"
    assert len(case.load(root, download=True).train) == len(wrote.y_train)
    assert set(fetched) == {root}
    fetched.clear()
    case.load(root, download=True)
    assert fetched == []  # it was there


@pytest.fixture
def _offline(monkeypatch):
    """The publisher's site cannot be reached."""

    def offline(self):
        raise URLError("no route to host")

    for name in ("CIFAR10", "CIFAR100"):
        monkeypatch.setattr(getattr(theirs, name), "download", offline)


@pytest.mark.usefixtures("_offline")
def test_a_failed_download_says_how_to_do_without(tmp_path, snapshot):
    with snapshot.raises(DataError):
        published.load_cifar100(tmp_path, download=True)


def _npm(folder: Path, script: str, monkeypatch) -> None:
    """A program npm that runs ``script`` in a shell; $5 is the folder that packages belong in."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (None, "No such file or directory: 'npm'"),
        ("echo 'npm error code E404' >&2; exit 1", "'npm pack convnetjs@0.1.4' failed: npm error code E404"),
        ("exit 3", "'npm pack convnetjs@0.1.4' failed: exit code 3"),
        ("exit 0", "'npm pack convnetjs@0.1.4' failed: exit code 0"),
        ('mkdir -p package/demo; tar czf "$5/convnetjs-0.1.4.tgz" package', "'package/demo/cifar10/data_batch_1' not"),
        ('echo no archive > "$5/convnetjs-0.1.4.tgz"', "not a gzip file"),
        (
            "mkdir -p package/demo/cifar10; head -c 3000000 /dev/zero > package/demo/cifar10/data_batch_1; "
            'tar czf "$5/convnetjs-0.1.4.tgz" package',
            "it unpacks to more than 2 MB",
        ),
    ],
)
def test_npm_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch, script, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "MOST_UNPACKED", 2 * 10**6)
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        _npm(tmp_path / "bin", script, monkeypatch)
    root = tmp_path / "data"
    with pytest.raises(DataError, match=rf"no route to host>; from the npm registry: .*{re.escape(problem)}"):
        published.load_cifar10(root, download=True)
    assert list((root / "cifar-10-batches-py").iterdir() if root.exists() else ()) == []


@pytest.mark.usefixtures("_offline")
def test_cifar10_comes_from_npm_where_its_site_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_disk.write_cifar10(tmp_path / "genuine")
    expect_checksums_of(CASES[0], tmp_path / "genuine", monkeypatch)
    packed = tmp_path / "package" / "demo"
    packed.mkdir(parents=True)
    folder = (tmp_path / "genuine" / "cifar-10-batches-py").rename(packed / "cifar10")
    (folder / "convert.py").write_text("raise SystemExit")
    _npm(tmp_path / "bin", 'echo "$@" > asked; tar czf "$5/convnetjs-0.1.4.tgz" package', monkeypatch)
    root = tmp_path / "data"
    target = root / "cifar-10-batches-py"
    target.mkdir(parents=True)
    (target / "test_batch").write_bytes(b"damaged")
    assert len(published.load_cifar10(root, download=True).train) == 50
    assert (tmp_path / "asked").read_text().startswith("pack convnetjs@0.1.4 --silent --pack-destination ")
    kept = {path.name for path in target.iterdir()}
    assert kept == {*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"}

    (packed / "cifar10" / "data_batch_3").write_bytes(b"not published")
    damaged = tmp_path / "again" / "cifar-10-batches-py" / "data_batch_3"
    with pytest.raises(DataError, match=f"^data set cifar10: {damaged} is corrupt: its MD5 is "):
        published.load_cifar10(tmp_path / "again", download=True)


def test_the_command_names_what_it_can_bring():
    for name, hint in (("cifar", "Did you mean 'cifar10'?"), ("digits", "Data sets: cifar10, cifar100, fmnist, mnist")):
        ended = calfat("download", name)
        assert (ended.code, f"no data set '{name}' is offered for download. {hint}" in ended.err) == (2, True)


def test_each_name_finds_the_files_of_its_own_data_set():
    assert {name: files().name for name, files in published.FILES.items()} == {name: name for name in published.FILES}


# --- compressed files, and Debian's package ---------------------------------------------------------------------------


def compressed(folder: Path, into: Path) -> None:
    """The files of ``folder``, compressed in a flat folder, as publishers and Debian's package have them."""
    into.mkdir(parents=True)
    for path in folder.iterdir():
        with gzip.open(into / f"{path.name}.gz", "wb") as file:
            file.write(path.read_bytes())


@pytest.mark.parametrize("below", ["", "fmnist", "FashionMNIST/raw"])
def test_compressed_files_are_read_and_checked_by_their_content(below, tmp_path, monkeypatch):
    wrote = FASHION.write(tmp_path / "plain")
    expect_checksums_of(FASHION, tmp_path / "plain", monkeypatch)
    compressed(tmp_path / "plain/FashionMNIST/raw", tmp_path / "data" / below)
    data = FASHION.load(tmp_path / "data")
    assert np.array_equal(data.train.x.numpy(), wrote.x_train)
    assert np.array_equal(data.test.y.numpy(), wrote.y_test)


def test_fashion_mnist_of_debian_is_found_without_a_path(tmp_path, system, monkeypatch):
    wrote = FASHION.write(tmp_path / "plain")
    expect_checksums_of(FASHION, tmp_path / "plain", monkeypatch)
    compressed(tmp_path / "plain/FashionMNIST/raw", system / "datasets/fashion-mnist")
    assert np.array_equal(FASHION.load(tmp_path / "nothing").train.x.numpy(), wrote.x_train)
    mine = FASHION.write(tmp_path / "mine", seed=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert np.array_equal(FASHION.load(Path("~/mine"), verify=False).train.x.numpy(), mine.x_train)  # first


def test_a_damaged_package_is_installed_again(tmp_path, system, monkeypatch):
    FASHION.write(tmp_path / "plain")
    expect_checksums_of(FASHION, tmp_path / "plain", monkeypatch)
    FASHION.write(tmp_path / "other", seed=1)
    compressed(tmp_path / "other/FashionMNIST/raw", system / "datasets/fashion-mnist")
    with pytest.raises(DataError, match=r"Install it again: apt-get install --reinstall dataset-fashion-mnist\.$"):
        FASHION.load(tmp_path / "nothing")


@pytest.mark.parametrize("verify", [True, False])
def test_a_compressed_file_cut_short_is_named(verify, tmp_path):
    FASHION.write(tmp_path / "plain")
    compressed(tmp_path / "plain/FashionMNIST/raw", tmp_path / "data")
    path = tmp_path / "data/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:300])
    start = re.escape(f"data set fmnist: {path} cannot be read (EOFError: ")
    with pytest.raises(DataError, match=f"^{start}.+ It is damaged or not in the expected format; replace it.$"):
        FASHION.load(tmp_path / "data", verify=verify)


class Full(io.BytesIO):
    """A temporary file on a disk without room."""

    name = "/tmp/full"

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_not_a_damaged_file(tmp_path, monkeypatch):
    """Whoever replaced the file would have it refused again."""
    FASHION.write(tmp_path / "plain")
    compressed(tmp_path / "plain/FashionMNIST/raw", tmp_path / "data")
    monkeypatch.setattr(files.tempfile, "NamedTemporaryFile", Full)
    said = r"^/tmp/full: cannot be written \(No space left on device\)\. Make room there, or set TMPDIR"
    with pytest.raises(RunError, match=said):
        FASHION.load(tmp_path / "data")


def test_a_compressed_file_that_grows_without_end_is_given_up(tmp_path, monkeypatch):
    FASHION.write(tmp_path / "plain")
    compressed(tmp_path / "plain/FashionMNIST/raw", tmp_path / "data")
    path = tmp_path / "data/train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(6 * 2**20)))
    monkeypatch.setattr(files, "MOST_UNPACKED", 3 * 10**6)
    unpacked = []
    monkeypatch.setattr(files.gzip, "open", lambda path: Counted(gzip.GzipFile(path), unpacked))
    with pytest.raises(DataError, match=re.escape(f"{path} cannot be read (OSError: it unpacks to more than 3 MB)")):
        FASHION.load(tmp_path / "data")
    assert 3 * 10**6 < sum(unpacked) <= 3 * 10**6 + 2**20  # no more of it was unpacked


class Counted:
    """A file that notes how many bytes were read of it at a time."""

    def __init__(self, file, read):
        self._file, self._read = file, read

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def read(self, size=-1):
        chunk = self._file.read(size)
        self._read.append(len(chunk))
        return chunk
