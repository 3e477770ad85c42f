from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.errors import DataError
from calfat_plugin.partitions.entries import ENTRIES
from calfat_plugin.partitions.split import dirichlet, dirichlet_plain, iid, label_shards, longtail, silo
from calfat_plugin.testing.tiny import numpy_state

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
SVHN = np.repeat(np.arange(10), [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659])


def counts(labels: np.ndarray, parts: list[np.ndarray]) -> list[list[int]]:
    return [np.bincount(labels[part], minlength=int(labels.max()) + 1).tolist() for part in parts]


def sizes(parts: list[np.ndarray]) -> list[int]:
    return [len(part) for part in parts]


def test_the_release_partition_of_cifar10_at_seed_2021():
    """Whatever the order of the data, and they and numpy's global generator stay as they are."""
    before, labels = numpy_state(), CIFAR10.copy()
    parts = dirichlet(labels, 5, alpha=0.1, seed=2021)
    assert np.array_equal(labels, CIFAR10)
    assert numpy_state() == before
    shuffled = np.random.RandomState(7).permutation(CIFAR10)
    again = dirichlet(shuffled, 5, alpha=0.1, seed=2021)
    assert (
        counts(shuffled, again)
        == counts(CIFAR10, parts)
        == [
            [1117, 30, 0, 5, 0, 1, 302, 16, 2028, 919],
            [1, 4518, 304, 4793, 0, 0, 4693, 0, 0, 0],
            [3730, 74, 0, 0, 0, 2903, 0, 2636, 2969, 0],
            [151, 378, 1, 29, 0, 483, 5, 2348, 3, 4081],
            [1, 0, 4695, 173, 5000, 1613, 0, 0, 0, 0],
        ]
    )


def test_the_plain_partition_of_cifar10_at_seed_2021():
    parts = dirichlet_plain(CIFAR10, 5, alpha=0.1, seed=2021)
    assert counts(CIFAR10, parts) == [
        [1117, 30, 0, 5, 0, 1, 301, 6, 1995, 36],
        [1, 4518, 304, 4793, 0, 0, 4690, 0, 54, 4685],
        [3730, 74, 0, 0, 0, 2903, 0, 1052, 2921, 34],
        [151, 377, 1, 29, 0, 483, 5, 936, 3, 161],
        [1, 1, 4695, 173, 5000, 1613, 4, 3006, 27, 84],
    ]
    assert sizes(parts) == [3491, 19045, 10714, 2146, 14604]


@pytest.mark.parametrize(
    ("labels", "alpha", "expected"),
    [
        pytest.param(CIFAR10, 0.1, [4418, 14309, 12312, 7479, 11482], id="cifar10"),
        pytest.param(SVHN, 0.1, [16758, 17882, 14401, 17432, 6784], id="svhn"),
        pytest.param(CIFAR100, 0.1, [10218, 10025, 9543, 10017, 10197], id="cifar100"),
        pytest.param(CIFAR10, 0.05, [2263, 14956, 12835, 7157, 12789], id="cifar10-0.05"),
        pytest.param(CIFAR10, 0.2, [6545, 12375, 9980, 9777, 11323], id="cifar10-0.2"),
        pytest.param(CIFAR10, 0.3, [11878, 10095, 10717, 10020, 7290], id="cifar10-0.3"),
    ],
)
def test_release_totals_at_seed_2021(labels, alpha, expected):
    assert sizes(dirichlet(labels, 5, alpha=alpha, seed=2021)) == expected


@pytest.mark.parametrize(("num_clients", "smallest", "largest"), [(20, 168, 4741), (50, 10, 3746), (100, 13, 2409)])
def test_release_extremes_with_many_clients(num_clients, smallest, largest):
    """A hundred clients need five tries, so this also pins that tries do not reseed."""
    found = sizes(dirichlet(CIFAR10, num_clients, alpha=0.1, seed=2021))
    assert (min(found), max(found)) == (smallest, largest)


PARTITIONS: list[Callable[..., list[np.ndarray]]] = [
    lambda labels, m, seed: dirichlet(labels, m, alpha=0.5, seed=seed, min_size=1),
    lambda labels, m, seed: dirichlet_plain(labels, m, alpha=0.5, seed=seed),
    lambda labels, m, seed: iid(labels, m, seed=seed),
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=["dirichlet", "dirichlet_plain", "iid"])
@given(
    labels=st.lists(st.integers(0, 5), min_size=40, max_size=120),
    num_clients=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_every_example_goes_to_one_client_and_a_seed_means_one_partition(partition, labels, num_clients, seed):
    parts = partition(labels, num_clients, seed)
    assert len(parts) == num_clients
    assert min(sizes(parts)) >= 1
    assert all(part.dtype == np.int64 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    again = partition(labels, num_clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_balancing_stops_a_client_at_its_even_share():
    """No client can hold more than its share and one class; without balancing one holds all."""
    labels = np.repeat(np.arange(10), 100)
    balanced = sizes(dirichlet(labels, 2, alpha=0.05, seed=1))
    plain = sizes(dirichlet_plain(labels, 2, alpha=0.05, seed=1))
    assert max(balanced) <= 500 + 100
    assert max(plain) > max(balanced)


def test_label_shards_give_each_client_k_shards_and_leave_the_remainder_out():
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(10), 100))[:-7]
    parts = label_shards(labels, 5, k=2, seed=4)
    assert sizes(parts) == [198] * 5  # 993 // 10 = 99 to a shard
    dealt = np.concatenate(parts)
    assert len(set(dealt.tolist())) == 990
    assert all(sum(count > 0 for count in row) <= 4 for row in counts(labels, parts))
    first, second = parts[0][:99], parts[0][99:]
    assert all(np.all(np.diff(labels[shard]) >= 0) for shard in (first, second))
    for shard in label_shards(labels, 10, k=1, seed=0):  # of one class, in the order that they had
        assert all(np.all(np.diff(shard[labels[shard] == label]) > 0) for label in range(10))


def test_limits_are_allowed():
    once = dirichlet(CIFAR10, 5, alpha=5.0, seed=2**32 - 1, min_size=0, max_tries=1)
    assert sizes(once) == sizes(dirichlet(CIFAR10, 5, alpha=5.0, seed=2**32 - 1))
    assert sizes(iid([0, 1, 2], 3, seed=0)) == [1, 1, 1]
    assert sizes(iid(np.zeros(11, dtype=int), 4, seed=0)) == [3, 3, 3, 2]
    assert [part.tolist() for part in iid([7], 1, seed=0)] == [[0]]
    assert min(sizes(dirichlet_plain([0, 1] * 50, 2, alpha=0.3, seed=0, min_size=45))) >= 45


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_functions_and_options_have_the_same_defaults(entry):
    defaults = {name: info.default for name, info in inspect.signature(entry.load()).parameters.items()}
    options = {field.name: field.default for field in dataclasses.fields(entry.config)}
    shared = (defaults.keys() & options.keys()) - {"seed", "k"}  # which the functions ask for
    assert shared == (defaults.keys() - {"seed", "k"}) & {"min_size", "max_tries", "imbalance"}
    assert {name: defaults[name] for name in shared} == {name: options[name] for name in shared}


ERRORS = [
    lambda: dirichlet_plain([0, 1] * 50, 5, alpha=1e-9, seed=0, max_tries=2),
    lambda: silo(CIFAR10, 5),
    lambda: iid([], 1, seed=0),
    lambda: iid([0, 1, 0], 4, seed=0),
    lambda: dirichlet([0, 1] * 20, 5, alpha=1.0, seed=0),
    lambda: dirichlet(CIFAR10, 100, alpha=0.05, seed=2021, max_tries=20),
    lambda: label_shards([0, 1, 2], 2, k=2, seed=0),
    lambda: longtail(CIFAR10, 5, alpha=1e-9, seed=0, max_tries=2),
    lambda: longtail([0, 1] * 8, 12, alpha=0.5, seed=0),
]


@pytest.mark.parametrize("call", ERRORS)
def test_what_cannot_be_partitioned_is_refused_with_a_way_out(call, snapshot):
    with snapshot.raises(DataError):
        call()


def test_a_client_that_holds_exactly_its_even_share_gets_no_more() -> None:
    """With so small an alpha a client often gets a whole class, which is the even share of two clients."""
    labels = np.repeat([0, 1], 10)
    filled = 0
    for seed in range(20):
        for part in dirichlet(labels, 2, alpha=0.01, seed=seed, min_size=0):
            if (labels[part] == 0).sum() == 10:
                filled += 1
                assert len(part) == 10
    assert filled > 0
