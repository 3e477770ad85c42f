"""Properties that hold of whole local trainings: real batches, real attacks, real optimiser steps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.interfaces import TrainSettings
from calfat_plugin.results import PASSES
from tests.methods.helpers import (
    TinyNet,
    build_aggregator,
    build_method,
    local_task,
    same_bits,
    tiny_data,
    train,
    watched,
)

few = settings(max_examples=12, deadline=None)


@st.composite
def tasks(draw):
    """A client's round: its data, batch size, epochs, momentum and seed."""
    seed = draw(st.integers(0, 2**31))
    return local_task(
        TinyNet(seed),
        tiny_data(seed, count=draw(st.integers(1, 9))),
        settings=TrainSettings(
            epochs=draw(st.integers(1, 2)),
            batch_size=draw(st.integers(1, 5)),
            learning_rate=0.1,
            momentum=draw(st.sampled_from([0.0, 0.9])),
            weight_decay=draw(st.sampled_from([0.0, 1e-2])),
            num_rounds=10,
        ),
        seed=seed,
        round=draw(st.integers(1, 100)),
        client=draw(st.integers(0, 9)),
    )


def assert_same_training(first, second, task):
    """Bit for bit, each on its own copy of the task's model."""
    model = task.model
    updates = []
    for method, correction in (first, second):
        copy = TinyNet()
        copy.load_state_dict(model.state_dict())
        updates.append(train(method, dataclasses.replace(task, model=copy, correction=correction)))
    assert same_bits(updates[0].state, updates[1].state)
    found = [{name: of for name, of in update.metrics.items() if name != PASSES} for update in updates]
    assert found[0] == found[1]  # though one may pay more for it: a term of weight 0 is computed all the same


def alone(method):
    return method, build_aggregator("fedavg").correction()


@few
@given(tasks())
@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("mixfat", {"ratio": 1.0}, "fedpgd"),
        ("mixfat", {"ratio": 1.0, "sampling": "fixed"}, "fedpgd"),
        ("mixfat", {"ratio": 0.0}, "standard"),
        ("mixfat", {"ratio": 0.0, "sampling": "fixed"}, "standard"),
        ("fedgairat", {"lam": math.inf, "start_round": 1}, "fedpgd"),
        ("fedgairat", {"start_round": 101}, "fedpgd"),
        ("fedtrades", {"beta": 0.0}, "standard"),
        ("fedrbn", {"roles": "at " * 10, "lam": 0.0}, "fedrbn-clean"),
    ],
)
def test_a_method_at_its_limit_is_another_method(name, options, limit, task):
    if limit == "fedrbn-clean":  # no weight on the adversarial loss: shared weights train as an st client's
        standard = build_method("fedrbn", roles="st " * 10 + "at", pnc=0.0)
        copies = [TinyNet() for _ in range(2)]
        for copy in copies:
            copy.load_state_dict(task.model.state_dict())
        first = train(build_method(name, **options), dataclasses.replace(task, model=copies[0]))
        second = train(standard, dataclasses.replace(task, model=copies[1]))
        names = [key for key in first.state if ".noise." not in key]
        assert all(torch.allclose(first.state[key], second.state[key], atol=1e-6) for key in names)
        return
    assert_same_training(alone(build_method(name, **options)), alone(build_method(limit)), task)


@few
@given(tasks())
@pytest.mark.parametrize("loss", ["plain", "calibrated"])
def test_calfat_without_attack_is_calibrated_standard_training(loss, task):
    calfat = build_method("calfat", adv_ratio=0.0, outer="plain" if loss == "plain" else "calibrated")
    assert_same_training(alone(calfat), alone(build_method("standard", loss)), task)


@few
@given(tasks())
def test_a_modifier_that_changes_nothing_leaves_the_training_as_it_is(task):
    plain = alone(build_method("fedpgd"))
    assert_same_training(alone(build_method("fedpgd", "logitadj", {"tau": 0.0})), plain, task)
    assert_same_training(alone(build_method("fedpgd", "fedrs", {"alpha": 1.0})), plain, task)
    assert_same_training(alone(build_method("fedpgd", "gear", {"delta": 0.0})), plain, task)
    assert_same_training(alone(build_method("fedpgd", "fedlc", {"tau": 0.0})), plain, task)


@few
@given(tasks())
@pytest.mark.parametrize(
    ("aggregator", "options"),
    [
        ("fedprox", {"mu": 0.0}),
        ("scaffold", {}),  # in its first round, where all variates are zero
        ("scaffold", {"pairing": "gradient"}),
        ("scaffold", {"variant": "I"}),
        ("sfat", {}),
        ("fedadam", {}),
    ],
)
def test_a_correction_that_is_zero_leaves_the_local_training_as_it_is(aggregator, options, task):
    method = build_method("fedpgd")
    assert_same_training((method, build_aggregator(aggregator, **options).correction()), alone(method), task)


# --- which examples MixFAT attacks ------------------------------------------------------------------------------------


def attacked_examples(sampling, ratio):
    """For each of two rounds, the set of positions in the data that were attacked, and how many in each batch."""
    found = []
    for round in (1, 2):
        batches = []
        method = watched(build_method("mixfat", ratio=ratio, sampling=sampling), batches.append)
        train(method, local_task(data=tiny_data(count=11), round=round))
        where = {int(i) for batch in batches for i in batch.index[batch.attacked]}
        found.append((where, [int(batch.attacked.sum()) for batch in batches]))
    return found


def test_fixed_sampling_attacks_one_split_of_the_data_in_all_rounds():
    (first, _), (second, _) = attacked_examples("fixed", 0.3)
    assert first == second
    assert len(first) == 3  # floor(0.3 * 11)


def test_per_batch_sampling_attacks_a_share_of_every_batch():
    (first, batches), (second, _) = attacked_examples("per_batch", 0.5)
    assert batches == [2, 2, 1]  # floor(0.5 * 4), floor(0.5 * 4), floor(0.5 * 3)
    assert first != second
