"""CIFAR, SVHN and the MNIST twins, on small files in their true formats."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import pytest
import torch

from calfat_plugin.cli.doctor import check_data
from calfat_plugin.compat import make_torchvision_importable
from calfat_plugin.datasets import Augmentation, Dataset, files, published
from calfat_plugin.errors import DataError
from tests.cli.runner import Ended, calfat
from tests.inputs import on_disk

make_torchvision_importable()
import torchvision.datasets as theirs  # noqa: E402  (the line above makes it importable)


class Case(NamedTuple):
    name: str
    load: Callable[..., Dataset]
    write: Callable[..., on_disk.Written]
    shape: tuple[int, int, int]
    num_classes: int
    augment: Augmentation
    damaged: str  # a file to damage, below the root

    def __repr__(self) -> str:
        return self.name


NONE, CIFAR = Augmentation(), Augmentation(crop_padding=4, flip=True)
CASES = [
    Case(
        "cifar10",
        published.load_cifar10,
        on_disk.write_cifar10,
        (3, 32, 32),
        10,
        CIFAR,
        "cifar-10-batches-py/data_batch_3",
    ),
    Case(
        "cifar100",
        published.load_cifar100,
        on_disk.write_cifar100,
        (3, 32, 32),
        100,
        CIFAR,
        "cifar-100-python/test",
    ),
    Case(
        "svhn",
        published.load_svhn,
        on_disk.write_svhn,
        (3, 32, 32),
        10,
        NONE,
        "test_32x32.mat",
    ),
    Case(
        "mnist",
        published.load_mnist,
        on_disk.write_mnist,
        (1, 28, 28),
        10,
        NONE,
        "MNIST/raw/t10k-images-idx3-ubyte",
    ),
    Case(
        "fmnist",
        published.load_fmnist,
        on_disk.write_fmnist,
        (1, 28, 28),
        10,
        NONE,
        "FashionMNIST/raw/train-labels-idx1-ubyte",
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=repr)

SOURCES = {
    "cifar10": "cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/ (170 MB) and unpack it in {root}, "
    "or 'npm pack convnetjs@0.1.4' and put package/demo/cifar10 of it in {root}/cifar-10-batches-py",
    "cifar100": "cifar-100-python.tar.gz from https://www.cs.toronto.edu/~kriz/ (169 MB) and unpack it in {root}",
    "svhn": "train_32x32.mat, test_32x32.mat from http://ufldl.stanford.edu/housenumbers/ "
    "(246 MB) and put them in {root}",
    "mnist": "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, "
    "t10k-labels-idx1-ubyte.gz from https://ossci-datasets.s3.amazonaws.com/mnist/ (12 MB) "
    "and put them in {root}/MNIST/raw",
    "fmnist": "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, "
    "t10k-labels-idx1-ubyte.gz from "
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/ (31 MB) "
    "and put them in {root}/FashionMNIST/raw",
}
LOOKED_IN = {
    "cifar10": "{root}/cifar-10-batches-py or {root}/cifar10/cifar-10-batches-py",
    "cifar100": "{root}/cifar-100-python or {root}/cifar100/cifar-100-python",
    "svhn": "{root} or {root}/svhn",
    "mnist": "{root}/MNIST/raw or {root}/mnist/MNIST/raw or {root}/mnist or {root}",
    "fmnist": "{root}/FashionMNIST/raw or {root}/fmnist/FashionMNIST/raw or {root}/fmnist or {root} "
    "or {system}/datasets/fashion-mnist",
}
FIRST_FILE = {
    "cifar10": "cifar-10-batches-py/data_batch_1",
    "cifar100": "cifar-100-python/train",
    "svhn": "train_32x32.mat",
    "mnist": "MNIST/raw/train-images-idx3-ubyte",
    "fmnist": "FashionMNIST/raw/train-images-idx3-ubyte",
}


BY_PACKAGE = {"fmnist": "On Debian and Ubuntu: apt-get install dataset-fashion-mnist. Elsewhere: "}


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of a system with no data set: this one may have Debian's package."""
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "system"))
    return tmp_path / "system"


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def expect_checksums_of(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchvision (and our table for idx files) expect the small files that lie below root."""
    if case.name.startswith("cifar"):
        cls = theirs.CIFAR10 if case.name == "cifar10" else theirs.CIFAR100
        folder = root / cls.base_folder
        for attribute in ("train_list", "test_list"):
            listed = [[file, md5(folder / file)] for file, _ in getattr(cls, attribute)]
            monkeypatch.setattr(cls, attribute, listed)
        meta = cls.meta["filename"]
        monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": md5(folder / meta)})
    elif case.name == "svhn":
        splits = {
            split: [url, file, md5(root / file)]
            for split, (url, file, _) in theirs.SVHN.split_list.items()
            if split != "extra"
        }
        monkeypatch.setattr(theirs.SVHN, "split_list", splits)
    else:
        raw = next(root.glob("*/raw"))
        table = {file: md5(raw / file) for file in published._IDX_MD5[case.name]}
        monkeypatch.setitem(published._IDX_MD5, case.name, table)


@every_case
def test_small_files_in_the_true_format_are_read_whole(case, tmp_path):
    wrote = case.write(tmp_path)
    data = case.load(tmp_path, verify=False)
    assert data.name == case.name
    assert data.num_classes == len(data.class_names) == case.num_classes
    assert data.augment == case.augment
    for split, x, y in (
        (data.train, wrote.x_train, wrote.y_train),
        (data.test, wrote.x_test, wrote.y_test),
    ):
        assert split.x.dtype == torch.uint8
        assert split.x.shape[1:] == case.shape
        assert split.x.is_contiguous()
        assert np.array_equal(split.x.numpy(), x)
        assert np.array_equal(split.y.numpy(), y)


@every_case
def test_the_right_checksums_are_accepted(case, tmp_path, monkeypatch):
    wrote = case.write(tmp_path)
    expect_checksums_of(case, tmp_path, monkeypatch)
    assert len(case.load(tmp_path).train) == len(wrote.y_train)


@every_case
def test_the_data_set_may_lie_in_a_folder_of_its_name(case, tmp_path):
    wrote = case.write(tmp_path / case.name)
    assert len(case.load(tmp_path, verify=False).test) == len(wrote.y_test)


@every_case
def test_a_changed_byte_is_refused_by_file_name(case, tmp_path, monkeypatch):
    case.write(tmp_path)
    expect_checksums_of(case, tmp_path, monkeypatch)
    path = tmp_path / case.damaged
    before = md5(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    text = (
        f"data set {case.name}: {path} is corrupt: its MD5 is {md5(path)}, the published one "
        f"{before}. Delete it and run again with --download "
        "(recipe key calfat.dataset.download: true). "
        f"By hand: Download {SOURCES[case.name].format(root=tmp_path)}."
    )
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
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
def test_a_missing_data_set_says_what_to_get_from_where_and_how_large(case, verify, tmp_path, system):
    text = (
        f"data set {case.name}: {tmp_path / FIRST_FILE[case.name]} is missing "
        f"(looked in {LOOKED_IN[case.name]}). {BY_PACKAGE.get(case.name, '')}Download {SOURCES[case.name]}, "
        "or run again with --download (recipe key calfat.dataset.download: true)."
    ).format(root=tmp_path, system=system)
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
        case.load(tmp_path, verify=verify)


def test_one_missing_file_among_others_is_named(tmp_path):
    on_disk.write_cifar10(tmp_path / "cifar10")
    lost = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_4"
    lost.unlink()
    with pytest.raises(DataError, match=re.escape(f"data set cifar10: {lost} is missing")):
        published.load_cifar10(tmp_path, verify=False)


THEIR_CLASS = {
    "cifar10": theirs.CIFAR10,
    "cifar100": theirs.CIFAR100,
    "svhn": theirs.SVHN,
    "mnist": theirs.MNIST,
    "fmnist": theirs.FashionMNIST,
}


@every_case
def test_download_lets_torchvision_fetch_what_is_missing(case, tmp_path, monkeypatch):
    expected = tmp_path / "elsewhere"
    wrote = case.write(expected)
    expect_checksums_of(case, expected, monkeypatch)
    fetched = []

    def download(self):
        fetched.append(Path(self.root))
        for path in expected.rglob("*"):
            if path.is_file():
                target = Path(self.root) / path.relative_to(expected)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())

    monkeypatch.setattr(THEIR_CLASS[case.name], "download", download)
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
        (None, "npm is not installed"),
        ("echo 'npm error code E404' >&2; exit 1", "'npm pack convnetjs@0.1.4' failed: npm error code E404"),
        ("exit 3", "'npm pack convnetjs@0.1.4' failed: exit code 3"),
        (
            'mkdir -p package/demo; tar czf "$5/convnetjs-0.1.4.tgz" package',
            "convnetjs@0.1.4 has no file package/demo/cifar10/data_batch_1",
        ),
        ('echo no archive > "$5/convnetjs-0.1.4.tgz"', "not a gzip file"),
        (
            "mkdir -p package/demo/cifar10; head -c 3000000 /dev/zero > package/demo/cifar10/data_batch_1; "
            'tar czf "$5/convnetjs-0.1.4.tgz" package',
            "it unpacks to more than 2 MB",
        ),
        ("exit 0", r"\[Errno 2\] No such file or directory: .*"),
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
    start = "data set cifar10: the download failed (URLError: <urlopen error no route to host>; from the npm registry: "
    end = f"). Try again. By hand: Download {SOURCES['cifar10'].format(root=root)}."
    problem = problem if problem.endswith(".*") else re.escape(problem)
    with pytest.raises(DataError, match=f"(?s)^{re.escape(start)}{problem}{re.escape(end)}$"):
        published.load_cifar10(root, download=True)
    assert list((root / "cifar-10-batches-py").iterdir() if root.exists() else ()) == []


@pytest.mark.usefixtures("_offline")
def test_cifar10_comes_from_npm_where_its_site_cannot_be_reached(tmp_path, monkeypatch):
    """What was damaged is replaced; nothing else of the package is kept; the sums are checked."""
    monkeypatch.chdir(tmp_path)
    case = next(each for each in CASES if each.name == "cifar10")
    on_disk.write_cifar10(tmp_path / "genuine")
    expect_checksums_of(case, tmp_path / "genuine", monkeypatch)
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


def test_the_binary_layout_is_the_same_data_set(tmp_path):
    for root, write in (
        (tmp_path / "binary", on_disk.write_binary_cifar10),
        (tmp_path / "pickles", on_disk.write_cifar10),
    ):
        write(root)
    binary, pickles = (published.load_cifar10(tmp_path / name, verify=False) for name in ("binary", "pickles"))
    for one, other in ((binary.train, pickles.train), (binary.test, pickles.test)):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
    assert (binary.name, binary.class_names, binary.augment) == (pickles.name, pickles.class_names, pickles.augment)


def test_a_damaged_file_of_the_binary_layout_is_named(tmp_path):
    on_disk.write_binary_cifar10(tmp_path / "cifar10")
    damaged = tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_2.bin"
    with pytest.raises(DataError, match=re.escape("data_batch_1.bin is corrupt: its MD5 is ")):
        published.load_cifar10(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    text = f"data set cifar10: {damaged} cannot be read (ValueError: "
    with pytest.raises(DataError, match=f"^{re.escape(text)}"):
        published.load_cifar10(tmp_path, verify=False)


def test_the_binary_layout_is_there_for_doctor_and_download(tmp_path, monkeypatch):
    on_disk.write_binary_cifar10(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    assert f"cifar10 in {folder}" in check_data(tmp_path).found
    sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setattr(published, "_BINARY_CIFAR10_MD5", sums)
    said = f"cifar10: {folder} has all 7 files, their MD5 sums are right.\n"
    assert calfat("download", "cifar10", "--to", str(tmp_path)) == Ended(0, said, "")


def test_what_is_not_read_compressed_is_missing_where_it_is_only_there_so(tmp_path):
    on_disk.write_cifar10(tmp_path)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    file.rename(file.with_name("data_batch_2.gz"))
    with pytest.raises(DataError, match=f"^data set cifar10: {file} is missing "):
        published.load_cifar10(tmp_path, verify=False)


def test_the_pickles_come_first(tmp_path):
    on_disk.write_binary_cifar10(tmp_path, seed=1)
    pickles = on_disk.write_cifar10(tmp_path)
    assert published.load_cifar10(tmp_path, verify=False).train.y.tolist() == pickles.y_train.tolist()
    assert torch.equal(published.load_cifar10(tmp_path, verify=False).test.x, torch.from_numpy(pickles.x_test))


def test_the_command_checks_what_it_brought(tmp_path, monkeypatch):
    root = tmp_path / "data"
    case = next(each for each in CASES if each.name == "fmnist")
    case.write(root)
    expect_checksums_of(case, root, monkeypatch)
    where = root / "FashionMNIST" / "raw"
    said = f"fmnist: {where} has all 4 files, their MD5 sums are right.\n"
    assert calfat("download", "fmnist", "--to", str(root)) == Ended(0, said, "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cifar", "Did you mean 'cifar10'?"), ("digits", "Data sets: cifar10, cifar100, fmnist, mnist, svhn.")],
)
def test_the_command_names_what_it_can_bring(name, hint):
    ended = calfat("download", name)
    assert ended == Ended(2, "", f"error: no data set '{name}' is offered for download. {hint}\n")


def test_a_home_directory_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    on_disk.write_svhn(tmp_path / "data")
    assert len(published.load_svhn(Path("~/data"), verify=False).test) == 20


def test_labels_outside_the_classes_are_refused(tmp_path):
    on_disk.write_fmnist(tmp_path)
    path = tmp_path / "FashionMNIST/raw/t10k-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] = 17
    path.write_bytes(content)
    text = "data set fmnist: test labels run from 0 to 17; expected 0 to 9."
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
        published.load_fmnist(tmp_path, verify=False)


# --- compressed files, and Debian's package ---------------------------------------------------------------------------


def compressed(folder: Path, into: Path) -> None:
    """The files of ``folder``, compressed in a flat folder, as publishers and Debian's package have them."""
    into.mkdir(parents=True)
    for path in folder.iterdir():
        with gzip.open(into / f"{path.name}.gz", "wb") as file:
            file.write(path.read_bytes())


FASHION = next(case for case in CASES if case.name == "fmnist")


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
    assert np.array_equal(FASHION.load(tmp_path / "mine", verify=False).train.x.numpy(), mine.x_train)  # first


def test_a_damaged_package_is_installed_again(tmp_path, system, monkeypatch):
    FASHION.write(tmp_path / "plain")
    expect_checksums_of(FASHION, tmp_path / "plain", monkeypatch)
    folder = system / "datasets/fashion-mnist"
    FASHION.write(tmp_path / "other", seed=1)
    compressed(tmp_path / "other/FashionMNIST/raw", folder)
    found, expected = (md5(tmp_path / of / "FashionMNIST/raw/train-images-idx3-ubyte") for of in ("other", "plain"))
    text = (
        f"data set fmnist: {folder / 'train-images-idx3-ubyte.gz'} is corrupt: its MD5 is {found}, the published one "
        f"{expected}. Install it again: apt-get install --reinstall dataset-fashion-mnist."
    )
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
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


@pytest.mark.parametrize("verify", [True, False])
def test_a_compressed_file_that_grows_without_end_is_given_up(verify, tmp_path, monkeypatch):
    FASHION.write(tmp_path / "plain")
    compressed(tmp_path / "plain/FashionMNIST/raw", tmp_path / "data")
    path = tmp_path / "data/train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(6 * 2**20)))
    monkeypatch.setattr(files, "MOST_UNPACKED", 3 * 10**6)
    unpacked = []
    monkeypatch.setattr(files.gzip, "open", lambda path: Counted(gzip.GzipFile(path), unpacked))
    text = (
        f"data set fmnist: {path} cannot be read (OSError: it unpacks to more than 3 MB). It is damaged or not in "
        "the expected format; replace it."
    )
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
        FASHION.load(tmp_path / "data", verify=verify)
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


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="Debian's package dataset-fashion-mnist is not here"
)
def test_the_real_fashion_mnist_of_debian(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_DATA_DIRS")
    data = published.load_fmnist(tmp_path)
    assert (tuple(data.train.x.shape), tuple(data.test.x.shape)) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert data.train.y.bincount().tolist() == [6000] * 10
    assert data.class_names[0] == "T-shirt/top"
    assert round(data.train.x.float().mean().item() / 255, 4) == 0.286  # as its users normalise with
