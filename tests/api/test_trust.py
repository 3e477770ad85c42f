"""``calfat_plugin.trust``: what ``calfat trust`` does, from Python."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import calfat_plugin as calfat
from calfat_plugin.cli.trust import trust as command
from tests import stored_models
from tests.snapshot import TextSnapshot

CONSOLE = {"plain", "json", "of_model"}  # options about what is printed; Python has the module itself


def test_its_arguments_are_the_options_of_the_command() -> None:
    def argument(name: str) -> str:
        return {"trust": "trust_plugins", "as_json": "json"}.get(name, name)

    options = {argument(str(option.name)) for option in command.params} - CONSOLE
    assert options | {"x", "y"} == set(inspect.signature(calfat.trust).parameters)


@pytest.fixture
def weights(tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Path:
    model: nn.Module = stored_models.stored_model("plain", pytestconfig.getoption("--weight-noise"))
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "plain.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "plain.safetensors"


def test_the_verdict_is_the_one_in_the_file(weights: Path) -> None:
    found = calfat.trust(model="cnn_small", weights=weights, dataset="digits", eps=0.3, examples=30, device="cpu")
    assert isinstance(found, calfat.Verdict)
    assert (found.word, found.usable) == ("not robust", True)
    written = json.loads((weights.parent / "plain-trust.json").read_text())
    assert written["verdict"] == json.loads(json.dumps(dataclasses.asdict(found)))
    assert (written["examples"], written["threat"]["eps"]) == (30, "0.3")
    again = calfat.trust(
        model="cnn_small", weights=str(weights), dataset="digits", eps="0.3", examples=30, device="cpu", output="o.json"
    )
    assert (again, Path("o.json").is_file()) == (found, True)


def test_a_fraction_computed_in_python_is_that_fraction(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("calfat_plugin.api.planned", lambda *words, **more: asked.update(more) or 1 / 0)
    for eps, step_size, same in ((8 / 255, 2 / 255, "2/255"), ("8/255", "eps/4", "eps/4")):
        with pytest.raises(ZeroDivisionError):
            calfat.trust(model="cnn_small", weights=weights, dataset="digits", eps=eps, step_size=step_size)
        assert (asked["eps"], asked["step_size"]) == (("8/255",), same)


def test_what_is_refused(snapshot: TextSnapshot, weights: Path) -> None:
    for words in (("nowhere",), ()):
        with snapshot.raises(calfat.CalfatError):
            calfat.trust(*words)
    for examples in (-3, 0, True, 30.0, "x"):
        with pytest.raises(calfat.OptionError, match=f"^examples={examples!r}: expected a whole number of test images"):
            calfat.trust(model="cnn_small", weights=weights, dataset="digits", eps=0.3, examples=examples)  # type: ignore[arg-type]
    assert [path.name for path in weights.parent.iterdir()] == ["plain.safetensors"]


@pytest.mark.parametrize("kind", [str, Path])
def test_one_path_need_not_stand_in_a_list(kind: type, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(calfat.PluginError, match=r"^--plugin margin_fat\.py: no such file\.$"):
        calfat.trust(model="cnn_small", weights=weights, dataset="digits", plugins=kind("margin_fat.py"))
    asked: list[Any] = []
    monkeypatch.setattr("calfat_plugin.api.examine", lambda plan, transfer, **more: asked.append(transfer) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calfat.trust(model="cnn_small", weights=weights, dataset="digits", eps=0.3, transfer=kind("runs/a"))
    assert asked == [(Path("runs/a"),)]


# --- a module in memory -----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts how often it is asked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.asked = model, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        logits: torch.Tensor = self.model(x)
        return logits


@pytest.fixture
def module(pytestconfig: pytest.Config) -> nn.Module:
    return Counting(stored_models.stored_model("plain", pytestconfig.getoption("--weight-noise"))).eval()


def test_a_module_has_the_verdict_of_its_weights_on_disk(
    module: nn.Module, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digits, how = calfat.load_dataset("digits"), {"eps": 0.3, "examples": 30, "seed": 3, "batch_size": 20}
    before = torch.random.get_rng_state()
    of_file: Any = {"model": "cnn_small", "weights": weights, "dataset": "digits", "output": "disk.json"}
    expected = calfat.trust(**of_file, device="cpu", **how)
    assert calfat.trust(module, digits, **how) == expected
    names = [path.name for path in sorted(Path().iterdir())]
    assert names == ["disk.evidence.safetensors", "disk.json", "plain.safetensors"]
    arrays = digits.test.x.numpy(), digits.test.y.numpy()
    found = calfat.trust(module, *arrays, **how, output="memory.json")
    assert (found.claimed, found.natural) == (expected.claimed, expected.natural)
    written = json.loads(Path("memory.json").read_text())
    assert (written["model"], written["examples"], written["seed"]) == ("Counting", 30, 3)
    assert calfat.trust(module, *arrays, **how, output="memory.json") == found
    assert capsys.readouterr() == ("", "")
    assert (module.asked, torch.equal(torch.random.get_rng_state(), before)) == (0, True)


class StopError(Exception):
    """Instead of the first check."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a model is tried on; nothing is done with it."""
    found: dict[str, Any] = {}

    def trial(task: Any, surrogates: Any, fresh: Any, more: Any) -> None:
        found.update(vars(task), surrogates=surrogates, fresh=fresh, more=more)
        raise StopError

    monkeypatch.setattr("calfat_plugin.judging.trial.Trial", trial)
    return found


def test_what_a_module_is_tried_on(module: nn.Module, asked: dict[str, Any]) -> None:
    digits = calfat.load_dataset("digits")
    of_numpy: dict[str, Any] = {"examples": np.int64(100), "seed": np.int64(5), "batch_size": np.int64(7)}
    with pytest.raises(StopError):
        calfat.trust(module, digits.test, eps=8 / 255, norm="l2", step_size="eps/8", **of_numpy)
    threat = asked["threat"]
    assert (threat.norm, str(threat.eps), str(threat.step_size)) == ("l2", "8/255", "1/255")
    assert [asked[name] for name in ("seed", "batch_size", "num_classes", "surrogates")] == [5, 7, 10, {}]
    assert (len(asked["data"]), len(asked["more"])) == (100, 259)
    both = torch.cat([asked["data"].x, asked["more"].x]).flatten(1)
    assert torch.equal(both.unique(dim=0), digits.test.x.flatten(1).unique(dim=0))
    copies = {id(each) for each in (module, asked["model"], asked["fresh"](), asked["fresh"]())}
    assert (len(copies), asked["fresh"]().asked) == (4, 0)
    with pytest.raises(StopError):
        calfat.trust(module, digits.test, eps=0.1)
    assert (len(asked["data"]), asked["more"], asked["seed"], asked["batch_size"]) == (359, None, 0, 500)
    with pytest.raises(calfat.CalfatError, match=r"calfat\.evaluation\.batch_size: got 0"):
        calfat.trust(module, digits.test, eps=0.1, batch_size=0)
    for examples in (100, None):
        with pytest.raises(StopError):
            calfat.trust(module, digits, eps=0.1, examples=examples)
        assert asked["more"] is digits.train
    many = calfat.ImageData(np.zeros((501, 1, 8, 8)), np.zeros(501, int))
    with pytest.raises(StopError):
        calfat.trust(module, many, eps=0.1)
    assert (len(asked["data"]), len(asked["more"])) == (500, 1)


def test_other_models_for_a_module_are_loaded_from_disk(module: nn.Module, asked: dict[str, Any]) -> None:
    with pytest.raises(calfat.RunError, match=r"^nowhere: no such checkpoint or run directory\.$"):
        calfat.trust(module, calfat.load_dataset("digits").test, eps=0.1, transfer="nowhere")


class Uncopied(nn.Module):
    """Refuses to be copied."""

    def __deepcopy__(self, memo: object) -> None:
        raise RuntimeError("no copies")


@pytest.mark.parametrize(
    "changes",
    [
        {"x": None},
        {"eps": None},
        {"eps": 0},
        {"device": "cpu"},
        {"checkpoint": "last"},
        {"plugins": "mine.py"},
        {"download": True},
        {"target": "runs/digits"},
        {"target": Uncopied().eval()},
        {"target": nn.Identity()},
        {"target": 3},
        {"y": [1]},
    ],
    ids=lambda each: " ".join(
        f"{key}={getattr(value, '__name__', type(value).__name__)}" for key, value in each.items()
    ),
)
def test_what_is_refused_of_a_module(
    changes: dict[str, Any], module: nn.Module, snapshot: TextSnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"target": module, "x": calfat.load_dataset("digits").test, "eps": 0.1, **changes}
    with snapshot.raises(calfat.CalfatError):
        calfat.trust(how.pop("target"), **how)
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_torchscript_is_judged_as_the_one_it_was_made_of(pytestconfig: pytest.Config) -> None:
    model: nn.Module = stored_models.stored_model("plain", pytestconfig.getoption("--weight-noise")).eval()
    data = calfat.load_dataset("digits").test
    scripted = torch.jit.trace(model, data.x[:2])
    arguments: dict[str, Any] = {"eps": 0.3, "examples": 20}
    assert calfat.trust(scripted, data, **arguments).word == calfat.trust(model, data, **arguments).word
