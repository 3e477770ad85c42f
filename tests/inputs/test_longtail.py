"""The long-tailed partition: its counts by hand, and what is reported of head, middle and tail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from calfat_plugin.errors import DataError
from calfat_plugin.maths.metrics import Worst, by_frequency
from calfat_plugin.partitions.split import longtail
from calfat_plugin.report.run_tables import tails_table
from calfat_plugin.results import EvaluationResult, evaluation_as_json, evaluator_of
from calfat_plugin.run_files import Results
from calfat_plugin.typed_json import from_json

CIFAR10 = np.repeat(np.arange(10), 5000)
PER_CLASS = (0.9, 0.8, 0.1, 0.7, None)
COUNTS = [[5, 0, 1, 2, 0], [5, 9, 0, 7, 0]]  # together 10, 9, 1, 9, 0


def totals(labels: np.ndarray, imbalance: float, clients: int = 4, seed: int = 0) -> list[int]:
    parts = longtail(labels, clients, alpha=0.5, seed=seed, imbalance=imbalance)
    kept = np.concatenate(parts)
    assert len(np.unique(kept)) == len(kept)
    assert len(parts) == clients
    return np.bincount(labels[kept], minlength=int(labels.max()) + 1).tolist()


def test_the_counts_are_those_of_cifar10_lt() -> None:
    """As published for its factors 100 and 10."""
    assert totals(CIFAR10, 100) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert totals(CIFAR10, 10) == [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]


def test_unequal_classes_give_the_longest_tail_that_all_have() -> None:
    """Shares 1, 1/2, 1/4: the second class has 10, so the first keeps 20 of its 40, and the third 5 of 30."""
    assert totals(np.repeat([0, 1, 2], [40, 10, 30]), 4, clients=2) == [20, 10, 5]
    assert totals(np.repeat([0, 1], [8, 8]), 100, clients=2) == [8, 1]  # one at least
    assert totals(np.repeat([0, 2], [8, 8]), 2, clients=2) == [8, 0, 4]  # a class without examples is none
    assert totals(np.zeros(9, int), 100, clients=2) == [9]
    assert totals(np.repeat([0, 1], [8, 8]), 1, clients=2) == [8, 8]


def test_the_seed_chooses_the_examples() -> None:
    first, same, other = (longtail(CIFAR10, 3, alpha=0.5, seed=seed, imbalance=50) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    rare = [set(np.concatenate(parts)[CIFAR10[np.concatenate(parts)] == 9]) for parts in (first, other)]
    assert rare[0] != rare[1]
    assert rare[0] != set(range(45000, 45100))  # not the first ones
    with pytest.raises(DataError, match=r"at least 1 each of 9 training examples"):  # and too few are no draw
        longtail(np.repeat([0, 1], [8, 8]), 12, alpha=0.5, seed=0, imbalance=100)


def test_a_client_with_its_even_share_gets_more() -> None:
    """Client 2 has 39 of the 70 examples of 40, 20 and 10 after the first class; by numpy alone, step for step."""
    labels = np.repeat(np.arange(3), 40)
    parts = longtail(labels, 3, alpha=0.5, seed=5, imbalance=4)
    counts = [np.bincount(labels[part], minlength=3).tolist() for part in parts]
    assert counts == [[0, 2, 5], [1, 13, 4], [39, 5, 1]]


def test_head_middle_and_tail_by_hand() -> None:
    """Order 0, 1, 3, 2, 4 (1 before 3, its equal), in groups of 2, 2, 1; nobody knows class 4."""
    head, middle, tail = by_frequency(PER_CLASS, COUNTS)
    assert head == Worst(pytest.approx(0.85), (0, 1))
    assert middle == Worst(pytest.approx(0.4), (3, 2))
    assert tail is None
    sizes = [len(part.ids) for part in by_frequency([0.5] * 10, [list(range(10))]) if part is not None]
    assert sizes == [4, 3, 3]
    assert by_frequency([0.5] * 4, [[4, 3, 2, 1]])[2] == Worst(0.5, (3,))
    assert by_frequency(PER_CLASS, []) == by_frequency(PER_CLASS, [[1, 2]]) == (None, None, None)


def test_results_have_them_where_the_partition_is_long_tailed(tmp_path: Path) -> None:
    plain = EvaluationResult("pgd20", 10, 0.5, 0.5, PER_CLASS, PER_CLASS, {}, "calfat", 1.0)
    found = plain.with_worst_clients(COUNTS, long_tailed=True)
    written = json.loads(json.dumps(evaluation_as_json(found)))
    assert from_json(EvaluationResult, written) == found
    assert written["middle"] == {"accuracy": pytest.approx(0.4), "ids": [3, 2]}
    assert "tail" not in written
    assert not {"head", "middle", "tail"} & evaluation_as_json(plain.with_worst_clients(COUNTS)).keys()
    results = from_json(Results, {"evaluations": [written]})
    assert results.value("pgd20:head") == pytest.approx(0.85)
    assert results.value("pgd20:tail") is None
    assert evaluator_of("pgd20:tail") == "pgd20"
    (row,) = tails_table([found]).cells
    assert [(cell.text, *cell.beside) for cell in row] == [("pgd20",), ("85.00", "0, 1"), ("40.00", "3, 2"), ("",)]
