"""``calfat trust`` on models made for it: the right verdict and cause, continuing after a kill, and refusals."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import calfat_plugin as calfat
from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.published import load_digits
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators import subattacks
from calfat_plugin.evaluators.gradient import CW, FGSM, PGD, CWOptions, FGSMOptions, PGDOptions
from calfat_plugin.exact import exact_text
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.judging import dead_units, questions
from calfat_plugin.judging import examine as examining
from calfat_plugin.judging import findings as judging_findings
from calfat_plugin.judging.battery import AutoAttackCheck, DeadUnits, Surrogate, battery
from calfat_plugin.judging.check import DLR, Noise, ProbabilityMargin
from calfat_plugin.judging.dead_units import IN_BATCHES, STEPS, worst_plans
from calfat_plugin.judging.findings import Findings
from calfat_plugin.judging.questions import network, trained_surrogate
from calfat_plugin.judging.trial import Trial
from calfat_plugin.maths.intervals import wilson
from calfat_plugin.models.networks import CNNSmall
from calfat_plugin.report import charts, write_run_report
from calfat_plugin.results import EvaluationResult
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.threat import ThreatModel
from tests.cli import runner
from tests.evaluators.stored import run_of
from tests.evaluators.tasks import trial_of
from tests.evaluators.trust_models import QUICK, Planted, PlantedBehind, PlantedTogether, narrowed, weak_battery
from tests.report.made import change_json
from tests.snapshot import TextSnapshot

call = partial(runner.calfat, "trust")


def on_trial(model: nn.Module, examples: int, **changes: Any) -> Trial:
    values = {"threat": ThreatModel(eps="0.15", step_size="0.05"), "batch_size": 10, **changes}  # type: ignore[arg-type]
    return trial_of(model, load_digits().test.subset(range(examples)), **values)


HERE = Path(__file__).parent
RECIPE = """\
common_args: {training_type: simulation, random_seed: 3}
data_args: {dataset: digits}
model_args: {model: 'trust_models:Honest'}
train_args: {client_num_in_total: 2, comm_round: 7}
calfat:
  trainer: {name: fedpgd}
  threat: {norm: linf, eps: 0.1, step_size: 0.025, steps: 10}
  runtime: {threads: 1}
"""
CHECK = {check.name: check for check in battery(full=True)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, few_targets: int) -> None:
    """A battery in a few seconds: too weak to publish, enough to end."""
    monkeypatch.setattr(questions, "EPOCHS", 3)
    monkeypatch.setattr(questions, "MORE", 200)
    monkeypatch.setattr(examining, "battery", weak_battery)


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.slow)])
def checks(request: pytest.FixtureRequest, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone that find what the models made for this file hide; the slow tests have all of them."""
    if request.param == "some":
        some = (*battery(full=False)[:5], DeadUnits(), Surrogate(), QUICK)
        monkeypatch.setattr(examining, "battery", lambda **question: some)


@pytest.fixture
def folder(tmp_path: Path, digits_model: nn.Module, plain_model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the weights of both networks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    large = narrowed(CNNSmall(in_channels=1, image_size=(28, 28), num_classes=10))
    for name, model in (("robust", digits_model), ("plain", plain_model), ("of-large-images", large)):
        state = {f"net.{key}": value.contiguous() for key, value in model.state_dict().items()}
        save_file(state, tmp_path / f"{name}.safetensors")
        if name == "plain":
            first = next(iter(state))
            save_file(
                {**state, first: state[first].new_full(state[first].shape, math.nan)}, tmp_path / "nan.safetensors"
            )
    return tmp_path


def own(kind: str, weights: str = "robust", eps: str = "0.1", examples: int = 100) -> tuple[object, ...]:
    model = ("--model", f"trust_models:{kind}", "--weights", f"{weights}.safetensors", "--dataset", "digits")
    return (*model, "--eps", eps, "--examples", examples, "--device", "cpu")


def judged(file: str = "robust-trust.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(file).read_text())
    return content


def numbers(content: dict[str, Any]) -> tuple[object, ...]:
    """What must not depend on when and how often a thing was run."""
    for check in content["checks"]:
        check.pop("seconds", None)
        for row in check["rows"]:
            row.pop("seconds")
    return content["verdict"], content["checks"], content["robust"], content["finished"]


# --- five models ------------------------------------------------------------------------------------------------------


def test_plain_training_is_not_robust(folder: Path, snapshot: TextSnapshot) -> None:
    code, out, err = call(*own("Honest", "plain", eps="0.3"))
    assert (code, err) == (0, "")
    content = judged("plain-trust.json")
    assert (content["verdict"]["word"], content["finished"]) == ("not robust", True)
    assert [check["check"] for check in content["checks"]] == ["answers", "gradients", "pgd"]
    assert "\nverdict: not robust\nThe model is not robust: it has " in out
    snapshot(out[out.index("not needed for the verdict") :])


@pytest.mark.slow
def test_adversarial_training_holds_against_the_published_autoattack(folder: Path) -> None:
    assert call(*own("Honest", examples=359))[0] == 0
    assert (judged()["verdict"]["word"], judged()["checks"][-1]["check"]) == ("holds", "autoattack-32")


def test_a_saturated_softmax_is_named(folder: Path, checks: None) -> None:
    code, out, err = call(*own("Scaled", examples=40))
    assert (code, err) == (0, "")
    verdict = judged()["verdict"]
    assert verdict["word"] == "overstated"
    assert verdict["text"] == f"overstated by at least {100 * (verdict['claimed'] - verdict['worst']):.1f} points"
    assert verdict["usable"] is True  # losses that do not depend on the scale see what the cross-entropy does not
    assert verdict["claimed"] - verdict["worst"] > 0.1
    assert verdict["causes"][0].endswith("the softmax is saturated or flattened, which blinds PGD")
    assert any("exactly zero" in cause for cause in verdict["causes"])
    assert "\n  also: the gradient of the cross-entropy is exactly zero for " in out


def test_a_quantiser_is_gradient_masking(folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "battery", partial(weak_battery, keep="black-box"))
    assert call(*own("Quantised", "plain", examples=40))[0] == 0
    content = judged("plain-trust.json")
    verdict = content["verdict"]
    assert verdict["word"] == "overstated"
    assert verdict["causes"][0].startswith("Square, which uses no gradients, breaks what all gradient attacks do not")
    assert "the gradient of the cross-entropy is exactly zero for 100.0 % of the images" in verdict["causes"]
    accuracy = {row["attack"]: row["accuracy"] for check in content["checks"] for row in check["rows"]}
    assert accuracy["square1000"] < accuracy["cw20"] - 0.2
    assert verdict["usable"] is False
    assert "the gradient of the logits themselves is exactly zero for 100.0 % of the images" in verdict["causes"]
    assert [check["check"] for check in content["checks"]][-2:] == ["black-box", "surrogate"]  # not AutoAttack


@pytest.mark.parametrize("kind", ["Randomised", "RandomisedAndFlat"])
def test_one_run_of_a_randomised_model_decides_nothing(kind: str, folder: Path) -> None:
    assert call(*own(kind))[0] == 0
    content = judged()
    assert content["verdict"]["word"] == "not shown"
    assert "One run decides nothing" in content["verdict"]["sentence"]
    (answers,) = content["checks"]
    assert answers["facts"]["changed"] == 1.0
    left = [row["left"] for row in answers["rows"]]
    assert left[-1] < left[0]  # every draw breaks other images, be they as many by chance


# --- models that hide -------------------------------------------------------------------------------------------------

SURROGATE = "adversarial examples of a surrogate, a network trained here on the model's labels, break"
AS_LABELS = "for 100.0 % of the images the logits are two different numbers alone, as a label is: no attack that"
NO_SLOPE = "of the images the gradient is not the slope of the logits: attacks along it climb another function than"


@pytest.mark.parametrize(
    ("kind", "causes"),
    [
        ("OneHotForeign", (SURROGATE, AS_LABELS, NO_SLOPE, "are exactly what they are at the image itself")),
        pytest.param(
            "OneHot",
            (AS_LABELS, "the gradient of the logits themselves is exactly zero for 100.0 %"),
            marks=pytest.mark.slow,
        ),
        pytest.param("Foreign", (NO_SLOPE,), marks=pytest.mark.slow),
        ("HashNoise", (NO_SLOPE,)),
        ("Backwards", (SURROGATE,)),
        pytest.param("RememberingForAll", ("are exactly what they are at the image itself",), marks=pytest.mark.slow),
    ],
)
def test_no_number_is_usable_of_a_model_that_hides_from_attacks(
    kind: str, causes: tuple[str, ...], folder: Path, checks: None
) -> None:
    code, out, err = call(*own(kind, eps="0.15", examples=40))
    assert (code, err) == (0, "")
    verdict = judged()["verdict"]
    assert verdict["word"] in ("overstated", "not shown")
    assert verdict["usable"] is False
    assert verdict["text"].endswith("; the worst case is no usable number")
    assert [cause for cause in causes if not any(cause in found for found in verdict["causes"])] == []
    assert f"\nverdict: {verdict['text']}\n{verdict['sentence']}\n" in out
    assert (
        f" The worst case, {100 * verdict['worst']:.1f} %, is no usable number, only an upper bou"
        in verdict["sentence"]
    )


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (
            "Remembering",
            "the answer depends on what the model was asked before: a freshly loaded copy answers otherwise",
        ),
        (
            "BatchStatistics",
            "the answer about an image depends on the other images of its batch, or on their order, for",
        ),
        (
            "Counting",
            "a freshly loaded copy, asked in another order and in other batches, answers otherwise about up to",
        ),
    ],
)
def test_an_answer_that_depends_on_more_than_the_image_decides_nothing(kind: str, cause: str, folder: Path) -> None:
    assert call(*own(kind, examples=60))[0] == 0
    verdict = judged()["verdict"]
    assert (verdict["word"], verdict["usable"]) == ("not shown", False)
    assert verdict["causes"][0].startswith(cause)
    assert verdict["sentence"].endswith("No number of such a model is usable.")


def test_an_image_that_only_a_fresh_copy_gets_wrong_is_broken(digits_model: nn.Module) -> None:
    """Whoever loads the model next is given that answer."""

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = digits_model(x)
            return logits.roll(1, dims=1)

    made = on_trial(digits_model, 20, fresh=lambda: Turned().eval())
    row = made.attack("fgsm", FGSM(FGSMOptions()))
    assert (row.disputed, row.accuracy, int(made.robust.sum())) == (20, 0.0, 0)


def test_the_surrogate_is_the_same_for_the_same_seed_and_asks_for_the_models_labels_alone(
    digits_model: nn.Module,
) -> None:
    """It never sees the true ones."""

    def weights(seed: int, scale: float = 1.0, turned: bool = False) -> list[torch.Tensor]:
        class Scaled(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = digits_model(x)
                return scale * logits.double()

        made = on_trial(Scaled().eval(), 12, seed=seed)
        data = made.task.data
        data = ImageData(data.x, data.y.flip(0) if turned else data.y)
        made = replace(made, task=replace(made.task, data=data))
        return list(trained_surrogate(made).state_dict().values())

    first = weights(0)
    assert all(map(torch.equal, first, weights(0, scale=7.0, turned=True)))
    assert not any(map(torch.equal, first, weights(1)))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 20), (1, 2, 2)])
def test_a_surrogate_takes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    channels, *size = shape
    assert network(channels, (size[0], size[1]), 7)(torch.zeros(2, *shape)).shape == (2, 7)


# --- units that no image wakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "most"), [("Planted", 0.1), ("PlantedForFour", 0.65)])
def test_a_planted_unit_is_woken(kind: str, most: float, folder: Path, checks: None) -> None:
    """No attack that follows a loss comes to where it turns the classes."""
    code, out, err = call(*own(kind))
    assert (code, err) == (0, "")
    content = judged()
    verdict, rows = content["verdict"], {check["check"]: check["rows"] for check in content["checks"]}
    (row,) = rows.pop("dead-units")
    others = [other["accuracy"] for other in (*rows["pgd"], *rows["losses"])]
    assert (row["accuracy"] < most, min(others) > 0.7) == (True, True)
    assert (verdict["word"], verdict["usable"]) == ("overstated", False)
    assert verdict["causes"][0].startswith("images that wake dead units (a ReLU whose input is below 0 for every image")
    assert "dead-units: waking " in out


def relu_in_place(z: torch.Tensor) -> torch.Tensor:
    kept = z.clone()
    nn.functional.relu(kept, inplace=True)
    return kept


class InOneFunction(torch.autograd.Function):
    """max(z, 0), as an operation of its own that says its gradient is 0."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return (z * 1.0).clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradients[0])


def by_index(z: torch.Tensor) -> torch.Tensor:
    index = torch.stack([torch.zeros_like(z), z], dim=1).argmax(dim=1)
    return nn.functional.embedding(index, torch.tensor([[0.0], [1.0]])).squeeze(1)


def by_attention(z: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros_like(z), 2000 * z], dim=1).softmax(dim=1)[:, 1]


def by_order(z: torch.Tensor) -> torch.Tensor:
    """Of two values that both vary among images, and the order of which does not."""
    other = torch.linspace(-5, 5, len(z))
    return (z + other > other).float()


SWITCHES = {
    "module": nn.ReLU(),
    "module in place": lambda z: nn.ReLU(inplace=True)(z.clone()),
    "function in place": relu_in_place,
    "method": lambda z: z.clone().relu_(),
    "clamp": lambda z: z.clamp(min=0),
    "clamp from above": lambda z: -(-z).clamp(max=0),
    "hardtanh": lambda z: nn.functional.hardtanh(z, 0.0, 1e3),
    "saturated from above": lambda z: 1 - nn.functional.hardtanh(1 - z, -1e3, 1.0),
    "maximum": lambda z: torch.maximum(torch.zeros_like(z), z),
    "where": lambda z: torch.where(z > 0, z, 0.0),
    "leaky": lambda z: nn.functional.leaky_relu(z, 1e-6),
    "silu": lambda z: nn.functional.silu(500 * z) / 500,
    "softplus": lambda z: nn.functional.softplus(z, beta=1000),
    "a sum": lambda z: z + z.abs(),
    "the largest of a stack": lambda z: torch.stack([z, torch.zeros_like(z)]).amax(dim=0),
    "a comparison": lambda z: (z > 0).float(),
    "a comparison of two": by_order,
    "a rounding": lambda z: torch.floor(z + 1).clamp(min=0),
    "an index": by_index,
    "attention": by_attention,
    "a function of autograd": InOneFunction.apply,
    "a value without gradient": lambda z: z.detach().relu(),
    "a sigmoid": lambda z: torch.sigmoid(4000 * z),
}


IN_CI = ("module", "function in place", "clamp", "where", "silu", "a comparison", "an index", "attention")
IN_CI += ("a function of autograd", "a value without gradient")


@pytest.mark.parametrize(
    "switch",
    [
        pytest.param(switch, id=name, marks=[] if name in IN_CI else [pytest.mark.slow])
        for name, switch in SWITCHES.items()
    ],
)
def test_every_way_to_write_a_unit_is_seen(switch: Any, digits_model: nn.Module) -> None:
    made = on_trial(planted(digits_model, Planted, switch), 40, threat=ThreatModel(eps=0.1), batch_size=100)
    (claim,) = CHECK["pgd"].run(made).rows
    (row,) = DeadUnits().run(made).rows
    assert claim.accuracy > 0.6 > 0.2 > row.accuracy


@pytest.mark.parametrize("kind", [PlantedTogether, pytest.param(PlantedBehind, marks=pytest.mark.slow)])
def test_units_that_must_wake_together_or_one_behind_the_other_are_woken(
    kind: type[Planted], digits_model: nn.Module
) -> None:
    made = on_trial(planted(digits_model, kind, None), 40, threat=ThreatModel(eps=0.1), batch_size=100)
    (claim,) = CHECK["pgd"].run(made).rows
    (row,) = DeadUnits().run(made).rows
    assert claim.accuracy > 0.6 > 0.4 > row.accuracy


def in_a_loop(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.stack([(image.flatten() @ w - t).relu() for image in x])


def in_chunks_side_by_side(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    parts = []
    for chunk in x.split(4):
        wide = torch.cat(chunk.unbind(0), dim=2)[None]
        parts.append((nn.functional.conv2d(wide, w.view(1, 1, 8, 8), stride=8) - t).relu().flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("gate", [in_a_loop, pytest.param(in_chunks_side_by_side, marks=pytest.mark.slow)])
def test_a_unit_is_woken_of_which_no_value_has_a_dimension_for_images(gate: Any, digits_model: nn.Module) -> None:
    class OutOfBatches(Planted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.net(x)
            return logits - 1e3 * gate(x, self.w, self.t)[:, None] * logits.detach().relu()

    made = on_trial(planted(digits_model, OutOfBatches, None), 40, threat=ThreatModel(eps=0.1), batch_size=100)
    (claim,) = CHECK["pgd"].run(made).rows
    (row,) = DeadUnits().run(made).rows
    assert claim.accuracy > 0.6 > 0.4 > row.accuracy


def planted(net: nn.Module, kind: type[Planted], switch: Any) -> nn.Module:
    model = kind(in_channels=1, image_size=(8, 8), num_classes=10)
    model.net, model.switch = net, switch
    return model.eval()


def test_a_model_in_torchscript_is_seen_into(digits_model: nn.Module) -> None:
    model = planted(digits_model, Planted, nn.ReLU())
    traced = torch.jit.trace(model, torch.zeros(2, 1, 8, 8))
    made = on_trial(traced, 40, threat=ThreatModel(eps=0.1), batch_size=100)
    (row,) = DeadUnits().run(made).rows
    assert row.accuracy < 0.2


def test_a_model_that_computes_gradients_itself_is_no_error(digits_model: nn.Module) -> None:
    """What it has freed has no gradient any more; random points show the way."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                torch.autograd.grad((point.exp() * point.sin()).sum(), point)
            logits: torch.Tensor = digits_model(x)
            return logits

    assert DeadUnits().run(on_trial(Inner().eval(), 20)).facts["dead"] < 0.5


@pytest.mark.parametrize("norm", ["linf", *(pytest.param(norm, marks=pytest.mark.slow) for norm in ("l2", "l1"))])
def test_of_an_honest_model_nothing_is_said(norm: Any, digits_model: nn.Module) -> None:
    """It has dead units as well, and what they break, if anything, are adversarial examples like others."""
    eps = {"linf": 0.1, "l2": 0.6, "l1": 2}[norm]
    made = on_trial(digits_model, 40, threat=ThreatModel(norm, eps))
    evidence = [CHECK[name].run(made) for name in ("answers", "gradients", "pgd", "losses", "dead-units")]
    assert 0 < evidence[-1].facts["dead"] < 0.5
    facts = judging_findings.overview_of(evidence, exact_text(made.task.threat.eps), 40)
    assert facts is not None
    assert list(DeadUnits().symptoms(evidence[-1].rows, facts)) == []


def test_of_a_model_without_units_nothing_is_said() -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    made = on_trial(linear, 100, threat=ThreatModel(eps="0.01"))  # type: ignore[arg-type]
    CHECK["pgd"].run(made)
    assert int(made.robust.sum()) > 0
    assert DeadUnits().run(made) == Findings("dead-units", (), {"dead": 0.0})


def test_the_search_asks_a_model_no_more_for_more_images(
    digits_model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond one pass for the ranges. Nothing counts as open here: in that case more is tried."""
    monkeypatch.setattr(dead_units, "LEAP", math.inf)
    effort = IN_BATCHES
    climbs = effort.images * effort.tried * (2 * STEPS + 2)
    hidden = 2 + 20  # whether a batch hides values
    most = effort.images * (3 * effort.draws + 2) + climbs + 5 * effort.looked_at * effort.measured + hidden
    for examples in (20, 100):
        made, images = on_trial(digits_model, examples, threat=ThreatModel(eps=0.1), batch_size=20), 0

        def count(module: nn.Module, args: tuple[torch.Tensor]) -> None:
            nonlocal images
            images += len(args[0])

        made.robust[20:] = False  # the search is on the first ones
        handle = digits_model.register_forward_pre_hook(count)
        worst_plans(made)
        handle.remove()
        assert examples < images <= examples + most


@pytest.mark.parametrize(("turned", "eps"), [(1, 0.1), (0, 1e-4)])
def test_no_check_asks_the_model_about_nothing(
    turned: int, eps: float, digits_model: nn.Module, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong about all images, and right about all within reach."""
    monkeypatch.setattr(questions, "MORE", 10)

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert len(x) > 0
            logits: torch.Tensor = digits_model(x)
            return logits

    made = on_trial(Picky().eval(), 4, threat=ThreatModel(eps=eps), surrogates={"other": Picky().eval()})
    x = made.task.data.x
    data = ImageData(x, (digits_model(x).argmax(dim=1) + turned) % 10)
    made = replace(made, task=replace(made.task, data=data))
    assert made.correct.all() if turned == 0 else not made.correct.any()
    for check in (*weak_battery(full=False, surrogates=True), replace(QUICK, examples=2)):
        check.run(made)


# --- continuing -------------------------------------------------------------------------------------------------------


def started(words: tuple[object, ...]) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "calfat_plugin.cli.main", "trust", *map(str, words), "--plain"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("check", "attack", "words"),
    [
        (10, "square1000", own("Quantised", "plain", examples=12)),
        (12, "autoattack", own("Honest", eps="0.15", examples=12)),
    ],
)
def test_a_battery_killed_inside_a_long_attack_continues_there(
    check: int, attack: str, words: tuple[object, ...], folder: Path
) -> None:
    """Square and AutoAttack keep what they broke, batch by batch."""
    words, file = (*words, "--batch-size", 4), str(words[3]).replace(".safetensors", "-trust.json")
    with started(words) as process:
        while len(states := list(folder.glob(".*-unfinished/autoattack-*.json"))) < (check - 8) // 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    state = json.loads(max(states, key=lambda path: path.stat().st_mtime_ns).read_text())
    assert state["position"] or state["batch"]  # something is done; what follows sees that something is left
    assert (judged(file)["finished"], len(judged(file)["checks"])) == (False, check - 1)
    assert "1" in (states[0].parent / f"{attack}.txt").read_text()
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert out.startswith(f"check {check} of 12: ")
    resumed = judged(file)
    assert not states[0].parent.exists()
    assert call(*words, "--output", "whole.json")[0] == 0
    assert numbers(resumed) == numbers(judged("whole.json"))


def test_a_battery_that_continues_keeps_what_was_broken(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no later attack breaks that image again."""
    words = own("Honest", eps="0.01", examples=4)
    with monkeypatch.context() as patch:
        patch.setattr(Noise, "craft", Mock(side_effect=KeyboardInterrupt))
        assert call(*words)[0] == 130
    file = Path("robust-trust.json")
    left = judged(str(file))["robust"].replace("1", "0", 1)
    assert "1" in left
    change_json(file, robust=left)
    assert call(*words)[0] == 0
    assert judged(str(file))["robust"] == left


def test_full_runs_what_a_clear_verdict_left_out(folder: Path, quick: None) -> None:
    words = own("Honest", "plain", eps="0.3", examples=12)
    assert call(*words)[0] == 0
    first = judged("plain-trust.json")
    assert call(*words, "--full")[0] == 0
    every = judged("plain-trust.json")
    assert every["checks"][:3] == first["checks"]
    assert len(every["checks"]) == 12
    assert (every["full"], every["verdict"]["word"]) == (True, "not robust")
    assert call(*words, "--full", "--output", "whole.json")[0] == 0
    assert numbers(judged("plain-trust.json")) == numbers(judged("whole.json"))
    for file in ("plain-trust", "whole"):
        names = {"model": "trust_models:Honest", "weights": "plain.safetensors", "dataset": "digits"}
        assert calfat.replay(f"{file}.evidence.safetensors", **names).stands
    os.utime("plain-trust.json", (0, 0))
    assert call(*words)[0] == 0
    again = judged("plain-trust.json")
    assert Path("plain-trust.json").stat().st_mtime > 0
    assert numbers(again) == numbers(every)


@pytest.mark.parametrize("attack", [DLR, ProbabilityMargin, CW])
def test_directions_of_the_losses_do_not_depend_on_the_scale_of_the_logits(attack: type[PGD]) -> None:
    logits = torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
    loss = attack(CWOptions()).loss
    directions = []
    for scale in (1e-3, 1.0, 1e3):
        z = (scale * logits).requires_grad_()
        (grad,) = torch.autograd.grad(loss(z, torch.arange(20) % 10), z)
        directions.append(nn.functional.normalize(grad.double()))
    wanted = directions[1]
    for found in directions[:1] + ([] if attack is CW else directions[2:]):  # beyond kappa, CW stops on purpose
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class StoppedError(Exception):
    """Stands for a kill in the middle of AutoAttack."""


def test_autoattack_remembers_what_a_killed_process_broke(
    digits_model: nn.Module, tmp_path: Path, few_targets: int
) -> None:
    check = AutoAttackCheck(None, iterations=3, queries=20)

    def fresh(scratch: Path) -> Trial:
        found = on_trial(digits_model, 30)
        found.scratch = scratch
        return found

    whole = fresh(tmp_path / "whole")
    (expected,) = check.run(whole).rows

    def stop(label: str, done: int, total: int, correct: int) -> None:
        if done > 30:  # the second sub-attack has begun
            raise StoppedError

    killed = fresh(tmp_path / "killed")
    killed.on_progress = stop
    with pytest.raises(StoppedError):
        check.run(killed)
    resumed = fresh(tmp_path / "killed")
    (row,) = check.run(resumed).rows
    assert (row.accuracy, row.left, row.examples) == (expected.accuracy, expected.left, 30)
    assert torch.equal(resumed.robust, whole.robust)
    assert row.left is not None
    assert 0 < row.accuracy <= row.left < 1


# --- a run directory --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(folder: Path, digits_model: nn.Module, plain_model: nn.Module) -> Path:
    """Two runs, ``run`` with the robust network and ``other`` with the plain one."""
    for name, model in {"run": digits_model, "other": plain_model}.items():
        run_of(model, RECIPE, Path(name), below="net.")
    return Path("run")


def test_the_number_of_an_adversarially_trained_run_holds_and_its_page_shows_why(
    run_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "FORMATS", {"svg": charts.FORMATS["svg"]})
    page = write_run_report(run_dir)
    assert "Whether the number may be believed" not in page.read_text(encoding="utf-8")
    words = (run_dir, "--examples", 80, "--transfer", "other")
    code, out, progress = call(*words, "--json")
    assert code == 0
    assert re.search(r"check . of 13: random noise\n", progress)
    assert re.search(r"^  pgd20  \d+\.\d %  \d+\.\d s$", progress, re.MULTILINE)
    content = judged("run/trust.json")
    assert json.loads(out) == {"file": "run/trust.json", "results": content}
    where = {"run": "run", "checkpoint": "run/checkpoints/last.safetensors", "round": 7}
    what = {"dataset": "digits", "examples": 80, "transfer": ["other"]}
    assert {**where, **what}.items() <= content.items()
    assert content["threat"] == {"norm": "linf", "eps": "0.1", "step_size": "0.025", "seed": 3, "batch_size": 500}
    (transfer,) = (check for check in content["checks"] if check["check"] == "transfer")
    assert [row["attack"] for row in transfer["rows"]] == ["pgd20 of other"]
    assert transfer["rows"][0]["accuracy"] > 0.5
    verdict, text = content["verdict"], page.read_text(encoding="utf-8")
    assert (verdict["word"], verdict["causes"]) == ("holds", [])
    assert verdict["natural"] > verdict["claimed"] >= verdict["worst"] > 0.5
    shown = calfat.replay(run_dir / "trust.evidence.safetensors")
    numbers = {number.label: number.shown for number in shown.numbers}
    assert (shown.stands, numbers) == (True, {"natural": verdict["natural"], "worst-case": verdict["worst"]})
    left = [row["left"] for check in content["checks"] for row in check["rows"] if row["left"] is not None]
    assert left == sorted(left, reverse=True)
    assert f"<strong>Verdict: {verdict['text']}.</strong> {verdict['sentence']}" in text
    assert "Checkpoint last, after round 7; 80 test images." in text
    drawn = (run_dir / "figures" / "trust_curve.svg").read_text()
    for label in ("pgd20", "0.05", "0.1", "0.2", "0.4", "linf"):
        assert label in drawn
    monkeypatch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert re.search(r"black-box: square200 +│ +\d+\.\d\d │ +\[\d+\.\d, \d+\.\d\] │ +\d+\.\d\d │", out)
    assert out.endswith(f"\nverdict: holds\n{verdict['sentence']}\nresults: run/trust.json\nreport: run/report.html\n")
    out = call(run_dir, "--examples", 10, "--eps", "0.4", "--output", "wide.json")[1]
    assert out.endswith("\nresults: wide.json\n")  # which is not on the page


@pytest.mark.parametrize(
    ("norm", "eps", "curve"),
    [pytest.param("l2", "0.5", ["0.25", "1", "2", "4"], marks=pytest.mark.slow), ("l1", "1", ["0.5", "2", "4", "32"])],
)
def test_every_check_attacks_in_the_norm_of_the_budget(
    norm: str, eps: str, curve: list[str], run_dir: Path, quick: None
) -> None:
    """In another norm the same eps would break everything (0.5 or 1 in linf), or nothing (1 in l1, read as l2)."""
    code, _, err = call(
        run_dir, "--norm", norm, "--eps", eps, "--transfer", "other", "--full", "--examples", 20, "--device", "cpu"
    )
    assert (code, err) == (0, "")
    content = judged("run/trust.json")
    rows = {check["check"]: check["rows"] for check in content["checks"]}
    assert len(rows) == 13
    assert [row["eps"] for row in rows.pop("budget")] == curve
    assert f"within {norm} {eps} (20 test images)" in content["verdict"]["sentence"]
    assert not any("grey" in cause for cause in content["verdict"]["causes"])
    alone = {row["attack"]: row["accuracy"] for attacks in rows.values() for row in attacks}
    assert 0.4 < content["verdict"]["worst"] <= min(alone.values()) <= alone["pgd20"] < content["verdict"]["natural"]
    assert {row["eps"] for attacks in rows.values() for row in attacks} == {eps}
    for row in rows["autoattack"]:
        assert row["interval"] == list(wilson(row["accuracy"], 20))
        assert row["left_interval"] == list(wilson(row["left"], 20))
    assert content["verdict"]["intervals"]["claimed"] == list(wilson(content["verdict"]["claimed"], 20))


def test_images_too_small_for_square_do_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subattacks, "_SQUARE_LEAST_HEIGHT", 9)
    code, out, err = call(*own("Honest", "plain", eps="3", examples=20), "--norm", "l2")
    said = "warning: AutoAttack runs without square: in L2 it needs images of 9 pixels a side, and these have 8.\n"
    assert (code, err, out.startswith("check 1 of 11: ")) == (0, said, True)
    assert "attack without gradients" not in out


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        own("Probabilities"),
        own("Honest", "nan"),
        own("Honest", "of-large-images"),
        own("Honest", eps="0"),
        ("run", "--transfer", "faces"),
        ("run", "--transfer", "nowhere"),
        ("run", "--output", "missing/trust.json"),
        (),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    arguments: tuple[object, ...], snapshot: TextSnapshot, run_dir: Path
) -> None:
    faces = RunDirectory(Path("faces"))
    faces.checkpoint("last").parent.mkdir(parents=True)
    faces.checkpoint("last").touch()
    faces.recipe.write_text(RECIPE.replace("digits", "mnist"))
    before = sorted(Path().rglob("*"))
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    snapshot(err.partition("groups=1, ")[0])  # what follows are torch's words
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before


def test_nan_is_no_class(folder: Path, snapshot: TextSnapshot) -> None:
    """An image whose logits are nan counted as class 0, so as right or wrong by chance."""
    code, _, err = call(*own("OnlyDigits", examples=20))
    assert code == 2
    snapshot(err)
    assert not Path("robust-trust.json").exists()


def test_a_verdict_on_another_question_is_kept(folder: Path, snapshot: TextSnapshot) -> None:
    assert call(*own("Honest", "plain", eps="0.3", examples=30))[0] == 0
    before = Path("plain-trust.json").read_bytes()
    code, _, err = call(*own("Honest", "plain", eps="0.2", examples=30))
    assert code == 2
    snapshot(err)
    assert Path("plain-trust.json").read_bytes() == before


@pytest.mark.parametrize(
    "text", ["my notes\n", "", "{}", '{\n  "name": "app"\n}\n', '{"format": 2, "evaluations": []}', None]
)
def test_a_file_of_something_else_is_kept(folder: Path, text: str | None) -> None:
    """A text, a JSON file, results of ``calfat attack``, a folder."""
    path = Path("mine.json")
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(RunError, match=r"^mine\.json: is there already, and calfat trust did not write it\."):
        examining.Record.open(path, "", {}, 30)
    assert text is None or path.read_text() == text


def test_a_damaged_record_is_refused(folder: Path) -> None:
    words = own("Honest", "plain", eps="0.3", examples=30)
    assert call(*words)[0] == 0
    content = judged("plain-trust.json")
    for changes, said in (
        ({"checks": [{"check": "pgd"}]}, "KeyError: 'rows'"),
        ({"robust": "01"}, "ValueError: 2 verd"),
    ):
        Path("plain-trust.json").write_text(json.dumps({**content, **changes}))
        code, _, err = call(*words)
        assert code == 2
        assert err.startswith(f"error: plain-trust.json: the file is damaged ({said}")


def test_an_attack_that_does_not_run_is_no_evidence() -> None:
    """Else all images would seem to withstand it."""

    class Idle(PGD):
        def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
            return EvaluationResult.without_number(label, "it wants more", settings={}, implementation="idle")

    trial = on_trial(CNNSmall(1, (8, 8), 10).eval(), 8)
    with pytest.raises(RunError, match=r"calfat trust: idle did not run \(it wants more\), so nothing can be judged"):
        trial.attack("idle", Idle(PGDOptions()))
