"""A client's training examples, and the seeded world that it trains in."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from calfat_plugin.datasets import ImageData
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.federation.worker import Shards, shards_of
from tests.host.federation import CPU, experiment

DATA = ImageData(torch.arange(6 * 4, dtype=torch.uint8).reshape(6, 1, 2, 2), torch.tensor([5, 4, 3, 2, 1, 0]))


def test_shards_are_taken_from_the_training_set_when_asked_for() -> None:
    shards = Shards(DATA, [np.array([4, 0]), np.array([1])])
    assert (list(shards), len(shards), [len(shard) for shard in shards.values()]) == ([0, 1], 2, [2, 1])
    assert shards[0].y.tolist() == [1, 5]
    assert torch.equal(shards[0].x, DATA.x[[4, 0]])
    shards[0].x.zero_()  # a copy, so what a client does to its images is its own affair
    assert torch.equal(shards[0].x, DATA.x[[4, 0]])
    for client in (2, -1):
        with pytest.raises(KeyError, match=str(client)):
            shards[client]


def test_the_training_set_is_not_copied_for_the_clients() -> None:
    settings = experiment()
    dataset = settings.load_dataset()
    shards = shards_of(settings, dataset, CPU)
    assert shards._data.x.data_ptr() == dataset.train.x.data_ptr()
    expected = [dataset.train.subset(index) for index in settings.split(dataset.train.y.numpy())]
    assert all(torch.equal(shards[client].x, shard.x) for client, shard in enumerate(expected))
    assert all(torch.equal(shards[client].y, shard.y) for client, shard in enumerate(expected))


def test_a_seeded_world_draws_what_the_generators_own_seeding_draws() -> None:
    def drawn() -> tuple[list[float], float, float]:
        return torch.rand(3).tolist(), np.random.rand(), random.random()

    with seeded_global_rng(7):
        found = drawn()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert found == drawn()


def test_seeding_leaves_nothing_behind_for_devices_that_are_not_in_use() -> None:
    """PyTorch's own seeding of all devices queues calls with tracebacks: milliseconds each, kept until the end."""
    queued = len(torch.cuda._queued_calls)  # type: ignore[attr-defined]
    with seeded_global_rng(7):
        assert len(torch.cuda._queued_calls) == queued  # type: ignore[attr-defined]
