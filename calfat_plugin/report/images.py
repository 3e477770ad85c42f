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

    colour = len(image) == 3
    values = image.permute(1, 2, 0) if colour else image.mean(dim=0)
    file = io.BytesIO()
    Image.fromarray((values * 255).round().clamp(0, 255).byte().numpy()).save(file, "PNG")
    return file.getvalue()


def perturbation(x: Tensor, x_adv: Tensor) -> tuple[Tensor, float]:
    """(C, H, W) to look at, grey where nothing changed, and by how much it is stronger than it is."""
    change = x_adv - x
    factor = 0.5 / max(float(change.abs().max()), 1e-9)
    return 0.5 + factor * change, factor


@dataclass(frozen=True)
class Attacked:
    """What became of a test image in a run; no adversarial image where it withstood, or was wrong when clean."""

    before: str  # the class that the model says of the clean image
    after: str = ""  # of the adversarial one
    perturbation: str = ""  # PNG as a data URI, as the next
    x_adv: str = ""
    factor: float = 0.0  # by which the perturbation is shown stronger than it is
    attack: str = ""  # the first that broke it


@dataclass(frozen=True)
class Strip:
    """A test image of a class, and what became of it in each run."""

    class_name: str  # its true class
    accuracy: float  # of that class under all attacks together, the first run's, in [0, 1]
    image: int  # its position among the images that were attacked
    x: str  # PNG as a data URI
    runs: tuple[Attacked, ...]  # in the order of the evidence

    @property
    def withstand(self) -> str:
        return unbroken_percent(self.accuracy)


def strips(evidence: Sequence[Evidence], class_names: Sequence[str]) -> list[Strip]:
    """One strip a class, the class first that withstands least; empty for evidence about different images."""
    import torch

    first = evidence[0]
    if not first.tried or any(of_run.facts["data"] != first.facts["data"] for of_run in evidence):
        return []
    classes = torch.cat([torch.cat((of_run.label, of_run.clean, of_run.prediction)) for of_run in evidence])
    if len(classes) and int(classes.max()) >= len(class_names):  # of other data than the run's, or made up
        return []
    tried, right = first.verdicts(WORST_CASE)
    found = []
    for number, name in enumerate(class_names):
        image = _image_of_class(evidence, number)
        if image is None:
            continue
        x = first.x_shown[first.shown == image][0]
        of_class = tried & (first.label == number)
        accuracy = int((right & of_class).sum()) / max(1, int(of_class.sum()))
        runs = tuple(_attacked(of_run, image, x, class_names) for of_run in evidence)
        found.append(Strip(name, accuracy, image, _uri(x), runs))
    return sorted(found, key=lambda strip: strip.accuracy)


def _image_of_class(evidence: Sequence[Evidence], number: int) -> int | None:
    """The image of a class that was broken in most runs, of those that all runs show; None where they share none."""
    chosen, most = None, -1
    for image in evidence[0].shown.tolist():
        if int(evidence[0].label[image]) != number or any(image not in of_run.shown for of_run in evidence):
            continue
        broken_in = sum(bool((of_run.index == image).any()) for of_run in evidence)
        if broken_in > most:
            chosen, most = image, broken_in
    return chosen


def evidence_of(run: Path, name: str = EVIDENCE) -> Evidence | None:
    """What a run directory keeps; None without it, and where it is damaged, of which `calfat replay` says more."""
    if not (run / name).is_file():
        return None
    from calfat_plugin.evaluators.evidence import read_evidence  # here, not above: a page needs no torch

    with suppress(RunError):
        return read_evidence(run / name)
    return None


def read_strips(runs: Sequence[Path], class_names: Sequence[str], name: str = EVIDENCE) -> list[Strip]:
    """The strips of run directories; none where one keeps no evidence."""
    of_runs = []
    for run in runs:
        evidence = evidence_of(run, name)
        if evidence is None:
            return []
        of_runs.append(evidence)
    return strips(of_runs, class_names) if of_runs else []


def _attacked(evidence: Evidence, at: int, x: Tensor, class_names: Sequence[str]) -> Attacked:
    before = class_names[int(evidence.clean[at])]
    rows = (evidence.index == at).nonzero().flatten()
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
