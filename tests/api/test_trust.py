"""``calfat_plugin.trust``: what ``calfat trust`` does, from Python."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import nn

import calfat_plugin as calfat
from calfat_plugin.cli.trust import trust as command
from tests import stored_models
from tests.snapshot import TextSnapshot

CONSOLE = {"plain", "json"}  # options about what is printed


def test_its_arguments_are_the_options_of_the_command() -> None:
    def argument(name: str) -> str:
        return {"trust": "trust_plugins", "as_json": "json"}.get(name, name)

    options = {argument(str(option.name)) for option in command.params} - CONSOLE
    assert options == set(inspect.signature(calfat.trust).parameters)


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


@pytest.mark.parametrize("words", [("nowhere",), ()])
def test_what_is_refused(words: tuple[str, ...], snapshot: TextSnapshot, weights: Path) -> None:
    with snapshot.raises(calfat.CalfatError):
        calfat.trust(*words)


@pytest.mark.parametrize("kind", [str, Path])
def test_one_path_need_not_stand_in_a_list(kind: type, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(calfat.PluginError, match=r"^--plugin margin_fat\.py: no such file\.$"):
        calfat.trust(model="cnn_small", weights=weights, dataset="digits", plugins=kind("margin_fat.py"))
    asked: list[Any] = []
    monkeypatch.setattr("calfat_plugin.api.examine", lambda plan, transfer, **more: asked.append(transfer) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calfat.trust(model="cnn_small", weights=weights, dataset="digits", eps=0.3, transfer=kind("runs/a"))
    assert asked == [(Path("runs/a"),)]


@pytest.mark.parametrize("examples", [-3, 0, True, 30.0, "x"])
def test_a_number_of_images_that_is_none_is_refused(examples: Any, weights: Path) -> None:
    with pytest.raises(calfat.OptionError) as refused:
        calfat.trust(model="cnn_small", weights=weights, dataset="digits", eps=0.3, examples=examples)
    assert str(refused.value) == f"examples={examples!r}: expected a whole number of test images, 1 or more."
    assert [path.name for path in weights.parent.iterdir()] == ["plain.safetensors"]
