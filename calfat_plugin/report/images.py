"""Test images as PNG, and strips of them: clean image, perturbation, adversarial image."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.errors import RunError
from calfat_plugin.report.numbers import unbroken_percent
from calfat_plugin.results import EVIDENCE, WORST_CASE

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.evaluators.evidence import Evidence


def png(image: Tensor) -> bytes:
    """(C, H, W) in [0, 1] as a PNG file of 8 bits a value: colour for three channels, else the mean of all in grey."""
    from PIL import Image

    if len(image) == 3:
        values = image.permute(1, 2, 0)
    else:
        values = image.mean(dim=0)
    file = io.BytesIO()
    Image.fromarray((values * 255).round().clamp(0, 255).byte().numpy()).save(file, "PNG")
    return file.getvalue()


def perturbation(x: Tensor, x_adv: Tensor) -> tuple[Tensor, float]:
    """The difference of two images as an image, grey where nothing changed, and the factor by which it is amplified."""
    change = x_adv - x
    factor = 0.5 / max(float(change.abs().max()), 1e-9)
    return 0.5 + factor * change, factor


@dataclass(frozen=True)
class Attacked:
    """A test image in a run, without an adversarial image if it withstood, or was wrong when clean."""

    before: str  # the class that the model says of the clean image
    after: str = ""  # of the adversarial one
    perturbation: str = ""  # PNG as a data URI
    x_adv: str = ""  # likewise
    factor: float = 0.0  # by which the perturbation is amplified
    attack: str = ""  # the first that broke it


@dataclass(frozen=True)
class Strip:
    """A test image of a class, with its result in each run."""

    class_name: str  # its true class
    accuracy: float  # of that class under all attacks together, the first run's, in [0, 1]
    image: int  # its position among the images that were attacked
    x: str  # PNG as a data URI
    runs: tuple[Attacked, ...]  # in the order of the evidence

    @property
    def withstand(self) -> str:
        return unbroken_percent(self.accuracy)


def strips(evidence: Sequence[Evidence], class_names: Sequence[str]) -> list[Strip]:
    """A strip for each class, the class with the lowest accuracy first; empty for evidence about different images."""
    import torch

    first = evidence[0]
    if not first.tried or any(of_run.facts["data"] != first.facts["data"] for of_run in evidence):
        return []
    for of_run in evidence:
        classes = torch.cat((of_run.label, of_run.clean, of_run.prediction))
        if len(classes) and int(classes.max()) >= len(class_names):  # of other data than the run's, or made up
            return []
    tried, right = first.verdicts(WORST_CASE)
    strips_of_classes = []
    for number, name in enumerate(class_names):
        image = _image_of_class(evidence, number)
        if image is None:
            continue
        x = first.x_shown[first.shown == image][0]
        of_class = tried & (first.label == number)
        accuracy = int((right & of_class).sum()) / max(1, int(of_class.sum()))
        runs = tuple(_attacked(of_run, image, x, class_names) for of_run in evidence)
        strips_of_classes.append(Strip(name, accuracy, image, _uri(x), runs))
    return sorted(strips_of_classes, key=lambda strip: strip.accuracy)


def _image_of_class(evidence: Sequence[Evidence], number: int) -> int | None:
    """Of the images of a class that all runs have, the one that was broken in most runs; None without such images."""
    chosen, most = None, -1
    for image in evidence[0].shown.tolist():
        if int(evidence[0].label[image]) != number or any(image not in of_run.shown for of_run in evidence):
            continue
        broken_in = sum(bool((of_run.index == image).any()) for of_run in evidence)
        if broken_in > most:
            chosen, most = image, broken_in
    return chosen


def evidence_of(run: Path, name: str = EVIDENCE) -> Evidence | None:
    """The evidence in a run directory; None without it, or if it is damaged, of which `calfat replay` says more."""
    if not (run / name).is_file():
        return None
    from calfat_plugin.evaluators.evidence import read_evidence  # here, not above: a page needs no torch

    with suppress(RunError):
        return read_evidence(run / name)
    return None


def read_strips(runs: Sequence[Path], class_names: Sequence[str], name: str = EVIDENCE) -> list[Strip]:
    """The strips of run directories; empty where one of them has no evidence."""
    evidence = []
    for run in runs:
        evidence_of_run = evidence_of(run, name)
        if evidence_of_run is None:
            return []
        evidence.append(evidence_of_run)
    if not evidence:
        return []
    return strips(evidence, class_names)


def _attacked(evidence: Evidence, image: int, x: Tensor, class_names: Sequence[str]) -> Attacked:
    before = class_names[int(evidence.clean[image])]
    rows = (evidence.index == image).nonzero().flatten()
    if not len(rows):
        return Attacked(before)
    row = rows[0]
    x_adv = evidence.x_adv[row]
    change, factor = perturbation(x, x_adv)
    after = class_names[int(evidence.prediction[row])]
    attack = evidence.attacks[int(evidence.by[row])]
    return Attacked(before, after, _uri(change), _uri(x_adv), factor, attack)


def _uri(image: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()
