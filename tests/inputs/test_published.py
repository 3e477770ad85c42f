"""CIFAR, SVHN and the MNIST twins, on small files in their true formats."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import pytest
import torch

from calfat_plugin.compat import make_torchvision_importable
from calfat_plugin.datasets import Augmentation, Dataset, published
from calfat_plugin.errors import DataError
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
    "cifar10": "cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/ (170 MB) and unpack it in {root}",
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


def test_a_failed_download_says_how_to_do_without(tmp_path, monkeypatch):
    def offline(self):
        raise URLError("no route to host")

    monkeypatch.setattr(theirs.CIFAR10, "download", offline)
    text = (
        "data set cifar10: the download failed (URLError: <urlopen error no route to host>). "
        f"Try again. By hand: Download {SOURCES['cifar10'].format(root=tmp_path)}."
    )
    with pytest.raises(DataError, match=f"^{re.escape(text)}$"):
        published.load_cifar10(tmp_path, download=True)


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
