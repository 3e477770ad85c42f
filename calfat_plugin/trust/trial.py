"""The model on trial: its images, its budget, and which images no attack has broken yet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.disk import write_text
from calfat_plugin.errors import ModelError
from calfat_plugin.evaluators.base import PROBABILITIES, are_probabilities, fixed_subset, refuse_training_mode
from calfat_plugin.evaluators.measure import clean_correct, measure
from calfat_plugin.federation.ambient import seeded_world
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.results import EvaluationResult
from calfat_plugin.seeds import derive_seed
from calfat_plugin.threat import ThreatModel, exact_text
from calfat_plugin.trust.evidence import Row

Progress = Callable[[str, int, int, int], None]


def _ignore(label: str, done: int, total: int, correct: int) -> None:
    pass


@dataclass
class Trial:
    """One model under the battery.

    Attributes:
        model: in evaluation mode on ``device``; raw logits for pixels in [0, 1].
        data: the images on trial, on ``device``.
        num_classes: C.
        threat: the budget on trial.
        batch_size: examples a batch.
        device: where to compute.
        seed: of random starts.
        correct: (N,) bool on the CPU, right on the clean image.
        robust: (N,) bool on the CPU, right clean and under every attack at the budget so far.
        surrogates: name to another model of the same task, whose adversarial examples are tried on this one.
        scratch: where a long attack keeps what it needs to continue after a crash; None: nowhere.
        on_progress: called with (label, examples done, in all, correct so far).
    """

    model: nn.Module
    data: ImageData
    num_classes: int
    threat: ThreatModel
    batch_size: int
    device: torch.device
    seed: int
    correct: Tensor
    robust: Tensor
    surrogates: Mapping[str, nn.Module] = dataclasses.field(default_factory=dict)
    scratch: Path | None = None
    on_progress: Progress = _ignore

    def task(self) -> EvaluationTask:
        """The model, the images and the budget, as evaluators and fingerprints take them."""
        return EvaluationTask(
            model=self.model,
            data=self.data,
            num_classes=self.num_classes,
            threat=self.threat,
            batch_size=self.batch_size,
            device=self.device,
            seed=self.seed,
            round=0,
            clean_correct=self.correct,
        )

    def attack(
        self,
        label: str,
        evaluator: Evaluator,
        *,
        threat: ThreatModel | None = None,
        max_examples: int | None = None,
        craft_on: nn.Module | None = None,
        resumable: bool = False,
    ) -> Row:
        """Attack, judge every point by this model, and remember what broke at the budget on trial.

        Args:
            label: of the attack, unique at its budget.
            evaluator: gives adversarial examples.
            threat: another budget than the one on trial.
            max_examples: the evaluator attacks this fixed random subset; None: all.
            craft_on: the model whose gradients the attack follows; None: this one.
            resumable: the evaluator continues where a killed process stopped, so what that one broke is kept, too.
        """
        memory = self.scratch / f"{label}.txt" if resumable and self.scratch is not None else None
        broken = torch.zeros_like(self.correct)
        if memory is not None and memory.exists():
            broken = from_bits(memory.read_text(encoding="utf-8"))
        before, started = self.robust.clone(), time.perf_counter()

        def judge(where: Tensor, x_adv: Tensor) -> None:
            with torch.no_grad():
                right = self.model(x_adv).argmax(dim=1).cpu() == self.data.y[where.to(self.device)].cpu()
            broken[where[~right]] = True
            if memory is not None:  # before the evaluator notes that this batch is done
                memory.parent.mkdir(parents=True, exist_ok=True)
                write_text(memory, as_bits(broken))

        with seeded_world(derive_seed(self.seed, f"trust/{label}")):
            # Without a memory an attack must not continue either: what it broke before would not be judged again.
            scratch = self.scratch if resumable else None
            result = self._measured(label, evaluator, threat or self.threat, craft_on, scratch, judge)
        chosen = fixed_subset(len(broken), max_examples)
        where = torch.arange(len(broken)) if chosen is None else chosen
        left = None
        if threat is None or threat.eps == self.threat.eps:
            self.robust &= ~broken
            # Of a sample, what it broke anew, subtracted from what was left of all.
            left = share(before) - share((before & broken)[where]) if chosen is not None else share(self.robust)
        zero = result.details.get("zero_gradients")
        return Row(
            attack=label,
            eps=exact_text((threat or self.threat).eps),
            accuracy=share((self.correct & ~broken)[where]),
            left=None if left is None else max(0.0, left),
            examples=len(where),
            seconds=time.perf_counter() - started,
            zero_gradients=zero if isinstance(zero, int) and craft_on is None else None,
        )

    def _measured(
        self,
        label: str,
        evaluator: Evaluator,
        threat: ThreatModel,
        craft_on: nn.Module | None,
        scratch: Path | None,
        judge: Callable[[Tensor, Tensor], None],
    ) -> EvaluationResult:
        return measure(
            self.model if craft_on is None else craft_on,
            self.data,
            [(label, evaluator)],
            num_classes=self.num_classes,
            threat=threat,
            batch_size=self.batch_size,
            device=self.device,
            seed=self.seed,
            correct=self.correct if craft_on is None else None,
            scratch=scratch,
            on_progress=self.on_progress,
            on_examples=judge,
        )[label]

    def logits(self) -> Iterator[Tensor]:
        """Of the clean images, batch by batch, on the CPU."""
        with torch.no_grad():
            for x, _, _ in batches(self.data, self.batch_size, self.device):
                yield self.model(x).float().cpu()


def trial(
    model: nn.Module,
    data: ImageData,
    *,
    num_classes: int,
    threat: ThreatModel,
    batch_size: int,
    device: torch.device,
    seed: int,
    surrogates: Mapping[str, nn.Module],
) -> Trial:
    """A model that may be attacked: everything that cannot be is refused here, before any work.

    Args:
        model, surrogates: see :class:`Trial`.
        data: images, at least one, in any place.
        num_classes, threat, batch_size, device, seed: see :class:`Trial`.

    Raises:
        ModelError: training mode, other classes, images that do not fit, logits that are not finite, or probabilities.
    """
    data, right = data.to(device), partial(clean_correct, num_classes=num_classes, batch_size=batch_size, device=device)
    for each in (model, *surrogates.values()):
        refuse_training_mode(each)
    with seeded_world(derive_seed(seed, "trust/clean")):
        correct = right(model, data)
        for other in surrogates.values():
            right(other, data)
    found = Trial(
        model, data, num_classes, threat, batch_size, device, seed, correct, correct.clone(), dict(surrogates)
    )
    if all(are_probabilities(logits) for logits in found.logits()):
        raise ModelError(PROBABILITIES["text"])
    return found


def share(verdicts: Tensor) -> float:
    """Of True in (N,) bool."""
    return int(verdicts.sum()) / len(verdicts)


def as_bits(verdicts: Tensor) -> str:
    """(N,) bool as a text of 0 and 1."""
    return "".join("1" if verdict else "0" for verdict in verdicts.tolist())


def from_bits(text: str) -> Tensor:
    """The inverse of :func:`as_bits`."""
    return torch.tensor([letter == "1" for letter in text], dtype=torch.bool)
