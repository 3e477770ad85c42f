"""The embedded default: scikit-learn's bundled handwritten digits, real data, no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calfat_plugin.datasets.data import Dataset, ImageData
from calfat_plugin.errors import DataError

_SPLIT_SEED = 1797  # fixed, whatever the seed of a run: the test set must not depend on it


def load_digits(root: Path | None = None) -> Dataset:
    """The optical digits of Alpaydin and Kaynak (1998) that scikit-learn ships, which needs no ``root``.

    1,797 images of 1x8x8, grey levels 0..16 divided by 16, float32. scikit-learn knows no split, so
    a fixed fifth of every class is the test set: 1,438 to train, 359 to test. Not augmented.
    """
    table = _table()
    labels = table[:, -1].astype(np.int64)
    everything = ImageData((table[:, :-1].astype(np.float32) / 16).reshape(-1, 1, 8, 8), labels)
    rng = np.random.RandomState(_SPLIT_SEED)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(len(members) * 0.2)]] = True
    train = everything.subset(np.flatnonzero(~is_test))
    test = everything.subset(np.flatnonzero(is_test))
    return Dataset("digits", train, test, 10)


def _table() -> npt.NDArray[np.float64]:
    """(1797, 65): 64 pixels and the label, of the file in scikit-learn's package, whose import takes a second."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    raise DataError("digits: scikit-learn's package has no datasets/data/digits.csv.gz. Install scikit-learn again.")
