"""``evaluate`` and ``attack`` on a model and images in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import calfat_plugin as calfat

BYTES = np.round(load_digits().images[:60, None] / 16 * 255).astype(np.uint8)
X = torch.from_numpy(BYTES).float() / 255
Y = torch.from_numpy(load_digits().target[:60])
AUTOATTACK = {"name": "autoattack", "version": "custom", "attacks": "apgd-ce, square", "iterations": 3, "queries": 20}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Each image belongs to the class with the nearest mean, which is a linear classifier."""
    means = torch.stack([X[label == Y].mean(dim=0).flatten() for label in range(10)])
    linear = nn.Linear(64, 10)
    linear.load_state_dict({"weight": 2 * means, "bias": -means.square().sum(dim=1)})
    return nn.Sequential(nn.Flatten(), linear).eval()


def accuracy(model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == Y).float().mean())


@pytest.mark.parametrize(
    "name", ["fgsm", "pgd3", "cw3", {"name": "pgd", "steps": 3, "restarts": 2}, AUTOATTACK], ids=str
)
def test_the_examples_of_an_attack_are_those_that_its_evaluation_counts(model: nn.Module, name: Any) -> None:
    budget: dict[str, Any] = {"eps": 0.15, "batch_size": 25, "seed": 7}
    x_adv = calfat.attack(name, model, X, Y, **budget)
    (result,) = calfat.evaluate(model, X, Y, [name], **budget).values()
    natural = accuracy(model, X)
    assert accuracy(model, x_adv) == pytest.approx(result.accuracy)
    assert 0 < result.accuracy < natural
    assert float((x_adv - X).abs().max()) == pytest.approx(0.15, abs=1e-6)
    assert float(x_adv.min()) >= 0
    assert float(x_adv.max()) <= 1
    assert torch.equal(X, torch.from_numpy(BYTES).float() / 255)


def test_images_that_are_not_attacked_come_back_as_they_were(model: nn.Module) -> None:
    x_adv = calfat.attack({"name": "fgsm", "max_examples": 9}, model, X, Y, eps=0.1)
    changed = (x_adv != X).flatten(1).any(dim=1)
    assert int(changed.sum()) == 9
    torch.testing.assert_close(x_adv[changed], calfat.attack("fgsm", model, X, Y, eps=0.1)[changed])


def test_autoattack_returns_what_it_broke(model: nn.Module) -> None:
    x_adv = calfat.attack(AUTOATTACK, model, X, Y, eps=0.15)
    with torch.no_grad():
        right, still = model(X).argmax(dim=1) == Y, model(x_adv).argmax(dim=1) == Y
    changed = (x_adv != X).flatten(1).any(dim=1)
    assert torch.equal(changed, right & ~still)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.numpy(), Y.numpy()),
        (X.double(), Y.int()),
        (BYTES, Y.tolist()),
        (torch.from_numpy(BYTES), Y),
    ],
    ids=["arrays", "other widths", "bytes", "byte tensors"],
)
def test_tensors_and_arrays_of_any_width_do(model: nn.Module, x: Any, y: Any) -> None:
    found = calfat.evaluate(model, x, y, ["natural", "fgsm"], eps=0.05)
    expected = calfat.evaluate(model, X, Y, ["natural", "fgsm"], eps=0.05)
    assert {label: result.per_class for label, result in found.items()} == {
        label: result.per_class for label, result in expected.items()
    }
    assert found["natural"].accuracy == pytest.approx(accuracy(model, X))


def test_budgets_are_exact_and_steps_a_quarter_of_them(model: nn.Module) -> None:
    settings = calfat.evaluate(model, X, Y, "pgd2", eps="8/255")["pgd2"].settings
    assert (settings["norm"], settings["eps"], settings["step_size"]) == ("linf", "8/255", "2/255")
    settings = calfat.evaluate(model, X, Y, ["pgd2"], eps=1.5, norm="l2", step_size=0.2)["pgd2"].settings
    assert (settings["norm"], settings["eps"], settings["step_size"]) == ("l2", "1.5", "0.2")
    own = {"name": "pgd", "steps": 2, "eps": "4/255"}
    assert calfat.evaluate(model, X, Y, ["natural", own])["pgd"].settings["eps"] == "4/255"


def test_seeds_are_derived_and_the_generators_of_the_caller_stay(model: nn.Module) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (calfat.attack("pgd2", model, X, Y, eps=0.1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_progress_is_reported(model: nn.Module) -> None:
    heard: list[tuple[str, int, int, int]] = []
    calfat.evaluate(model, X, Y, ["fgsm"], eps=0.1, batch_size=40, on_progress=lambda *told: heard.append(told))
    assert [told[:3] for told in heard] == [("fgsm", 40, 60), ("fgsm", 60, 60)]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"evaluators": ["natural", "pgd2"], "eps": None}, "evaluator 'pgd2' needs eps, a fraction of the pixel range"),
        ({"eps": 8}, "eps is a fraction of the pixel range, such as 8/255; got 8"),
        ({"eps": "much"}, "eps must be a number such as 8/255: 'much' is not a number"),
        ({"norm": "l3"}, "norm must be 'linf', 'l2' or 'l1'; got 'l3'."),
        ({"evaluators": ["pdg20"]}, "evaluators ['pdg20']: calfat.evaluators[0]: no evaluator called 'pdg20'. Did you"),
        ({"batch_size": 0}, "batch_size=0: calfat.evaluation.batch_size: got 0 (int), expected a whole number, >= 1."),
        ({"x": X * 255}, "pixels run from 0 to 255; expected [0, 1]: divide bytes by 255 or give them as uint8"),
        ({"x": X * torch.nan}, "pixels run from nan to nan; expected [0, 1]"),
        ({"x": X[:, 0]}, "images are (60, 8, 8) torch.float32 and labels (60,) torch.int64; expected (N, C, H, W)"),
        ({"x": X[:5]}, "images are (5, 1, 8, 8) torch.float32 and labels (60,) torch.int64; expected (N, C, H, W)"),
        ({"x": X[:0], "y": Y[:0]}, "there are no images in x."),
        ({"x": "images"}, "x and y must be tensors or arrays of numbers: "),
        ({"y": Y + 1}, "labels run from 1 to 10; the model knows 0 to 9."),
        ({"y": Y.float()}, "images are (60, 1, 8, 8) torch.float32 and labels (60,) torch.float32; expected"),
        ({"model": max}, "the model is a builtin_function_or_method; expected a torch.nn.Module."),
        ({"model": nn.Linear(3, 3)}, "the model is in training mode (module 'Linear')"),
        ({"model": nn.Linear(3, 3).eval()}, "the model cannot take images of shape (1, 8, 8) (RuntimeError: "),
        (
            {"model": nn.Identity().eval()},
            "the model returned (60, 1, 8, 8) for 60 images of shape (1, 8, 8); expected",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what(model: nn.Module, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(calfat.CalfatError) as caught:
        calfat.evaluate(**{"model": model, "x": X, "y": Y, "evaluators": ["fgsm"], "eps": 0.1, **changes})
    assert str(caught.value).startswith(error)


def test_what_makes_no_examples_is_refused(model: nn.Module) -> None:
    with pytest.raises(calfat.OptionError) as caught:
        calfat.attack("natural", model, X, Y)
    assert str(caught.value) == "evaluator 'natural' makes no adversarial examples; name an attack, such as pgd20."
