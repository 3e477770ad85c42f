"""Fewer examples and the validation split: what is held back, from whom, and that nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.data import prepared, stratified
from calfat_plugin.experiment.experiment import Experiment
from tests.recipes import assembled

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=300)


@given(LABELS, st.data(), st.integers(0, 2**63 - 1))
def test_a_stratified_choice_keeps_the_share_of_each_class(labels: list[int], data: st.DataObject, seed: int) -> None:
    count = data.draw(st.integers(0, len(labels)))
    chosen = stratified(labels, count, seed)
    assert len(chosen) == count
    assert (np.diff(chosen) > 0).all()
    for label in set(labels):
        exact = labels.count(label) * count / len(labels)
        assert abs(sum(labels[at] == label for at in chosen) - exact) < 1


def test_the_choice_depends_on_the_seed_and_on_nothing_else() -> None:
    # Golden: if it changes, results on fewer examples move.
    assert stratified([0, 1] * 10, 6, 2021).tolist() == [1, 4, 7, 12, 14, 15]
    assert stratified([0, 1] * 10, 6, 2022).tolist() != [1, 4, 7, 12, 14, 15]


def numbered(num_train: int, num_test: int) -> Dataset:
    """A data set whose images are their own numbers, so that each can be recognised wherever it goes."""

    def part(first: int, count: int) -> ImageData:
        x = torch.arange(first, first + count, dtype=torch.float32).div(10_000).reshape(-1, 1, 1, 1)
        return ImageData(x, torch.arange(count) % 3)

    return Dataset("numbered", part(0, num_train), part(num_train, num_test), 3, ("a", "b", "c"))


def ids(data: ImageData | None) -> set[int]:
    return set() if data is None else {round(float(x) * 10_000) for x in data.x.flatten()}


@given(
    st.integers(12, 200),
    st.integers(3, 50),
    st.none() | st.integers(12, 250),
    st.none() | st.integers(3, 60),
    st.floats(0, 0.5),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_no_example_is_in_two_splits(
    num_train: int, num_test: int, max_train: int | None, max_test: int | None, share: float, own: bool, seed: int
) -> None:
    given = numbered(num_train, num_test)
    used = prepared(
        given, max_train=max_train, max_test=max_test, validation_share=share, validate_on_test=own, seed=seed
    )
    train, validation, test = ids(used.train), ids(used.validation), ids(used.test)
    assert not train & validation
    assert not test & (train | validation)
    first, second = (test, train) if own else (train, test)
    source, other = (given.test, given.train) if own else (given.train, given.test)
    limit, other_limit = (max_test, max_train) if own else (max_train, max_test)
    assert first | validation <= ids(source)
    assert len(first) + len(validation) == min(len(source), limit or len(source))
    assert len(second) == min(len(other), other_limit or len(other))
    assert (used.validation is None) == (share == 0)


def test_without_these_keys_nothing_is_copied_or_moved() -> None:
    given = numbered(30, 9)
    used = prepared(given, max_train=None, max_test=9, validation_share=0, validate_on_test=False, seed=1)
    assert used.train is given.train
    assert used.test is given.test
    assert used.monitored is given.test


# --- in a recipe ------------------------------------------------------------------------------------------------------


def experiment(
    *lines: str, dataset: str = "digits", partition: str = "dirichlet", seed: int = 0, options: str = "{}"
) -> Experiment:
    text = f"""
common_args: {{random_seed: {seed}}}
data_args: {{dataset: {dataset}, partition_method: {partition}, {", ".join(lines)}}}
model_args: {{model: cnn_small}}
train_args: {{client_num_in_total: 3}}
calfat: {{trainer: fedpgd, partition: {options}}}
"""
    return assembled(text)


def rows(data: ImageData) -> set[bytes]:
    return {image.numpy().tobytes() for image in data.x}


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet_plain", "iid", "label2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_validation_and_no_test_example_is_in_a_clients_share(partition: str, seed: int) -> None:
    run = experiment("validation_share: 0.2", partition=partition, seed=seed)
    dataset = run.load_dataset()
    assert dataset.validation is not None
    assert len(dataset.validation) == 288  # a fifth of 1,438
    assert (len(dataset.train), len(dataset.test)) == (1150, 359)
    held = rows(dataset.validation) | rows(dataset.test)
    shares = [dataset.train.subset(share) for share in run.split(dataset.train.y.numpy())]
    assert all(not rows(share) & held for share in shares)
    assert (rows(dataset.validation) & rows(dataset.test)) == set()


@pytest.mark.parametrize(("options", "alike"), [("{}", False), ("{seed: 7}", True)])
def test_the_choice_follows_the_seed_of_the_partition(options: str, alike: bool) -> None:
    lines = ("validation_share: 0.2", "max_train_examples: 500", "max_test_examples: 100")
    first, second = (experiment(*lines, seed=seed, options=options).load_dataset() for seed in (0, 1))
    assert (len(first.train), len(first.test)) == (400, 100)
    for name in ("train", "test", "validation"):
        assert torch.equal(getattr(first, name).x, getattr(second, name).x) is alike
