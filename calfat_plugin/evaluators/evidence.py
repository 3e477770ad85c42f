"""The adversarial images of an evaluation. Whoever has them checks its numbers with one forward pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from calfat_plugin.datasets.data import pixels
from calfat_plugin.disk import (
    OTHER_RUN_DIR,
    TRY_AGAIN,
    opened_regular,
    put_in_place,
    refuse_link,
    reporting_disk_errors,
    temporary_of,
)
from calfat_plugin.errors import BudgetError, RunError
from calfat_plugin.evaluators.base import budget_as_json, counts_of, fixed_subset
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.tied import state_of
from calfat_plugin.results import WORST_CASE, EvaluationResult
from calfat_plugin.tensor_files import DIGEST, READ_ERRORS, digest_of, read_tensors, write_tensors
from calfat_plugin.version import __version__

_LONGEST_NAME = 200  # letters of an attack's name in that of a file, which systems allow 255
_SHOWN = 4  # images of each class whose originals are kept for pages
_FLOAT_BYTES = 4
_FORMAT = 1
#: Name to type and axes; N test images, A attacks, M covered images, K adversarial ones, P shown ones of C x H x W.
_TENSORS: Mapping[str, tuple[torch.dtype, str]] = {
    "label": (torch.int64, "N"),
    "clean": (torch.int64, "N"),
    "tried": (torch.bool, "AN"),
    "broken": (torch.bool, "AN"),
    "covered": (torch.int64, "M"),
    "index": (torch.int64, "K"),
    "by": (torch.int64, "K"),
    "x_adv": (torch.float32, "KCHW"),
    "prediction": (torch.int64, "K"),
    "shown": (torch.int64, "P"),
    "x_shown": (torch.float32, "PCHW"),
}


@dataclass(frozen=True, eq=False)
class Evidence:
    """Which of N test images attacks broke, and adversarial images that show it.

    One adversarial image is kept for each broken test image, not one for each attack: a point in the ball that the
    model gets wrong proves that the image does not withstand, whichever attack found it.
    """

    label: Tensor  # (N,) int64 true classes
    clean: Tensor  # (N,) int64 classes that the model gave the clean images
    attacks: tuple[str, ...]  # all that were run, in their order
    # Attack to (N,) bool, the images that it was run on, if its verdicts are known image by image. Of `calfat trust`,
    # whose checks choose their images, all together as ``worst-case``.
    tried: Mapping[str, Tensor]
    broken: Mapping[str, Tensor]  # to (N,) bool, the images that it broke, those among them that were wrong when clean
    covered: Tensor  # (M,) int64, ascending, the images of which every adversarial image is kept
    index: Tensor  # (K,) int64, ascending, those of them that were right when clean and got broken
    by: Tensor  # (K,) int64, the first attack that broke each, a position in ``attacks``
    x_adv: Tensor  # (K, C, H, W) float32, exactly as the attack returned them
    prediction: Tensor  # (K,) int64 classes that the model gave them
    shown: Tensor  # (P,) int64, ascending, some images of each class
    x_shown: Tensor  # (P, C, H, W) float32, their originals
    facts: Mapping[str, Any]  # of the model, the data and the ball, ready for JSON

    @property
    def correct(self) -> Tensor:
        """(N,) bool: the clean images that the model got right."""
        return self.clean == self.label

    @property
    def ball(self) -> dict[str, Any]:
        """Norm and eps of the ball."""
        return {"norm": self.facts.get("norm"), "eps": self.facts.get("eps")}

    def withstand(self, attacks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Images that all these attacks were run on, and which of them withstand all: twice (N,) bool."""
        tried = torch.stack([self.tried[name] for name in attacks]).all(dim=0)
        broken = torch.stack([self.broken[name] for name in attacks]).any(dim=0)
        return tried, tried & self.correct & ~broken

    def verdicts(self, label: str) -> tuple[Tensor, Tensor]:
        """Images, and which are right, of an evaluator's label or of :data:`WORST_CASE`; natural of any other."""
        if label in self.tried:
            return self.withstand([label])
        if label == WORST_CASE:
            return self.withstand([*self.tried])
        return torch.ones_like(self.correct), self.correct

    def worst_case(self, num_classes: int, not_run: Mapping[str, str] | None = None) -> EvaluationResult | None:
        """The accuracy under all attacks together, on the images that all were run on; None of fewer than two.

        Args:
            num_classes: C.
            not_run: attack to why it did not run: the worst case is that of the others, and says so.
        """
        left_out = dict(not_run or {})
        if len(self.tried) + len(left_out) < 2:
            return None
        settings = {**self.ball, "attack": WORST_CASE, "attacks": [*self.tried]}
        implementation = f"calfat-plugin {__version__}"
        details = {}
        if left_out:
            details["not_run"] = left_out
        if not self.tried:
            why = f"none of its attacks ran ({', '.join(left_out)})"
            return EvaluationResult.without_number(
                WORST_CASE, why, settings=settings, implementation=implementation, details=details
            )
        tried, right = self.verdicts(WORST_CASE)
        return EvaluationResult(
            **counts_of(self.label[tried], self.correct[tried], right[tried], num_classes),
            label=WORST_CASE,
            settings=settings,
            implementation=implementation,
            seconds=0.0,
            details=details,
        )

    def as_json(self) -> dict[str, Any]:
        """For ``results.json``: the ball, of how many images all is kept, and how many adversarial images are not."""
        broken = torch.zeros_like(self.correct)
        for broken_by_attack in self.broken.values():
            broken |= broken_by_attack
        broken &= self.correct
        return {
            **self.ball,
            "images": len(self.label),
            "covered": len(self.covered),
            "kept": len(self.index),
            "left_out": int(broken.sum() - broken[self.covered].sum()),
        }


@dataclass(frozen=True, eq=False)
class _Point:
    """The adversarial image that is kept of a test image."""

    attack: int  # its position among all attacks
    prediction: int  # the class that the model gives it
    x_adv: Tensor  # (C, H, W) float32 on the CPU


class Collector:
    """Keeps of each covered image the first adversarial image that breaks it, while attacks run.

    It asks the model itself, in the batches in which evaluators show their examples, so it need not trust them.

    Args:
        task: the model, the test images, on the model's device, and the budget on trial. An attack that leaves this
            budget has no part in the worst case.
        max_bytes: of the adversarial images. It decides how many images are covered: always the same random ones, which
            are a part of those that evaluators with ``max_examples`` take, or have these as a part.
        scratch: where images are noted, for attacks that continue after a crash; None: nowhere.
        earlier: evidence about the same model, data and budget, to which other attacks are added. It also decides what
            is covered.

    Raises:
        RunError: ``earlier`` is about another model, other data or another budget.
    """

    def __init__(
        self, task: EvaluationTask, max_bytes: int, scratch: Path | None = None, earlier: Evidence | None = None
    ) -> None:
        data = task.data
        self._task = task
        self._scratch = scratch
        self._label = data.y.cpu()
        self._facts = {
            **budget_as_json(task.threat),
            "weights": digest_of(state_of(task.model)),
            "data": digest_of({"x": data.x, "y": data.y}),
        }
        self._journals = f"evidence-{self._facts['weights'][:12]}{self._facts['data'][:12]}"
        self._covered = _chosen(len(data), max_bytes // (_FLOAT_BYTES * data.x[0].numel()))
        self._attacks: list[str] = []
        self._broken: dict[str, Tensor] = {}
        self._tried: dict[str, Tensor] = {}
        self._points: dict[int, _Point] = {}  # by the position of the test image
        self.not_run: dict[str, str] = {}  # attack to why it did not run
        if earlier is not None:
            self._continue_from(earlier)
        if scratch is not None:  # judge the images that a process noted before it was stopped
            for journal in sorted(scratch.glob(f"{self._journals}-*.bin")):
                attack = unquote(journal.stem.split("-", 3)[3])
                for where, x_adv in _read(journal, data.x.shape[1:]):
                    self._judge(attack, where, x_adv.to(data.x.device))

    def _continue_from(self, earlier: Evidence) -> None:
        """Begin with all that earlier evidence says, without asking the model again."""
        for key, now in self._facts.items():
            if earlier.facts.get(key) != now:
                raise RunError(
                    f"the evidence of the evaluators that this run has measured already is about other {key} "
                    f"({earlier.facts.get(key)}; here {now}), so others cannot be added. Put the checkpoint and the "
                    "data of the run back."
                )
        self._covered = torch.zeros_like(self._covered)
        self._covered[earlier.covered] = True
        self._attacks = [*earlier.attacks]
        self._tried = dict(earlier.tried)
        self._broken = {label: broken.clone() for label, broken in earlier.broken.items()}
        for row, image in enumerate(earlier.index.tolist()):
            self._points[image] = _Point(int(earlier.by[row]), int(earlier.prediction[row]), earlier.x_adv[row])

    def restore(self, evidence: Evidence) -> None:
        """Take over what an earlier process kept, of the same images and weights."""
        for row, image in enumerate(evidence.index.tolist()):
            label = evidence.attacks[int(evidence.by[row])]
            x_adv = evidence.x_adv[row : row + 1].to(self._task.data.x.device)
            self._judge(label, torch.tensor([image]), x_adv)

    def listener(self, label: str) -> Callable[[Tensor, Tensor], None]:
        """What an attack's ``on_examples`` calls: takes positions (n,) and adversarial images (n, C, H, W)."""
        name = f"{self._journals}-{self._position(label):03}-{quote(label, safe='')[:_LONGEST_NAME]}.bin"

        def note(where: Tensor, x_adv: Tensor) -> None:
            wrong = self._judge(label, where, x_adv)
            if self._scratch is not None:  # before the attack notes that it has done these
                _append(self._scratch / name, where[wrong], x_adv[wrong.to(x_adv.device)])

        return note

    def _position(self, label: str) -> int:
        """Of an attack among all; a new one is appended."""
        if label not in self._attacks:
            self._attacks.append(label)
            self._broken[label] = torch.zeros_like(self._covered)
        return self._attacks.index(label)

    def _judge(self, label: str, where: Tensor, x_adv: Tensor) -> Tensor:
        """Which of the examples the model gets wrong, (n,) bool; the first of an image is kept."""
        task = self._task
        attack = self._position(label)
        x = pixels(task.data.x[where.to(task.data.x.device)])
        try:
            task.threat.check(x_adv, x, who=label)
        except BudgetError:  # the attack has a ball of its own, which is wider
            self._broken.pop(label, None)
            return torch.zeros(len(where), dtype=torch.bool)
        with torch.no_grad():
            predictions: Tensor = task.model(x_adv).argmax(dim=1).cpu()
        wrong = predictions != self._label[where]
        if label in self._broken:
            self._broken[label][where[wrong]] = True
        keep = wrong & self._covered[where] & task.clean_correct[where]
        for row in keep.nonzero().flatten().tolist():
            image = int(where[row])
            if image not in self._points:
                self._points[image] = _Point(attack, int(predictions[row]), x_adv[row].detach().cpu().clone())
        return wrong

    def finished(self, result: EvaluationResult) -> list[dict[str, str]]:
        """Note on which images an attack was run; a finding if its accuracy is not that of its examples: no part."""
        label = result.label
        if result.accuracy is None:
            self._broken.pop(label, None)
            self.not_run[label] = result.not_run
            return []
        if label not in self._broken:
            return []
        tried = _chosen(len(self._label), result.num_examples)
        counted = int((tried & self._task.clean_correct & ~self._broken[label]).sum())
        reported = round(result.accuracy * result.num_examples)
        if counted == reported:
            self._tried[label] = tried
            return []
        text = (
            f"it says that {reported} of {result.num_examples} images withstand it, but {counted} withstand the "
            "examples that it showed: it has no part in the worst case, and its number has no evidence. One or two "
            "images are rounding in batches of another size; with more, it counts otherwise, or shows other images."
        )
        return [{"code": "recount", "text": text}]

    def concluded(self, robust: Tensor) -> None:
        """Let the worst case be what others found out with these attacks: (N,) bool, images that withstood all."""
        self._tried = {WORST_CASE: torch.ones_like(robust)}
        self._broken[WORST_CASE] = ~robust

    def evidence(self) -> Evidence:
        """What there is so far."""
        data = self._task.data
        images = sorted(self._points)
        by = torch.zeros(len(images), dtype=torch.int64)
        prediction = torch.zeros(len(images), dtype=torch.int64)
        x_adv = torch.zeros((len(images), *data.x.shape[1:]))
        for row, image in enumerate(images):
            point = self._points[image]
            by[row] = point.attack
            prediction[row] = point.prediction
            x_adv[row] = point.x_adv
        covered = self._covered.nonzero().flatten()
        first_of_class = [covered[:0]]
        for label in self._label[covered].unique():
            first_of_class.append(covered[self._label[covered] == label][:_SHOWN])
        shown = torch.cat(first_of_class).sort().values
        x_shown = pixels(data.x[shown.to(data.x.device)]).cpu()
        return Evidence(
            label=self._label,
            clean=self._task.clean_predictions,
            attacks=tuple(self._attacks),
            tried=dict(self._tried),
            broken={name: self._broken[name] for name in self._tried},
            covered=covered,
            index=torch.tensor(images, dtype=torch.int64),
            by=by,
            x_adv=x_adv,
            prediction=prediction,
            shown=shown,
            x_shown=x_shown,
            facts={**self._facts, "calfat_plugin": __version__},
        )


def _chosen(number: int, count: int) -> Tensor:
    """(number,) bool: the ``count`` images that evaluators with ``max_examples`` take, or all."""
    chosen = torch.zeros(number, dtype=torch.bool)
    chosen[fixed_subset(number, count)] = True
    return chosen


# A journal holds the examples that one attack broke: the position, 8 bytes, and the image, for each.


def _records(shape: Sequence[int]) -> np.dtype[Any]:
    return np.dtype([("at", "<i8"), ("x_adv", "<f4", tuple(shape))])


def _read(journal: Path, shape: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions (1,) and images (1, C, H, W); what a kill left incomplete at the end is cut off."""
    refuse_link(journal)  # it is about to be cut, and appended to
    with opened_regular(journal) as handle, os.fdopen(os.dup(handle), "rb") as file:
        records = np.fromfile(file, _records(shape))
    os.truncate(journal, records.nbytes)
    for record in records:
        yield torch.tensor([int(record["at"])]), torch.from_numpy(record["x_adv"].copy())[None]


def _append(journal: Path, where: Tensor, x_adv: Tensor) -> None:
    """Add positions (n,) and images (n, C, H, W)."""
    records = np.empty(len(where), _records(x_adv.shape[1:]))
    records["at"] = where
    records["x_adv"] = x_adv.detach().cpu()
    with reporting_disk_errors(journal, TRY_AGAIN):
        journal.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("ab") as file:
            file.write(records.tobytes())


# --- ``evidence.safetensors``: evidence as a file, which may come from anybody ----------------------------------------


def write_evidence(path: Path, evidence: Evidence, todo: str = OTHER_RUN_DIR) -> None:
    """Write atomically."""
    tensors = {}
    for name in _TENSORS:
        value = getattr(evidence, name)
        if isinstance(value, Mapping):  # of an attack to a row of the table
            rows = list(value.values())
            value = torch.zeros((0, len(evidence.label)), dtype=torch.bool)
            if rows:
                value = torch.stack(rows)
        tensors[name] = value
    facts = {**evidence.facts, "format": _FORMAT, "attacks": evidence.attacks, "judged": [*evidence.tried]}
    with reporting_disk_errors(path, todo):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary_of(path), tensors, facts)
        put_in_place([path])


def read_evidence(path: Path) -> Evidence:
    """Read what :func:`write_evidence` wrote; nothing in the file is believed but the meaning of its numbers.

    Raises:
        RunError: there is no such file, or something in it cannot be: the text says what, and at which image.
    """
    try:
        tensors, facts = read_tensors(path)
        sizes = _sizes(path, tensors)
        if facts.get("format") != _FORMAT or DIGEST not in facts:
            raise RunError(f"{path}: not a file of evidence (no facts of format {_FORMAT} in its metadata).")
        attacks, judged = _names(facts["attacks"]), _names(facts["judged"])
    except FileNotFoundError:
        raise RunError(f"{path}: no such file.") from None
    except READ_ERRORS as error:
        raise RunError(f"{path}: the evidence cannot be read ({type(error).__name__}: {error}).") from None
    _check_values(path, tensors, sizes, attacks, judged)
    for name in ("data", "weights"):
        _refuse(path, name, isinstance(facts.get(name), str), "is no SHA-256")
    about = {key: value for key, value in facts.items() if key not in (DIGEST, "format", "attacks", "judged")}
    tried = dict(zip(judged, tensors.pop("tried"), strict=True))
    broken = dict(zip(judged, tensors.pop("broken"), strict=True))
    return Evidence(tried=tried, broken=broken, attacks=attacks, facts=about, **tensors)


def _check_values(
    path: Path,
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    attacks: tuple[str, ...],
    judged: tuple[str, ...],
) -> None:
    """Refuse positions and classes that cannot be."""
    _refuse(path, "tried", len(judged) == sizes["A"], f"has {sizes['A']} rows for the attacks {', '.join(judged)}")
    _refuse(path, "judged", set(judged) <= {*attacks, WORST_CASE}, "names an attack that is not among `attacks`")
    limits = {"covered": sizes["N"], "index": sizes["N"], "shown": sizes["N"], "by": len(attacks)}
    for name, limit in limits.items():
        values = tensors[name]
        outside = (values < 0) | (values >= limit)
        _refuse(path, name, not outside.any(), f"holds {_first(values, outside)}; expected 0 to {limit - 1}")
    for name in ("covered", "index", "shown"):
        values = tensors[name]
        falls = values.diff() <= 0
        _refuse(path, name, not falls.any(), f"is not ascending at {_first(values[1:], falls)}: twice the same image?")
    for name in ("label", "clean", "prediction"):
        below = tensors[name] < 0
        _refuse(path, name, not below.any(), f"holds {_first(tensors[name], below)}, which is no class")
    elsewhere = ~torch.isin(tensors["index"], tensors["covered"])
    image = _first(tensors["index"], elsewhere)
    _refuse(path, "index", not elsewhere.any(), f"has image {image}, which is not covered")


def _sizes(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Axis to length, of tensors that agree."""
    if set(tensors) != set(_TENSORS):
        names = ", ".join(sorted(tensors)) or "none"
        raise RunError(f"{path}: has the tensors {names}; expected {', '.join(_TENSORS)}.")
    sizes: dict[str, int] = {}
    for name, (dtype, axes) in _TENSORS.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.ndim != len(axes):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise RunError(f"{path}: `{name}` is {got}; expected {dtype} ({', '.join(axes)}).")
        for axis, length in zip(axes, tensor.shape, strict=True):
            if sizes.setdefault(axis, length) != length:
                raise RunError(f"{path}: `{name}` has {length} where {axis} is {sizes[axis]} elsewhere in the file.")
    return sizes


def _names(value: Any) -> tuple[str, ...]:
    """Names of attacks as the file's facts have them."""
    are_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not are_names or len(set(value)) < len(value):
        raise ValueError("names of attacks are missing, or one is there twice")
    return tuple(value)


def _refuse(path: Path, name: str, fine: bool | Tensor, text: str) -> None:
    if not fine:
        raise RunError(f"{path}: `{name}` {text}. This is not what an evaluation writes.")


def _first(values: Tensor, where: Tensor) -> int:
    """The first of the values that are wrong, for the message about it; 0 where none is."""
    if not where.any():
        return 0
    return int(values[where][0])
