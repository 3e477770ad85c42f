"""DeepFool: closed forms on linear models, what counts under an eps, and the distortion that it measures."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import ModelError, OptionError
from calfat_plugin.evaluators.deepfool import DISTORTION, ENTRY, DeepFool, DeepFoolOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import ThreatModel
from tests.snapshot import TextSnapshot

MakeTask = Callable[..., EvaluationTask]

# Class 0 is right at X with z = (0.7, 0, -0.1). Its boundaries are z_0 - z_1 = 2 a - 3 b and z_0 - z_2 = 4 a - 8 b.
WEIGHT = torch.tensor([[2.0, -3.0], [0.0, 0.0], [-2.0, 5.0]])
X = torch.tensor([0.8, 0.3]).view(1, 1, 1, 2)
Y = torch.tensor([0])
TO_1 = {"linf": 0.7 / 5, "l2": 0.7 / 13**0.5}
TO_2 = {"linf": 0.8 / 12, "l2": 0.8 / 80**0.5}
TOWARDS_2 = {"linf": (-1.0, 1.0), "l2": (-4 / 80**0.5, 8 / 80**0.5)}


def linear(weight: Tensor = WEIGHT) -> nn.Module:
    layer = nn.Linear(weight.shape[1], len(weight), bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.Sequential(nn.Flatten(), layer).eval()


def beyond(length: float) -> float:
    """How far DeepFool goes for a boundary of a linear model at this distance: 1e-4 and 2 % further."""
    return 1.02 * (length + 1e-4)


def budget(norm: str, eps: float | Fraction) -> ThreatModel:
    return ThreatModel(norm=norm, eps=eps)  # type: ignore[arg-type]


def found(make_task: MakeTask, *, threat: ThreatModel, options: DeepFoolOptions | None = None) -> EvaluationResult:
    task = make_task(linear(), ImageData(X, Y), num_classes=3, threat=threat)
    return DeepFool(options or DeepFoolOptions()).evaluate(task, "deepfool")


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_linear_model_is_crossed_at_its_nearest_boundary_in_one_step(norm: str, make_task: MakeTask) -> None:
    length = beyond(TO_2[norm])
    task = make_task(linear(), ImageData(X, Y), num_classes=3, threat=budget(norm, 0.5))
    x_adv = DeepFool(DeepFoolOptions(steps=1)).craft(task, X, Y, torch.Generator())
    expected = X.flatten() + length * torch.tensor(TOWARDS_2[norm])
    assert x_adv.flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_example_is_broken_where_the_distance_is_within_eps_and_measured_whatever_eps(
    norm: str, make_task: MakeTask
) -> None:
    length = beyond(TO_2[norm])
    inside, outside = (found(make_task, threat=budget(norm, share * length)) for share in (1.001, 0.999))
    assert (inside.accuracy, outside.accuracy) == (0.0, 1.0)
    assert inside.metrics == outside.metrics == {DISTORTION: pytest.approx(length, abs=1e-6)}
    assert inside.details == outside.details == {"unbroken": 0, "zero_gradients": 0}


@pytest.mark.parametrize(
    ("options", "distortion"),
    [
        ({"candidates": 2}, beyond(TO_1["linf"])),  # the classes of the largest clean logits
        ({"overshoot": 0.5}, 1.5 * (TO_2["linf"] + 1e-4)),
    ],
)
def test_options_change_the_way(options: dict[str, Any], distortion: float, make_task: MakeTask) -> None:
    result = found(make_task, threat=budget("linf", 0.5), options=DeepFoolOptions(**options))
    assert result.metrics[DISTORTION] == pytest.approx(distortion, abs=1e-6)
    assert options.items() <= result.settings.items()


def test_what_is_wrong_already_stays_as_it_is_and_has_no_distortion(make_task: MakeTask) -> None:
    x, y = torch.cat((X, 1 - X)), torch.tensor([0, 0])
    task = make_task(linear(), ImageData(x, y), num_classes=3, threat=budget("linf", 0.5))
    x_adv = DeepFool(DeepFoolOptions()).craft(task, x, y, torch.Generator())
    assert torch.equal(x_adv[1], x[1])
    assert not torch.equal(x_adv[0], x[0])
    both = DeepFool(DeepFoolOptions()).evaluate(task, "deepfool")
    assert both.metrics[DISTORTION] == pytest.approx(beyond(TO_2["linf"]), abs=1e-6)  # of the first alone
    assert both.accuracy == 0.0
    task = make_task(linear(), ImageData(x[1:], y[1:]), num_classes=3, threat=budget("linf", 0.5))
    assert DeepFool(DeepFoolOptions()).evaluate(task, "deepfool").metrics == {}


def test_what_no_step_breaks_is_robust_and_counted(make_task: MakeTask) -> None:
    # Logits 2, 0, 0 whatever the image: no boundary has a slope.
    model = linear(torch.zeros(3, 2))
    with torch.no_grad():
        model[1].bias = nn.Parameter(torch.tensor([2.0, 0.0, 0.0]))  # type: ignore[index]
    task = make_task(model, ImageData(X, Y), num_classes=3, threat=budget("linf", 1))
    result = DeepFool(DeepFoolOptions()).evaluate(task, "deepfool")
    assert (result.accuracy, result.metrics) == (1.0, {})
    assert result.details == {"unbroken": 1, "zero_gradients": 1}


def test_pixels_stay_in_their_range(make_task: MakeTask) -> None:
    # The overshoot takes b beyond 1, where its range ends.
    x = torch.tensor([1.0, 0.9]).view(1, 1, 1, 2)
    weight = torch.tensor([[6.0, -6.0], [0.0, 0.0]])
    task = make_task(linear(weight), ImageData(x, Y), num_classes=2, threat=budget("linf", 1))
    x_adv = DeepFool(DeepFoolOptions(overshoot=3.0)).craft(task, x, Y, torch.Generator())
    length = 4 * (0.05 + 1e-4)
    assert x_adv.flatten().tolist() == pytest.approx([1.0 - length, 1.0], abs=1e-6)


def test_accuracy_is_the_share_of_distances_above_eps(
    digits_model: nn.Module, digits: ImageData, make_task: MakeTask
) -> None:
    data = digits.subset(range(60))
    seen: list[Tensor] = []
    task = make_task(digits_model, data, threat=budget("linf", 1), batch_size=23)
    anywhere = DeepFool(DeepFoolOptions(eps=Fraction(1))).evaluate(
        EvaluationTask(**{**vars(task), "on_examples": lambda where, x_adv: seen.append(x_adv)}), "deepfool"
    )
    x_adv = torch.cat(seen)
    distance = (x_adv - data.x).flatten(1).abs().amax(dim=1)
    right = task.clean_correct
    assert anywhere.accuracy == 0.0
    assert anywhere.metrics[DISTORTION] == pytest.approx(float(distance[right].mean()), abs=1e-6)
    for eps in (0.05, 0.1, 0.2):
        result = DeepFool(DeepFoolOptions()).evaluate(
            make_task(digits_model, data, threat=budget("linf", eps), batch_size=60), "deepfool"
        )
        assert 60 * result.accuracy == int((right & (distance > eps)).sum())
        assert result.metrics[DISTORTION] == pytest.approx(anywhere.metrics[DISTORTION], abs=1e-5)


def test_micro_batches_find_the_same(digits_model: nn.Module, digits: ImageData, make_task: MakeTask) -> None:
    data = digits.subset(range(30))
    whole, parts = (
        DeepFool(DeepFoolOptions()).evaluate(make_task(digits_model, data, rows_at_once=rows), "deepfool")
        for rows in (30, 7)
    )
    assert whole.per_class == parts.per_class
    assert whole.metrics[DISTORTION] == pytest.approx(parts.metrics[DISTORTION], abs=1e-5)


class Detached(nn.Module):
    """Its logits do not depend on the image as far as gradients know."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) @ WEIGHT.T


def test_a_model_without_gradients_and_the_norm_l1_are_refused(make_task: MakeTask, snapshot: TextSnapshot) -> None:
    task = make_task(Detached().eval(), ImageData(X, Y), num_classes=3)
    with snapshot.raises(ModelError):
        DeepFool(DeepFoolOptions()).evaluate(task, "deepfool")
    recipe = SimpleNamespace(threat=ThreatModel("l1", 2))
    with snapshot.raises(OptionError):
        ENTRY.check(DeepFoolOptions(), recipe)
    ENTRY.check(DeepFoolOptions(norm="l2", eps=Fraction(1, 2)), recipe)
