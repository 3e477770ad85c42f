"""``train_args``: the learning rate of each round, against PyTorch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from calfat_plugin.recipe.training import TrainArgs

ROUNDS, RATE = 12, 0.3


def of_torch(kind: str, warmup: int) -> list[float]:
    """The learning rate of each round by the schedulers that the recipe's documentation names, stepped once a round."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    following: LRScheduler = {
        "constant": lambda: ConstantLR(optimizer, factor=1.0),
        "step": lambda: StepLR(optimizer, step_size=4, gamma=0.2),
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=ROUNDS - warmup, eta_min=0.01),
    }[kind]()
    schedule = following
    if warmup:
        rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        schedule = SequentialLR(optimizer, [rising, following], milestones=[warmup])
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def of_ours(kind: str, warmup: int) -> list[float]:
    train = TrainArgs(
        comm_round=ROUNDS,
        learning_rate=RATE,
        lr_schedule=kind,
        lr_step_size=4,
        lr_decay_rate=0.2,
        learning_rate_min=0.01,
        warmup_rounds=warmup,
    )
    return [train.learning_rate_of(round) for round in range(1, ROUNDS + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 5, ROUNDS - 1])
@pytest.mark.parametrize("kind", ["constant", "step", "cosine"])
def test_the_rates_are_those_of_pytorchs_schedulers(kind: str, warmup: int) -> None:
    found = of_ours(kind, warmup)
    assert found == pytest.approx(of_torch(kind, warmup), rel=1e-12)
    assert max(found) == found[warmup] == RATE  # the bits of the recipe's number
    assert min(found) > 0


def test_without_a_schedule_the_rate_is_the_recipes_number() -> None:
    plain = TrainArgs(learning_rate=0.1)
    assert {plain.learning_rate_of(round) for round in range(1, 200)} == {0.1}
    assert not plain.has_schedule
    assert TrainArgs(warmup_rounds=1).has_schedule
    assert TrainArgs(lr_schedule="cosine").has_schedule
