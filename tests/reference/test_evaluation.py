"""What a run measures, and on which images, equals plain loops over the test digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from calfat_plugin.results import EvaluationResult
from tests.reference.client import Setting, stream
from tests.reference.models import Tiny
from tests.reference.test_federation import Ran, digits, runs

SEED, EPS, STEP, STEPS, RESTARTS, BATCH = 3, 0.1, 0.01, 1, 5, 25  # short steps: much depends on the start
PGD = {"name": "pgd", "label": "robust", "step_size": STEP, "steps": STEPS, "restarts": RESTARTS}


@pytest.fixture(scope="module")
def ran() -> Ran:
    monitor = {"every": 1, "max_examples": 20, "evaluators": ["natural", PGD]}
    changes = {
        "calfat.monitor": monitor,
        "calfat.evaluators": ["natural", PGD],
        "calfat.evaluation": {"batch_size": BATCH},
        "data_args.partition_method": "iid",  # and many epochs, for a model that is right about many images
        "train_args.epochs": 20,
    }
    return runs(Setting("standard", "fedavg", seed=SEED), changes)


def pgd(net: Tiny, x: Tensor, y: Tensor, round: int, restarts: int) -> tuple[list[bool], list[bool]]:
    """Which images the model gets right clean, and after the last start that attacked them."""
    noise, clean, robust = stream(SEED, "evaluate/robust", round), [], []
    for x_batch, y_batch in zip(x.split(BATCH), y.split(BATCH), strict=True):
        right = torch.ones(len(x_batch), dtype=torch.bool)
        for _ in range(restarts):
            moves = torch.empty_like(x_batch).uniform_(-EPS, EPS, generator=noise)
            for i in range(len(x_batch)):
                if not right[i]:
                    continue  # broken by an earlier start
                image, label = x_batch[i : i + 1], y_batch[i : i + 1]
                point = (image + moves[i]).clamp(0, 1)
                for _ in range(STEPS):
                    point.requires_grad_()
                    (slope,) = torch.autograd.grad(cross_entropy(net(point), label), point)
                    point = (point.detach() + STEP * slope.sign()).clamp(image - EPS, image + EPS).clamp(0, 1)
                right[i] = bool(net(point).argmax() == label)
        clean += (net(x_batch).argmax(1) == y_batch).tolist()
        robust += right.tolist()
    return clean, robust


def check(found: dict[str, EvaluationResult], net: Tiny, x: Tensor, y: Tensor, round: int) -> None:
    clean, robust = pgd(net, x, y, round, RESTARTS)
    n = len(y)
    assert {label: result.num_examples for label, result in found.items()} == {"natural": n, "robust": n}
    assert found["natural"].accuracy == sum(clean) / n
    assert found["robust"].accuracy_release == sum(robust) / n
    assert found["robust"].accuracy == sum(c and r for c, r in zip(clean, robust, strict=True)) / n


def model(ran: Ran, round: int) -> Tiny:
    net = Tiny(1, (8, 8), 10)
    net.load_state_dict(dict(ran.rounds[round - 1][1].global_state))
    return net.eval()


def test_rounds_are_measured_on_the_monitored_images(ran: Ran) -> None:
    test = digits().test
    where = torch.randperm(len(test), generator=stream(0, "monitor subset"))[:20].sort().values
    for record, _ in ran.rounds:
        check(dict(record.evaluations), model(ran, record.round), test.x[where], test.y[where], record.round)


def test_the_final_evaluation_is_on_all_images(ran: Ran) -> None:
    test, net = digits().test, model(ran, 3)
    check({result.label: result for result in ran.evaluations}, net, test.x, test.y, 0)
    once, all_starts = (sum(pgd(net, test.x, test.y, 0, restarts)[1]) for restarts in (1, RESTARTS))
    assert all_starts < once < len(test)  # so that the numbers above depend on the restarts
