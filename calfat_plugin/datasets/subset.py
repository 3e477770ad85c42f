"""Smaller data sets, and a validation split: fixed choices that keep the share of each class."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calfat_plugin.datasets.data import Dataset, ImageData
from calfat_plugin.seeds import derive_seed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def stratified(labels: npt.ArrayLike, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Choose ``count`` of N examples, (count,) ascending positions; of each class the same share, to within one."""
    import numpy as np  # here, not above: recipes are checked without numpy

    array = np.asarray(labels)
    ids, totals = np.unique(array, return_counts=True)
    wanted, remainders = divmod(totals * count, max(1, int(totals.sum())))  # rounded down
    wanted[(-remainders).argsort(kind="stable")[: count - int(wanted.sum())]] += 1
    rng = np.random.RandomState(seed % 2**32)  # its streams never change with numpy's version
    chosen = [rng.permutation(np.flatnonzero(array == label))[:n] for label, n in zip(ids, wanted, strict=True)]
    return np.sort(np.concatenate([*chosen, np.empty(0, np.int64)]).astype(np.int64))


def at_most(data: ImageData, limit: int | None, seed: int, purpose: str) -> ImageData:
    """``data``, or a stratified choice of ``limit`` examples where there are more."""
    if limit is None or limit >= len(data):
        return data
    return data.subset(stratified(data.y.numpy(), limit, derive_seed(seed, purpose)))


def without_validation(data: ImageData, share: float, seed: int) -> tuple[ImageData, ImageData | None]:
    """(the rest, the validation split): a stratified ``share``, at least one example; None for a share of 0."""
    if not share:
        return data, None
    import numpy as np

    held = stratified(data.y.numpy(), max(1, round(share * len(data))), derive_seed(seed, "validation"))
    return data.subset(np.setdiff1d(np.arange(len(data)), held)), data.subset(held)


def prepared(
    dataset: Dataset,
    *,
    max_train: int | None,
    max_test: int | None,
    validation_share: float,
    validate_on_test: bool,
    seed: int,
) -> Dataset:
    """The data set that a run uses: at most so many examples, the validation split (a share, 0 .. 0.5) among them."""
    train = at_most(dataset.train, max_train, seed, "train examples")
    test = at_most(dataset.test, max_test, seed, "test examples")
    if validate_on_test:
        test, validation = without_validation(test, validation_share, seed)
    else:
        train, validation = without_validation(train, validation_share, seed)
    return dataclasses.replace(dataset, train=train, test=test, validation=validation)
