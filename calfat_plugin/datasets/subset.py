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
    counts, remainders = divmod(totals * count, max(1, int(totals.sum())))  # of each class, rounded down
    # What is left goes to the classes with the largest remainders.
    left = count - int(counts.sum())
    counts[(-remainders).argsort(kind="stable")[:left]] += 1
    rng = np.random.RandomState(seed % 2**32)  # its streams never change with numpy's version
    chosen = [np.empty(0, np.int64)]
    for label, count_of_class in zip(ids, counts, strict=True):
        members = np.flatnonzero(array == label)
        chosen.append(rng.permutation(members)[:count_of_class])
    return np.sort(np.concatenate(chosen).astype(np.int64))


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

    count = max(1, round(share * len(data)))
    held = stratified(data.y.numpy(), count, derive_seed(seed, "validation"))
    rest = np.setdiff1d(np.arange(len(data)), held)
    return data.subset(rest), data.subset(held)


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
