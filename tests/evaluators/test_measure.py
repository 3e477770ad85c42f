"""What is checked around every evaluator: the model before, the budget within, the model and the result after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import BudgetError, ModelError, PluginError
from calfat_plugin.evaluators.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.base import AttackEvaluator, counts_of
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import _FirstExamples, measure
from calfat_plugin.evaluators.natural import Natural
from calfat_plugin.evaluators.subattacks import SubAttacks
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.maths.passes import PROBED
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import ThreatModel
from tests.evaluators.tasks import task_of
from tests.snapshot import TextSnapshot

EPS = 0.1


class Linear(nn.Module):
    """A classifier of 2x2 images into 3 classes, with everything that can go wrong in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(()))
        with torch.no_grad():
            self.last.weight.copy_(torch.arange(12.0).view(3, 4).sin())
            self.last.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(x.flatten(1))) * self.scale


DATA = ImageData(torch.linspace(0, 1, 32).view(8, 1, 2, 2).flip(0).contiguous(), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))


def run(
    evaluator: Evaluator, model: nn.Module | None = None, data: ImageData = DATA, **changes: Any
) -> EvaluationResult:
    values: dict[str, Any] = {
        "num_classes": 3,
        "threat": ThreatModel(eps=EPS, step_size=0.02),
        "batch_size": 3,
        "device": torch.device("cpu"),
        "seed": 0,
    }
    task = task_of(Linear().eval() if model is None else model, data, **{**values, **changes})
    return measure(task, [("cheat", evaluator)])["cheat"]


# --- the model --------------------------------------------------------------------------------------------------------


def in_training_mode(model: Linear) -> None:
    model.dropout.train()


def not_finite(model: Linear) -> None:
    with torch.no_grad():
        model.last.weight[1, 2:] = float("nan")


def overflowing(model: Linear) -> None:
    model.scale.fill_(3e38)
    model.last.weight.data *= 1e3


def returning_a_pair(model: Linear) -> None:
    model.forward = lambda x: (x, x)  # type: ignore[method-assign, assignment]


def too_large(model: Linear) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nDetails.")

    model.forward = forward  # type: ignore[method-assign]


WIDE = ImageData(torch.rand(4, 3, 5, 5), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("spoil", "more"),
    [
        (in_training_mode, {}),
        (not_finite, {}),
        (overflowing, {}),  # no weights are to blame
        (returning_a_pair, {}),
        (too_large, {}),
        (Linear.eval, {"data": WIDE}),
        (Linear.eval, {"num_classes": 10}),
        (Linear.half, {}),
    ],
    ids=["training mode", "weights", "overflow", "pair", "memory", "images", "classes", "width"],
)
def test_what_is_wrong_with_a_model_is_said(spoil: Any, more: dict[str, Any], snapshot: TextSnapshot) -> None:
    model = Linear().eval()
    spoil(model)
    with snapshot.raises(ModelError):
        run(Natural(None), model, **more)


def test_probabilities_are_a_finding_not_an_error(snapshot: TextSnapshot) -> None:
    model = nn.Sequential(Linear(), nn.Softmax(dim=1)).eval()
    (warning,) = run(PGD(PGDOptions(steps=20)), model).details["warnings"]
    assert warning["code"] == "probabilities"
    snapshot(warning["text"])
    assert "warnings" not in run(PGD(PGDOptions(steps=20))).details


# --- the shared clean pass --------------------------------------------------------------------------------------------


def test_one_clean_pass_serves_all_evaluators():
    model = Linear().eval()
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    assert len(DATA) > PROBED  # trial passes are told by their length
    task = task_of(model, DATA, num_classes=3, batch_size=8)
    assert calls.count(len(DATA)) == 1
    measure(task, [("a", Natural(None)), ("b", Natural(None))])
    assert calls.count(len(DATA)) == 3


class Scribbling(Natural):
    """Writes into the verdicts on clean images."""

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        task.clean_predictions.fill_(-1)
        return super().evaluate(task, label)


def test_an_evaluators_verdicts_are_its_own():
    task = task_of(Linear().eval(), DATA, num_classes=3, batch_size=8)
    found = measure(task, [("a", Scribbling(None)), ("b", Natural(None))])
    assert found["a"].accuracy == 0
    assert found["b"].accuracy == found["b"].accuracy_release > 0


class OfClients(Natural):
    """Looks at the round's clients."""

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        task.clients()
        return super().evaluate(task, label)


def test_only_an_evaluator_that_declares_it_is_given_the_clients() -> None:
    """Also where others of the same measurement are."""
    asked: list[str] = []
    task = task_of(
        Linear().eval(),
        DATA,
        num_classes=3,
        batch_size=8,
        clients=lambda: asked.append("a"),  # type: ignore[func-returns-value]
    )
    declares = OfClients(None)
    declares.uses_clients = True
    measure(task, [("a", declares)])
    assert asked == ["a"]
    with pytest.raises(PluginError, match="which its entry does not declare"):
        measure(task, [("a", declares), ("b", OfClients(None))])
    assert asked == ["a", "a"]


def test_the_first_examples_of_an_attack_are_watched_and_all_are_handed_on():
    handed: list[torch.Tensor] = []
    first = _FirstExamples(lambda where, x_adv: handed.append(where))
    for start in (0, 40, 80):
        first(torch.arange(start, start + 40), torch.zeros(40, 1, 2, 2))
    assert torch.cat(first._where).tolist() == list(range(64))
    assert [len(part) for part in first._x_adv] == [40, 24]
    assert torch.cat(handed).tolist() == list(range(120))


# --- the budget -------------------------------------------------------------------------------------------------------


class Cheat(AttackEvaluator):
    """A plugin that overrides ``craft`` alone."""

    def __init__(self, crafted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(None)
        self.crafted = crafted

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {}

    def craft(self, task, x, y, noise):
        return self.crafted(x)


def at_one_pixel(value: Callable[[torch.Tensor], torch.Tensor], pixel: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def crafted(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten().clone()
        where = pixel % len(flat)
        flat[where] = value(flat[where])
        return flat.view_as(x)

    return crafted


PIXEL = st.integers(0, 31)


class Fragile(Linear):
    """Knows the clean images alone: nan for every other one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = (x[:, None] == DATA.x).flatten(2).all(dim=2).any(dim=1)
        return super().forward(x).masked_fill(~known[:, None], float("nan"))


@pytest.mark.parametrize(
    "evaluator",
    [Cheat(lambda x: (x - 0.05).abs()), AutoAttack(AutoAttackOptions(version="custom", attacks="square", queries=2))],
)
def test_nan_for_an_adversarial_image_is_an_error(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    """Its largest logit was said to be the first: class 0."""
    monkeypatch.setattr(SubAttacks, "perturb", lambda self, x, y: (x - 0.05).abs())
    with snapshot.raises(ModelError, "'cheat'"):
        run(evaluator, Fragile().eval(), batch_size=8)


EXCESS = st.floats(1e-5, 1e3, allow_nan=False)


@given(pixel=PIXEL, excess=EXCESS, sign=st.sampled_from([-1, 1]))
def test_a_plugin_outside_eps_is_caught_by_name(pixel, excess, sign):
    with pytest.raises(
        BudgetError, match=r"^evaluator 'cheat': \d of \d adversarial examples left the linf ball of eps"
    ):
        run(Cheat(at_one_pixel(lambda value: value + sign * (EPS + excess), pixel)))


@given(excess=st.floats(1e-5, EPS, exclude_max=True), sign=st.sampled_from([-1, 1]))
def test_a_plugin_outside_the_pixel_range_is_caught_by_name(excess, sign):
    # Black and white images, so that a step inside eps leaves the range.
    data = ImageData((DATA.x > 0.5).float(), DATA.y)
    edge = 1.0 if sign > 0 else 0.0

    def crafted(x):
        return torch.where(x == edge, x + sign * excess, x)

    with pytest.raises(BudgetError, match=r"^evaluator 'cheat': .* left the pixel range \[0, 1\]"):
        run(Cheat(crafted), data=data)


@given(pixel=PIXEL, value=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_a_plugin_that_returns_no_numbers_is_caught_by_name(pixel, value):
    with pytest.raises(BudgetError, match=r"^evaluator 'cheat': 1 of \d adversarial examples hold nan or inf"):
        run(Cheat(at_one_pixel(lambda old: torch.tensor(value), pixel)))


@given(excess=st.floats(0.01, 1))
def test_a_plugin_that_moves_the_clean_image_along_is_caught_by_name(excess):
    with pytest.raises(BudgetError, match=r"^evaluator 'cheat': "):
        run(Cheat(lambda x: x.add_(EPS + excess)))


@given(shift=st.floats(-EPS, EPS))
def test_an_honest_plugin_passes(shift):
    result = run(Cheat(lambda x: (x + shift).clamp(0, 1)))
    assert 0 <= result.accuracy <= result.accuracy_release <= 1
    assert result.settings == {"norm": "linf", "eps": "0.1"}


def test_the_reported_budget_is_the_checked_one_whatever_the_plugin_says_and_does():
    """It cannot relabel the examples, either; its tallies land in the details."""

    class Modest(Cheat):
        def settings(self, task):
            return {"eps": "1/255", "kind": "modest"}

        def craft(self, task, x, y, noise):
            y.copy_(task.model(x).argmax(1))
            task.tally("examples", len(x))
            task.tally("batches", 1)
            return x

    found = run(Modest(lambda x: x))
    assert found.settings == {"norm": "linf", "eps": "0.1", "kind": "modest"}
    natural = run(Natural(None)).accuracy
    assert (found.accuracy, found.accuracy_release) == (natural, natural)
    assert found.details == {"examples": 8, "batches": 3}


# --- the model and the result after -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.ones_(model.last.bias),
        lambda model: model.scale.mul_(2),
        lambda model: model.train(),
        lambda model: setattr(model, "last", nn.Linear(4, 3)),
    ],
    ids=["weights", "buffers", "mode", "module"],
)
def test_an_evaluator_that_changes_the_model_is_caught_by_name(change, snapshot):
    class Vandal(Evaluator):
        def evaluate(self, task, label):
            result = Natural(None).evaluate(task, label)
            change(task.model)
            return result

    with snapshot.raises(ModelError):
        run(Vandal())


def counted(clean: torch.Tensor, adv: torch.Tensor, y: torch.Tensor, num_classes: int) -> EvaluationResult:
    counts = counts_of(y, clean, adv, num_classes)
    return EvaluationResult(**counts, label="a", settings={}, implementation="ours", seconds=0.0, details={})


def test_both_conventions_and_a_class_without_examples() -> None:
    y = torch.tensor([0, 0, 1, 1, 1, 3])
    clean = torch.tensor([True, False, True, True, False, False])
    adv = torch.tensor([True, True, False, True, False, True])
    result = counted(clean, adv, y, 4)
    assert result.num_examples == 6
    assert result.accuracy == pytest.approx(2 / 6)
    assert result.accuracy_release == pytest.approx(4 / 6)  # above natural is possible
    assert result.per_class == pytest.approx((1 / 2, 1 / 3, None, 0.0))
    assert result.per_class_release == pytest.approx((1.0, 1 / 3, None, 1.0))


@given(st.integers(1, 60), st.integers(0, 10**6))
def test_accuracy_exceeds_neither_the_natural_one_nor_the_releases(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (size,), generator=generator)
    clean, adv = (torch.rand(2, size, generator=generator) < 0.5).unbind()
    result = counted(clean, adv, y, 5)
    assert result.accuracy <= min(clean.double().mean().item(), result.accuracy_release)
