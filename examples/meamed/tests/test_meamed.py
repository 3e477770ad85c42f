"""What every aggregator must keep, and what this one promises beside it."""

from __future__ import annotations

from typing import Any

import meamed
import pytest
import torch

from calfat_plugin import AggregationTask, AggregatorEntry, LocalUpdate
from calfat_plugin.testing import builtin_registry, check_aggregator

REGISTRY = builtin_registry(meamed)


@pytest.mark.parametrize("options", [{}, {"beta": 0}, {"beta": 0.4}])
def test_it_keeps_the_contract(options: dict[str, Any]) -> None:
    check_aggregator("meamed", registry=REGISTRY, **options)


def combined(values: list[list[float]], **options: float) -> list[float]:
    """The global model of one tensor that comes of these clients' tensors."""
    entry, _ = REGISTRY.find(AggregatorEntry, "meamed")
    updates = {client: LocalUpdate({"w": torch.tensor(value)}, 1) for client, value in enumerate(values)}
    start = {"w": torch.zeros(len(values[0]))}
    task = AggregationTask(start, updates, {}, ["w"], num_clients=len(values), round=1)
    found: list[float] = entry.load()(entry.config(**options)).combine(task).state["w"].tolist()
    return found


CLIENTS = [[1.0, 50.0], [2.0, 10.0], [3.0, 20.0], [4.0, 30.0], [100.0, 40.0]]


def test_each_coordinate_leaves_out_the_value_furthest_from_its_median() -> None:
    assert combined(CLIENTS, beta=0.2) == [2.5, 35.0]  # without 100; without 10, of the two at the same distance
    assert combined(CLIENTS, beta=0.19) == [22.0, 30.0]  # floor(0.95) = 0: the plain mean


def test_of_one_client_it_is_the_model() -> None:
    assert combined(CLIENTS[:1]) == [1.0, 50.0]


def test_one_wrong_client_moves_nothing_beyond_the_others() -> None:
    for wrong in (1e30, -1e30):
        first, second = combined([*CLIENTS[:4], [wrong, wrong]])
        assert 1 <= first <= 4
        assert 10 <= second <= 50
