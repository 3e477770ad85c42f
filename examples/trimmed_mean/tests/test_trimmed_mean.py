"""What every aggregator must keep, and what these two promise beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trimmed_mean

from calfat_plugin import AggregationTask, AggregatorEntry, LocalUpdate
from calfat_plugin.testing import builtin_registry, check_aggregator

REGISTRY = builtin_registry(trimmed_mean)


@pytest.mark.parametrize(("name", "options"), [("trimmed-mean", {}), ("trimmed-mean", {"beta": 0}), ("median", {})])
def test_it_keeps_the_contract(name: str, options: dict[str, Any]) -> None:
    check_aggregator(name, registry=REGISTRY, **options)


def combined(name: str, values: list[list[float]], **options: float) -> list[float]:
    """The global model of one tensor that comes of these clients' tensors."""
    entry, _ = REGISTRY.find(AggregatorEntry, name)
    updates = {client: LocalUpdate({"w": torch.tensor(value)}, 1) for client, value in enumerate(values)}
    start = {"w": torch.zeros(len(values[0]))}
    task = AggregationTask(start, updates, {}, ["w"], num_clients=len(values), round=1)
    found: list[float] = entry.load()(entry.config(**options)).combine(task).state["w"].tolist()
    return found


CLIENTS = [[1.0, 50.0], [2.0, 10.0], [3.0, 20.0], [4.0, 30.0], [100.0, 40.0]]


def test_each_coordinate_leaves_out_its_own_extremes() -> None:
    assert combined("trimmed-mean", CLIENTS, beta=0.2) == [3.0, 30.0]  # (2 + 3 + 4) / 3, (20 + 30 + 40) / 3
    assert combined("trimmed-mean", CLIENTS, beta=0.19) == [22.0, 30.0]  # floor(0.95) = 0: the plain mean
    assert combined("trimmed-mean", CLIENTS[:4], beta=0.25) == [2.5, 25.0]


def test_the_median_of_an_odd_and_of_an_even_number() -> None:
    assert combined("median", CLIENTS) == [3.0, 30.0]
    assert combined("median", CLIENTS[:4]) == [2.5, 25.0]
    assert combined("median", CLIENTS[:1]) == [1.0, 50.0]


@pytest.mark.parametrize("name", ["trimmed-mean", "median"])
def test_one_wrong_client_moves_nothing_beyond_the_others(name: str) -> None:
    for wrong in (1e30, -1e30):
        first, second = combined(name, [*CLIENTS[:4], [wrong, wrong]])
        assert 1 <= first <= 4
        assert 10 <= second <= 50
