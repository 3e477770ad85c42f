"""Transfer: the source's images, its digest, when it is loaded, and what is said of a source that is no good."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import calfat_plugin
from calfat_plugin.errors import CalfatError, RecipeError, RunError
from calfat_plugin.evaluators.gradient import PGDOptions
from calfat_plugin.evaluators.transfer import FromModel
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.attacks import gradient_ascent
from calfat_plugin.maths.losses import cross_entropy
from calfat_plugin.models.base import ImageClassifier
from calfat_plugin.seeds import generator
from calfat_plugin.testing import check_evaluator
from calfat_plugin.testing.evaluators import balanced_model
from calfat_plugin.testing.tiny import NUM_CLASSES, TinyModel, answered, balanced_images
from calfat_plugin.threat import ThreatModel
from tests.cli.runner import calfat
from tests.snapshot import TextSnapshot

RECIPE = """\
common_args: {training_type: simulation, random_seed: 0}
data_args: {dataset: digits, max_train_examples: 60, max_test_examples: 20}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, client_num_per_round: 2, comm_round: 1, batch_size: 16, learning_rate: 0.05}
calfat:
  trainer: fedpgd
  threat: {eps: 0.1, steps: 1, step_size: eps}
  evaluators: [natural, pgd2]
  monitor: {evaluators: [natural]}
"""
NET = f"{__name__}:balanced"


def balanced(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    return balanced_model()


def smaller(in_channels: int, image_size: tuple[int, int], num_classes: int) -> ImageClassifier:
    return TinyModel(channels=2, side=image_size[0], classes=num_classes, norm=True)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    torch.save(balanced_model().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, without its page."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "source.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")
        calfat_plugin.run(folder / "source.yaml", run_dir=folder / "run", progress=False)
    return folder / "run"


def test_it_keeps_the_contract(weights: Path) -> None:
    check_evaluator("transfer", source=str(weights), model=NET, steps=10)


@pytest.mark.parametrize("options", [{"restarts": 2}, {"start": "x", "logit_scale": 2.0}, {"norm": "l2", "eps": 0.3}])
def test_from_the_same_model_it_is_pgd(weights: Path, options: dict[str, Any]) -> None:
    """Image by image and bit by bit: the same label draws the same starts."""
    model, data = balanced_model().eval(), balanced_images()
    own = {"name": "pgd5", "label": "attack", **options}
    other = {"name": "transfer5", "label": "attack", "source": str(weights), "model": NET, **options}
    found = [calfat_plugin.attack(pick, model, data, eps=0.1, batch_size=5) for pick in (own, other)]
    assert torch.equal(*found)
    first, second = (calfat_plugin.evaluate(model, data, None, [pick], eps=0.1)["attack"] for pick in (own, other))
    assert (first.per_class, first.per_class_release) == (second.per_class, second.per_class_release)
    assert first.details == second.details


def test_the_images_are_those_of_the_source_and_the_verdicts_of_the_model(weights: Path) -> None:
    model, data = TinyModel(5, side=8, norm=True).eval(), balanced_images()
    pick = {"name": "transfer5", "label": "attack", "source": str(weights), "model": NET}
    crafted = calfat_plugin.attack(pick, model, data, eps=0.1)
    assert torch.equal(
        crafted, calfat_plugin.attack({"name": "pgd5", "label": "attack"}, balanced_model().eval(), data, eps=0.1)
    )
    result = calfat_plugin.evaluate(model, data, None, [pick], eps=0.1)["attack"]
    with torch.no_grad():
        right = model(crafted).argmax(dim=1) == data.y
    assert result.accuracy_release == float(right.double().mean())


def test_each_start_is_tried_on_what_the_measured_model_withstood(weights: Path) -> None:
    """By hand, from the same starts: that all images fool the source at once says nothing of the model."""
    source, model = balanced_model().eval(), TinyModel(5, side=8, norm=True)
    data, threat, noise = answered(model), ThreatModel(eps="0.2"), generator(0, "evaluate/attack")
    wanted, left, fell = data.x, torch.ones(len(data), dtype=torch.bool), []
    for _ in range(3):
        points = gradient_ascent(
            source,
            data.x,
            lambda logits: cross_entropy(logits, data.y, reduction="sum"),
            threat=threat,
            steps=5,
            step_size=float(threat.step_size),
            start=threat.random_start(data.x, noise),
        )
        wanted = points.where(left[:, None, None, None], wanted)
        with torch.no_grad():
            assert (source(points).argmax(dim=1) != data.y).all()
            withstand = left & (model(points).argmax(dim=1) == data.y)
        fell.append(int(left.sum() - withstand.sum()))
        left = withstand
    assert min(fell) > 0
    pick = {"name": "transfer5", "label": "attack", "source": str(weights), "model": NET, "restarts": 3}
    assert torch.allclose(calfat_plugin.attack(pick, model, data, eps=0.2), wanted, atol=1e-6)
    assert calfat_plugin.evaluate(model, data, None, [pick], eps=0.2)["attack"].accuracy == int(left.sum()) / len(data)


def test_a_run_has_the_digest_of_its_source(source: Path, tmp_path: Path, no_page: None) -> None:
    """In its recipe and in the result's settings; and the source is a run whose own recipe says what model it is."""
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("[natural, pgd2]", f"[natural, {{name: transfer2, source: {source}}}]"))
    calfat_plugin.run(path, run_dir=tmp_path / "run", progress=False)
    (result,) = json.loads((tmp_path / "run" / "results.json").read_text())["evaluations"][1:]
    settings = result["settings"]
    assert (settings["attack"], settings["source"], settings["steps"]) == ("transfer", str(source), 2)
    assert f"sha256: {settings['source_sha256']}" in (tmp_path / "run" / "recipe.yaml").read_text()
    done = calfat("attack", str(tmp_path / "run"), "--attacks", "transfer2", "--set", f"transfer2.source={source}")
    assert done.code == 0, done.err
    (again,) = json.loads((tmp_path / "run" / "attacks" / "last.json").read_text())["evaluations"][1:]
    assert {key: again["settings"][key] for key in settings} == settings


def damaged(copy: Path) -> None:
    checkpoint = copy / "checkpoints" / "last.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-5] ^= 1
    checkpoint.write_bytes(content)


def of_other_data(copy: Path) -> None:
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("dataset: digits", "dataset: mnist"))


#: (source, model, what is done to a copy of the good source, the error)
REFUSED: dict[str, tuple[str, str, Any, type[CalfatError]]] = {
    "a run that is not there": ("gone", "", None, RunError),
    "weights that are not there": ("gone.pt", NET, None, RunError),
    "weights without their model": ("weights.pt", "", None, RunError),
    "weights of another model": ("weights.pt", f"{__name__}:smaller", None, calfat_plugin.ModelError),
    "damaged": ("copy", "", damaged, RunError),
    "a run of another data set": ("copy", "", of_other_data, RunError),
    "no source": ("", "", None, RecipeError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_source_is_refused_before_the_first_round(
    what: str, source: Path, weights: Path, tmp_path: Path, snapshot: TextSnapshot
) -> None:
    name, model, change, error = REFUSED[what]
    if change is not None:
        shutil.copytree(source, tmp_path / "copy")
        change(tmp_path / "copy")
    pick = (
        f"{{name: transfer, source: {tmp_path / name}{f', model: {model!r}' if model else ''}}}" if name else "transfer"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("[natural, pgd2]", f"[natural, {pick}]"))
    with snapshot.raises(error, f"{path}:8: calfat.evaluators[1]"):
        calfat_plugin.run(path, run_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "rounds.csv").exists()


def test_a_run_goes_on_with_the_source_that_it_was_started_with(
    source: Path, tmp_path: Path, snapshot: TextSnapshot, monkeypatch: pytest.MonkeyPatch, no_page: None
) -> None:
    """Whether it is resumed with the user's recipe, or with its own."""
    copy, path, run = tmp_path / "copy", tmp_path / "mine.yaml", tmp_path / "run"
    shutil.copytree(source, copy)
    pick = f"{{name: transfer2, source: {copy}}}"
    path.write_text(RECIPE.replace("[natural, pgd2]", f"[natural, {pick}]"))
    with monkeypatch.context() as patch:
        patch.setattr("calfat_plugin.federation.server.Server.final_evaluation", _stopped)
        with pytest.raises(KeyboardInterrupt):
            calfat_plugin.run(path, run_dir=run, progress=False)
    checkpoint = copy / "checkpoints" / "last.safetensors"
    kept = checkpoint.read_bytes()
    checkpoint.write_bytes(kept + b" ")
    contents = {"before": kept, "now": kept + b" "}
    digests = {name: sha256(content).hexdigest() for name, content in contents.items()}
    hidden = {**digests, **{f"{name} in short": digest[:12] for name, digest in digests.items()}}
    for recipe in (path, run / "recipe.yaml"):
        with snapshot.raises(RunError, "sha256" if recipe == path else "SHA-256", **hidden):
            calfat_plugin.run(recipe, run_dir=run, resume=True, progress=False)
    checkpoint.write_bytes(kept)
    assert calfat_plugin.run(path, run_dir=run, resume=True, progress=False).results["transfer2"].num_examples == 20


def _stopped(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_source_without_a_finite_point_gives_no_number(make_task: Callable[..., EvaluationTask]) -> None:
    """Its images are the clean ones, on which accuracy is the natural one."""
    source, model, data = balanced_model().eval(), balanced_model().eval(), balanced_images()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.fill_(float("nan"))
    task = make_task(model, data, num_classes=NUM_CLASSES)
    result = FromModel(PGDOptions(steps=2, norm="l2", eps=Fraction("0.3"), restarts=2), source).evaluate(
        task, "outside"
    )
    assert (result.accuracy, result.num_examples) == (None, 0)
    assert result.not_run == "its source gave no finite point for any image, so there was nothing to attack with"
    assert "usable points" not in result.details
