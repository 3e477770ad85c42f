"""``evaluate`` and ``attack`` on a model and images in memory."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calfat_plugin as calfat
from calfat_plugin.evaluators.alarms import find_alarms
from tests.snapshot import TextSnapshot

BYTES = np.round(load_digits().images[:60, None] / 16 * 255).astype(np.uint8)
X = torch.from_numpy(BYTES).float() / 255
Y = torch.from_numpy(load_digits().target[:60])
ONE_LOGIT = nn.Sequential(nn.Flatten(), nn.Linear(64, 1)).eval()
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
    [(X.numpy(), Y.numpy()), (X.double(), Y.int()), (BYTES, Y.tolist()), (torch.from_numpy(BYTES), Y)],
    ids=["arrays", "other widths", "bytes", "byte tensors"],
)
def test_tensors_and_arrays_of_any_width_do(model: nn.Module, x: Any, y: Any) -> None:
    found = calfat.evaluate(model, x, y, ["natural", "fgsm"], eps=0.05)
    expected = calfat.evaluate(model, X, Y, ["natural", "fgsm"], eps=0.05)
    assert [result.per_class for result in found.values()] == [result.per_class for result in expected.values()]
    assert found["natural"].accuracy == pytest.approx(accuracy(model, X))


def test_budgets_are_exact_and_steps_a_quarter_of_them(model: nn.Module) -> None:
    settings = calfat.evaluate(model, X, Y, "pgd2", eps="8/255")["pgd2"].settings
    assert (settings["norm"], settings["eps"], settings["step_size"]) == ("linf", "8/255", "2/255")
    settings = calfat.evaluate(model, X, Y, ["pgd2"], eps=1.5, norm="l2", step_size=0.2)["pgd2"].settings
    assert (settings["norm"], settings["eps"], settings["step_size"]) == ("l2", "1.5", "0.2")
    found = calfat.evaluate(model, X, Y, ["pgd9"], eps=0.3, step_size="eps/10")["pgd9"]
    assert found.settings["step_size"] == "0.03"
    (warning,) = found.details["warnings"]
    assert warning["text"].startswith("steps x step_size, 9 x 0.03 = 0.27, is less than eps 0.3, so no image gets to")
    own = {"name": "pgd", "steps": 2, "eps": "4/255"}
    settings = calfat.evaluate(model, X, Y, ["natural", own])["pgd"].settings
    assert (settings["eps"], settings["step_size"]) == ("4/255", "1/255")


def test_an_attack_takes_the_step_that_it_is_given(model: nn.Module) -> None:
    x_adv = calfat.attack({"name": "bim", "steps": 1}, model, X, Y, eps=0.1, step_size=0.02)
    assert float((x_adv - X).abs().max()) == pytest.approx(0.02)


def test_an_attack_stays_in_the_ball_of_its_norm(model: nn.Module) -> None:
    for norm, order in (("l2", 2), ("l1", 1)):
        distances = (calfat.attack("fgsm", model, X, Y, eps=0.5, norm=norm) - X).flatten(1).norm(order, dim=1)
        assert float(distances.max()) == pytest.approx(0.5, abs=1e-5)


def test_seeds_are_derived_and_the_generators_of_the_caller_stay(model: nn.Module) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (calfat.attack("pgd2", model, X, Y, eps=0.1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


class Scaled(nn.Module):
    """Logits so large that the softmax saturates."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.factor * self.model(x)
        return logits


def test_findings_about_the_numbers_are_warnings(model: nn.Module) -> None:
    saturated = Scaled(model, 1e4).eval()
    with pytest.warns(UserWarning, match="zero-gradients") as given:
        found = calfat.evaluate(saturated, X, Y, ["natural", "pgd20"], eps=0.1)
    (alarm,) = (alarm for alarm in find_alarms(found.values()) if alarm.code == "zero-gradients")
    assert f"zero-gradients: {alarm.text}" in {str(warning.message) for warning in given}
    assert {warning.filename for warning in given} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calfat.evaluate(model, X, Y, ["natural", "pgd20"], eps=0.05)


def test_progress_is_reported(model: nn.Module) -> None:
    heard: list[tuple[str, int, int, int]] = []
    calfat.evaluate(model, X, Y, ["fgsm"], eps=0.1, batch_size=40, on_progress=lambda *told: heard.append(told))
    assert [told[:3] for told in heard] == [("fgsm", 40, 60), ("fgsm", 60, 60)]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"evaluators": ["natural", "pgd2"], "eps": None}, "evaluator 'pgd2' needs eps, a fraction of the pixel range"),
        ({"eps": 8}, "eps is a fraction of the pixel range, such as 8/255; got 8"),
        ({"eps": "much"}, "eps: got 'much' (text), expected a number or a fraction"),
        ({"eps": [0.1, 0.2]}, "eps: got [0.1, 0.2] (list), expected a number or a fraction"),
        ({"norm": "l3"}, "norm: got 'l3' (text), expected one of linf, l2, l1."),
        ({"evaluators": ["pdg20"]}, "evaluators ['pdg20']: calfat.evaluators[0]: no evaluator called 'pdg20'. Did you"),
        ({"batch_size": 0}, "batch_size=0: calfat.evaluation.batch_size: got 0 (int), expected a whole number, >= 1."),
        ({"x": X * 255}, "pixels run from 0 to 255; expected [0, 1]: divide bytes by 255 or give them as uint8"),
        ({"x": X.index_fill(0, torch.tensor([58, 59]), torch.nan)}, "pixels of 2 of 60 images (the first is "),
        ({"x": X[:, 0]}, "images are (60, 8, 8) torch.float32 and labels (60,) torch.int64; expected (N, C, H, W)"),
        ({"x": X[:5]}, "images are (5, 1, 8, 8) torch.float32 and labels (60,) torch.int64; expected (N, C, H, W)"),
        ({"x": X[:0], "y": Y[:0]}, "there are no images in x."),
        ({"x": "images"}, "x and y must be tensors or arrays of numbers: "),
        ({"y": Y + 1}, "labels run from 1 to 10; the model knows 0 to 9."),
        ({"y": Y.float()}, "images are (60, 1, 8, 8) torch.float32 and labels (60,) torch.float32; expected"),
        ({"model": max}, "the model is a builtin_function_or_method; expected a torch.nn.Module."),
        ({"model": nn.Linear(3, 3)}, "the model is in training mode (module 'Linear')"),
        ({"model": nn.Linear(3, 3).eval()}, "the model cannot take images of shape (1, 8, 8) (RuntimeError: "),
        ({"model": nn.Identity().eval()}, "the model returned (60, 1, 8, 8) for 60 images of shape (1, 8, 8); expec"),
        ({"model": ONE_LOGIT, "y": Y * 0, "evaluators": "autoattack"}, "the model returns one logit for an image, so "),
        ({"evaluators": {"name": "pdg"}}, "evaluators [{'name': 'pdg'}]: calfat.evaluators[0]"),
        ({"evaluators": None}, "evaluators: name at least one, such as natural or pgd20."),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what(model: nn.Module, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(calfat.CalfatError) as caught:
        calfat.evaluate(**{"model": model, "x": X, "y": Y, "evaluators": ["fgsm"], "eps": 0.1, **changes})
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize("name", ["eps", "step_size", "norm", "batch_size", "seed"])
def test_a_tensor_in_the_place_of_a_number_is_named_by_its_shape(model: nn.Module, name: str) -> None:
    with pytest.raises(calfat.CalfatError, match=rf"{name}.*of shape \(60, 1, 8, 8\)"):
        calfat.evaluate(**{"model": model, "x": X, "y": Y, "evaluators": ["fgsm"], "eps": 0.1, name: X})


def test_what_makes_no_examples_is_refused(model: nn.Module, snapshot: TextSnapshot) -> None:
    with snapshot.raises(calfat.OptionError):
        calfat.attack("natural", model, X, Y)


# --- loaders, data sets -----------------------------------------------------------------------------------------------


def test_a_loader_and_image_data_bring_their_labels(model: nn.Module) -> None:
    """Also one whose last batch is smaller, with images in bytes."""
    expected = calfat.evaluate(model, X, Y, ["fgsm"], eps=0.1)["fgsm"]
    data = TensorDataset(torch.from_numpy(BYTES), Y)
    whole = calfat.Dataset("mine", calfat.ImageData(X[:1], Y[:1]), calfat.ImageData(X, Y), 10)
    for images in (DataLoader(data, batch_size=25), calfat.ImageData(X, Y), whole):
        assert calfat.evaluate(model, images, evaluators=["fgsm"], eps=0.1)["fgsm"].per_class == expected.per_class
        x_adv = calfat.attack("fgsm", model, images, eps=0.1)
        torch.testing.assert_close(x_adv, calfat.attack("fgsm", model, X, Y, eps=0.1))
    shuffled = DataLoader(data, batch_size=25, shuffle=True, generator=torch.Generator().manual_seed(0))
    assert calfat.evaluate(model, shuffled, evaluators=["fgsm"], eps=0.1)["fgsm"].per_class == expected.per_class


class Named(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Examples that are mappings."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": X[index], "y": Y[index]}


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X, None),
        (DataLoader(TensorDataset(X, Y)), Y),
        (DataLoader(TensorDataset(X, Y), shuffle=True), None),
        (DataLoader(Named()), None),
        (DataLoader(TensorDataset(X, Y, Y)), None),
        (DataLoader(TensorDataset(X[:0], Y[:0])), None),
    ],
)
def test_a_loader_that_does_not_fit(model: nn.Module, x: Any, y: Any, snapshot: TextSnapshot) -> None:
    with snapshot.raises(calfat.DataError):
        calfat.attack("fgsm", model, x, y, eps=0.1)


@pytest.mark.parametrize("third", [["pgd20"], "pgd20", [{"name": "pgd", "steps": 5}, "natural"]], ids=str)
def test_evaluators_in_the_place_of_labels(model: nn.Module, third: Any, snapshot: TextSnapshot) -> None:
    for images in (calfat.ImageData(X, Y), X):
        with snapshot.raises(calfat.OptionError, "evaluators="):
            calfat.evaluate(model, images, third, eps=0.1)


def convolutions() -> nn.Module:
    """With batch normalisation, so that modes matter, and a weight whose layout is changed for speed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        return nn.Sequential(*layers).eval()


COMPILED = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, X[:2]),
    "frozen": lambda model: torch.jit.freeze(torch.jit.script(model)),
    "in part": lambda model: nn.Sequential(torch.jit.script(model[:3]), model[3:]).eval(),
}


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_networks_are_measured_as_those_they_were_made_of(how: str) -> None:
    plain, made = convolutions(), COMPILED[how](convolutions())
    weights = [each.clone() for each in made.parameters()]
    arguments: dict[str, Any] = {"eps": 0.1, "step_size": "eps", "seed": 3}
    expected, found = (calfat.evaluate(each, X, Y, ["natural", "fgsm", "pgd2"], **arguments) for each in (plain, made))
    assert [each.per_class for each in found.values()] == [each.per_class for each in expected.values()]
    x_adv, as_plain = (calfat.attack("pgd2", each, X, Y, **arguments) for each in (made, plain))
    assert float(((x_adv - as_plain).abs() < 1e-5).float().mean()) > 0.99  # a sign of a gradient near 0 may differ
    assert all(map(torch.equal, weights, made.parameters()))


def test_of_a_module_whose_mode_is_fixed_it_is_said_how_to_set_it() -> None:
    """As torch.export makes them, whose import takes long."""
    network = convolutions().train()
    network.eval = None  # type: ignore[assignment, method-assign]
    for start in ("the model is in training mode", "the model is in training mode (module '0')"):
        with pytest.raises(
            calfat.ModelError, match=rf"^{re.escape(start)}.* set `training = False` of each of its mod"
        ):
            calfat.evaluate(network, X, Y, ["natural"])
        network.training = False
    for module in network.modules():
        module.training = False
    assert calfat.evaluate(network, X, Y, ["natural", "fgsm"], eps=0.1)


class InPlace(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> Any:
        x -= 0.5
        return self.network(x)


def test_a_network_that_changes_its_input_is_named_and_the_callers_images_stay(model: nn.Module) -> None:
    x, network = X.clone(), InPlace(model).eval()
    for call in (
        lambda: calfat.evaluate(network, x, Y, ["pgd2"], eps=0.1),
        lambda: calfat.attack("pgd2", network, x, Y, eps=0.1),
        lambda: calfat.trust(network, x, Y, eps=0.1),
    ):
        with pytest.raises(calfat.ModelError, match=r"^the model changes its input in place, so an attack would begin"):
            call()
        assert torch.equal(x, X)


def test_images_that_look_wrong_are_warned_of(model: nn.Module) -> None:
    """By every function that is given images, at the line that calls it."""
    twice = X / 255 / 255
    for call in (
        lambda: calfat.evaluate(model, twice, Y, ["natural"]),
        lambda: calfat.attack("fgsm", model, twice, Y, eps=0.1),
        lambda: calfat.trust(model, twice, Y, eps=0.1),
    ):
        with pytest.warns(
            UserWarning, match=r"^the brightest pixel of all 60 images is 1.5e-05 of \[0, 1\]: they "
        ) as caught:
            call()
        assert caught[0].filename == __file__


def test_a_data_set_is_loaded_by_name_with_its_options(tmp_path: Path) -> None:
    digits = calfat.load_dataset("digits")
    assert (digits.name, len(digits.train) + len(digits.test), digits.validation) == ("digits", 1797, None)
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "a.png")
    with pytest.warns(UserWarning, match="of one colour") as caught:
        found = calfat.load_dataset("image_folder", root=tmp_path, size=8, classes="dog,cat")
    starts = [str(each.message).partition(" images")[0] for each in caught]
    assert starts == [f"data set image_folder: 2 of 2 {which}" for which in ("training", "test", "test")]
    assert (found.class_names, found.image_size, found.in_channels) == (("dog", "cat"), (8, 8), 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "digit"}, "load_dataset('digit'): data_args.dataset: no data set called 'digit'. Did you mean"),
        ({"name": "digits", "size": 3}, "size=3: calfat.dataset.size: data set 'digits' has no option 'size'. It has"),
        ({"name": "cifar10", "verify": 1}, "verify=1: calfat.dataset.verify: got 1 (int), expected true or false."),
        ({"name": "cifar10", "root": "/nowhere"}, "data set cifar10: /nowhere/cifar-10-batches-py/data_batch_1 is "),
        ({"name": "digits", "plugins": ["nowhere.py"]}, "--plugin nowhere.py: no such file."),
        ({"name": "digits", "plugins": "nowhere.py"}, "--plugin nowhere.py: no such file."),
    ],
)
def test_a_data_set_that_cannot_be_loaded(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(calfat.CalfatError) as caught:
        calfat.load_dataset(**arguments)
    assert str(caught.value).startswith(error)
