"""``calfat replay``: what it confirms, which forged evidence it refuses, and which numbers do not stand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from calfat_plugin.evaluators.evidence import Evidence, read_evidence, write_evidence
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs.checkpoints import save_checkpoint
from tests.cli.runner import calfat
from tests.evaluators.stored import run_of

RECIPE = """\
common_args: {training_type: simulation, random_seed: 3}
data_args: {dataset: digits}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 1}
calfat:
  trainer: standard
  threat: {norm: linf, eps: 0.1}
  evaluation: {batch_size: 50}
  runtime: {threads: 1}
"""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, cnn_small: nn.Module) -> Path:
    """A run directory that was attacked: 100 test images, fgsm and pgd5, linf 0.1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("replay"))
        run_of(cnn_small, RECIPE, Path("run"), round=1)
        done = calfat("attack", "run", "--attacks", "fgsm,pgd5", "--examples", 100)
        assert done.code == 0, done
        return Path("run").resolve()


@pytest.fixture
def file(attacked: Path, tmp_path: Path) -> Path:
    """The evidence, in a copy of the run directory of its own."""
    import shutil

    shutil.copytree(attacked, tmp_path / "run")
    return tmp_path / "run" / "attacks" / "last.evidence.safetensors"


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_all_numbers_are_confirmed(file: Path) -> None:
    done = calfat("replay", file, "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["stands"]
    assert found["doubts"] == []
    assert [number["label"] for number in found["numbers"]] == ["natural", "fgsm", "pgd5", "worst-case"]
    for number in found["numbers"]:
        assert (number["said"], number["num_examples"], number["checked"]) == (number["shown"], 100, 100)
    assert found["images"] == found["fall"] > 0


def test_a_run_of_another_machine_is_confirmed_here(tmp_path: Path) -> None:
    """`make run` on an AMD EPYC with AVX-512; whatever differs on this processor is a matter of rounding."""
    import shutil

    shutil.copytree(Path(__file__).with_name("run_of_another_machine"), tmp_path / "run")
    done = calfat("replay", tmp_path / "run", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["stands"]
    assert [number["label"] for number in found["numbers"]] == ["natural", "fgsm", "bim", "pgd20", "worst-case"]
    assert [number["checked"] for number in found["numbers"]] == [359] * 5
    assert found["images"] == 117
    assert all(doubt["borderline"] for doubt in found["doubts"])


def test_the_worst_case_counts_what_withstands_every_attack(file: Path) -> None:
    evidence = read_evidence(file)
    rows = {row["label"]: row for row in json.loads(file.with_name("last.json").read_text())["evaluations"]}
    robust = evidence.correct & ~evidence.broken["fgsm"] & ~evidence.broken["pgd5"]
    assert rows["worst-case"]["accuracy"] == int(robust.sum()) / 100
    settings = {"norm": "linf", "eps": "0.1", "attack": "worst-case", "attacks": ["fgsm", "pgd5"]}
    assert rows["worst-case"]["settings"] == settings
    assert rows["worst-case"]["accuracy"] <= min(rows["fgsm"]["accuracy"], rows["pgd5"]["accuracy"])


def test_the_first_attack_that_broke_an_image_is_named(file: Path) -> None:
    evidence = read_evidence(file)
    for row, at in enumerate(evidence.index.tolist()):
        first = next(name for name in evidence.attacks if bool(evidence.broken[name][at]))
        assert evidence.attacks[int(evidence.by[row])] == first
        assert int(evidence.prediction[row]) != int(evidence.label[at])


def test_without_room_there_is_no_evidence(attacked: Path, tmp_path: Path) -> None:
    recipe = attacked / "recipe.yaml"
    text = recipe.read_text()
    try:
        recipe.write_text(text.replace("evidence_mb: 16", "evidence_mb: 0"))
        assert calfat("attack", attacked, "--attacks", "fgsm", "--output", tmp_path / "none.json").code == 0
    finally:
        recipe.write_text(text)
    assert json.loads((tmp_path / "none.json").read_text())["evidence"] == []
    assert not list(tmp_path.glob("*.safetensors"))


def test_pictures_are_written_and_counted_with_8_bits(file: Path, tmp_path: Path) -> None:
    done = calfat("replay", file, "--png", tmp_path / "png", "--json")
    found = json.loads(done.out)
    assert len(list((tmp_path / "png").glob("*.png"))) == 3 * found["images"]
    assert 0 < found["fall_with_8_bits"] <= found["images"]


# --- forged evidence --------------------------------------------------------------------------------------------------


def changed(name: str, change: Callable[[torch.Tensor], None]) -> Callable[[Evidence], Evidence]:
    """The evidence with a copy of a tensor that ``change`` writes to."""

    def forge(evidence: Evidence) -> Evidence:
        tensor = getattr(evidence, name).clone()
        change(tensor)
        return replace(evidence, **{name: tensor})

    return forge


def fact(**facts: Any) -> Callable[[Evidence], Evidence]:
    """The evidence with other facts."""
    return lambda evidence: replace(evidence, facts={**evidence.facts, **facts})


def one_pixel(excess: float) -> Callable[[Evidence], Evidence]:
    """A pixel that is 0 in the clean image goes ``excess`` times eps up."""

    def forge(evidence: Evidence) -> Evidence:
        x_adv = evidence.x_adv.clone()
        x_adv[0, 0, 0, 0] = 0.1 * excess
        return replace(evidence, x_adv=x_adv)

    return forge


def not_covered(evidence: Evidence) -> Evidence:
    return replace(evidence, covered=evidence.covered[evidence.covered != evidence.index[0]])


def of_a_wrong_image(evidence: Evidence) -> Evidence:
    wrong = int((~evidence.correct).nonzero()[0])
    index = evidence.index.clone()
    index[index > wrong][:1] = wrong
    order = torch.cat([evidence.index, torch.tensor([wrong])]).sort().values
    more = {name: torch.cat([getattr(evidence, name), getattr(evidence, name)[:1]]) for name in ("by", "prediction")}
    return replace(evidence, index=order, x_adv=torch.cat([evidence.x_adv, evidence.x_adv[:1]]), **more)


FORGED: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "beyond eps": (one_pixel(1.001), "left the linf ball of eps 0.1"),
    "below the pixel range": (one_pixel(-0.001), "left the pixel range [0, 1]"),
    "nan": (changed("x_adv", lambda x: x[0].fill_(torch.nan)), "nan or inf"),
    "images swapped": (changed("x_adv", lambda x: x.copy_(x.flip(0))), "left the linf ball"),
    "labels swapped": (changed("label", lambda y: y.copy_(y.roll(1))), "says that image"),
    "another model": (fact(weights="0" * 64), "other weights"),
    "other data": (fact(data="0" * 64), "other test images"),
    "a wider ball": (fact(eps="0.2"), "last.json says {'norm': 'linf', 'eps': '0.1'}"),
    "no ball": (fact(norm="l3"), "its ball is l3 0.1"),
    "no eps": (fact(eps=None), "its ball is linf None"),
    "an image twice": (changed("index", lambda index: index[1:2].copy_(index[:1])), "`index` is not ascending"),
    "an image too many": (changed("covered", lambda at: at[-1:].fill_(100)), "`covered` holds 100; expected 0 to 99"),
    "a negative position": (changed("index", lambda at: at[:1].fill_(-1)), "`index` holds -1"),
    "an attack that is not there": (changed("by", lambda by: by[:1].fill_(2)), "`by` holds 2; expected 0 to 1"),
    "an image that is not covered": (not_covered, "which is not covered"),
    "an image that was wrong when clean": (of_a_wrong_image, "was wrong when clean"),
    "other clean images": (changed("x_shown", lambda x: x[0].fill_(0.5)), "its clean images"),
    "another type": (lambda e: replace(e, x_adv=e.x_adv.double()), "`x_adv` is torch.float64"),
    "another size": (lambda e: replace(e, x_adv=e.x_adv[..., :7], x_shown=e.x_shown[..., :7]), "its images are"),
    "fewer labels": (lambda e: replace(e, label=e.label[:-1]), "`clean` has 100 where N is 99"),
    "names that are no texts": (lambda e: replace(e, attacks=(1, 2)), "names of attacks"),  # type: ignore[arg-type]
    "attacks of the same name": (lambda e: replace(e, attacks=("fgsm", "fgsm")), "names of attacks"),
    "an attack without a name": (lambda e: replace(e, attacks=("fgsm",)), "not among `attacks`"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_evidence_is_refused(file: Path, forgery: str) -> None:
    forge, text = FORGED[forgery]
    write_evidence(file, forge(read_evidence(file)))
    refused(file, text)


def refused(file: Path, text: str = "") -> None:
    done = calfat("replay", file)
    assert done.code == 2
    assert str(file) in done.err
    assert text in done.err
    assert "Traceback" not in done.out + done.err


def empty(file: Path) -> None:
    file.write_bytes(b"")


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def a_byte_of_an_image(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def a_billion_images(file: Path) -> None:
    header = json.dumps({"x_adv": {"dtype": "F32", "shape": [10**9, 1, 8, 8], "data_offsets": [0, 256 * 10**9]}})
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(256))


def a_pickle(file: Path) -> None:
    torch.save({"x_adv": torch.zeros(1)}, file)


def no_facts(file: Path) -> None:
    save_file(load_file(file), file)


def an_extra_tensor(file: Path) -> None:
    save_file({**load_file(file), "more": torch.zeros(1)}, file)


@pytest.mark.parametrize(
    "damage", [truncated, a_byte_of_an_image, a_billion_images, a_pickle, no_facts, an_extra_tensor, Path.unlink, empty]
)
def test_a_damaged_file_is_refused(file: Path, damage: Callable[[Path], None]) -> None:
    damage(file)
    refused(file)


# --- numbers that do not stand ----------------------------------------------------------------------------------------


def edited(file: Path, label: str, **values: object) -> None:
    """The results beside the evidence say something else of an evaluator."""
    results = file.with_name("last.json")
    content = json.loads(results.read_text())
    next(row for row in content["evaluations"] if row["label"] == label).update(values)
    results.write_text(json.dumps(content))


def a_better_number(file: Path) -> None:
    edited(file, "pgd5", accuracy=0.9)


def more_examples(file: Path) -> None:
    edited(file, "pgd5", num_examples=359)


def other_classes(file: Path) -> None:
    edited(file, "pgd5", per_class=[1.0] * 10)


def a_clean_image_as_proof(file: Path) -> None:
    evidence = read_evidence(file)
    at = next(at for at in evidence.index.tolist() if at in evidence.shown)
    x_adv = evidence.x_adv.clone()
    x_adv[evidence.index == at] = evidence.x_shown[evidence.shown == at]
    write_evidence(file, replace(evidence, x_adv=x_adv))


def more_broken_than_shown(file: Path) -> None:
    evidence = read_evidence(file)
    at = int(evidence.withstand(["fgsm", "pgd5"])[1].nonzero()[0])
    evidence.broken["pgd5"][at] = True
    for label in ("pgd5", "worst-case"):
        right = evidence.verdicts(label)[1]
        per_class = [float(right[evidence.label == c].float().mean(dtype=torch.float64)) for c in range(10)]
        edited(file, label, accuracy=int(right.sum()) / 100, per_class=per_class)
    write_evidence(file, evidence)


def clean_images_that_are_not_right(file: Path) -> None:
    evidence = read_evidence(file)
    clean = evidence.clean.clone()
    at = int((~evidence.correct).nonzero()[0])
    clean[at] = evidence.label[at]
    edited(file, "natural", accuracy=(int(evidence.correct.sum()) + 1) / 100)
    write_evidence(file, replace(evidence, clean=clean))


@pytest.mark.parametrize(
    ("lie", "labels", "text"),
    [
        (a_better_number, {"pgd5"}, ""),
        (more_examples, {"pgd5"}, ""),
        (other_classes, {"pgd5"}, ""),
        (a_clean_image_as_proof, None, "whose adversarial image does not fall"),
        (more_broken_than_shown, {"pgd5", "worst-case"}, "of which no adversarial image is there"),
        (clean_images_that_are_not_right, None, "another class than the evidence when clean"),
    ],
)
def test_a_number_that_is_not_shown_does_not_stand(
    file: Path, lie: Callable[[Path], None], labels: set[str] | None, text: str
) -> None:
    lie(file)
    done = calfat("replay", file)
    assert done.code == 1
    assert text in done.out
    found = json.loads(calfat("replay", file, "--json").out)
    fallen = {number["label"] for number in found["numbers"] if not number["stands"]}
    assert not found["stands"]
    assert fallen == labels if labels else fallen


def test_an_image_falls_whichever_wrong_class_it_is_taken_for(file: Path) -> None:
    evidence = read_evidence(file)
    label = evidence.label[evidence.index]
    others = torch.stack([(label + 1) % 10, (label + 2) % 10])
    prediction = others[0].where(others[0] != evidence.prediction, others[1])
    write_evidence(file, replace(evidence, prediction=prediction))
    found = json.loads(calfat("replay", file, "--json").out)
    assert found["stands"]
    assert (found["fall"], found["doubts"]) == (found["images"], [])


def other_weights(run: Path) -> Path:
    last = run / "checkpoints" / "last.safetensors"
    state = {name: tensor + 0.5 for name, tensor in load_file(last).items()}
    save_checkpoint(last, Snapshot(1, state), {})
    return run / "attacks" / "last.evidence.safetensors"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (other_weights, ("other weights", "--checkpoint")),
        (lambda run: run, ("evidence_mb: 0",)),
        (lambda run: run / "attacks", ("no such file",)),
    ],
    ids=["of another checkpoint", "none", "folder"],
)
def test_evidence_that_is_of_another_checkpoint_or_not_there_is_said(
    file: Path, named: Callable[[Path], Path], said: tuple[str, ...]
) -> None:
    done = calfat("replay", named(file.parent.parent))
    assert done.code == 2
    assert all(words in done.err for words in said)
