"""The model on trial: its images, its budget, and which images no attack has broken yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.disk import TRY_AGAIN, read_whole, write_text
from calfat_plugin.errors import ModelError, RunError
from calfat_plugin.evaluators.autoattack.autoattack import as_bits, from_bits
from calfat_plugin.evaluators.base import PROBABILITIES, are_probabilities, finite, refuse_training_mode, share
from calfat_plugin.evaluators.evidence import Collector
from calfat_plugin.evaluators.gradient import CW, CWOptions, margin
from calfat_plugin.evaluators.measure import clean_correct, clean_predictions, measure
from calfat_plugin.exact import exact_text
from calfat_plugin.federation.global_rng import seeded_global_rng
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.judging.findings import Row
from calfat_plugin.maths.precision import float32_as
from calfat_plugin.results import EvaluationResult
from calfat_plugin.seeds import derive_seed
from calfat_plugin.threat import ThreatModel

_ALONE = 8  # images that a fresh copy is asked about one by one
_SAME = 1e-4  # of the largest logit: what the order of additions may change

Progress = Callable[[str, int, int, int], None]


@dataclass
class Trial:
    """One model under the battery; one that cannot be attacked is refused here, before any work."""

    model: nn.Module  # in evaluation mode on ``device``; raw logits for pixels in [0, 1]
    data: ImageData  # the images on trial, at least one; moved to ``device``
    num_classes: int
    threat: ThreatModel  # the budget on trial
    batch_size: int
    device: torch.device
    seed: int
    surrogates: Mapping[str, nn.Module]  # other models of the same task, whose adversarial examples are tried
    fresh: Callable[[], nn.Module]  # gives a copy of the model that was asked nothing yet
    more: ImageData | None = None  # further images that the model may be asked about
    scratch: Path | None = None  # where a long attack keeps what it needs to continue after a crash
    on_progress: Progress = lambda label, done, total, correct: None
    collector: Collector | None = None  # keeps adversarial images at the budget
    clean: Tensor = field(init=False)  # (N,) int64 on the CPU, classes that the model gives the clean images
    correct: Tensor = field(init=False)  # (N,) bool on the CPU, right on the clean image
    robust: Tensor = field(init=False)  # (N,) bool on the CPU, right clean and under every attack at the budget so far

    def __post_init__(self) -> None:
        self.data, sizes = self.data.to(self.device), {"num_classes": self.num_classes, "batch_size": self.batch_size}
        for each in (self.model, *self.surrogates.values()):
            refuse_training_mode(each)
        with seeded_global_rng(derive_seed(self.seed, "trust/clean")):
            self.clean = clean_predictions(self.model, self.data, device=self.device, **sizes)
            for other in self.surrogates.values():
                clean_correct(other, self.data, device=self.device, **sizes)
        self.correct = self.clean == self.data.y.cpu()
        self.robust = self.correct.clone()
        if all(are_probabilities(logits) for logits in self.logits()):
            raise ModelError(PROBABILITIES["text"])

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
        only: Tensor | None = None,
        craft_on: nn.Module | None = None,
        resumable: bool = False,
    ) -> Row:
        """Attack, have every point judged twice, and remember what broke at the budget on trial.

        This model judges, and a copy that was asked nothing before, in another order and in other batches. An image is
        broken if either is wrong about it: whoever loads the model next gets that answer.

        Args:
            only: attack these examples, ascending (n,) indices on the CPU; None: all.
            craft_on: the model whose gradients the attack follows; None: this one.
            resumable: the evaluator continues where a killed process stopped, so what that one broke is kept, too.
        """
        memory = self.scratch / f"{label}.txt" if resumable and self.scratch is not None else None
        broken, disputed = torch.zeros_like(self.correct), torch.zeros_like(self.correct)
        if memory is not None and memory.exists():
            lines = read_whole(memory, 2 * len(broken) + 2).decode().split()  # a digit an image, in two lines
            broken, disputed = (from_bits(bits, len(broken)) for bits in lines)
        started = time.perf_counter()
        chosen = torch.arange(len(self.correct)) if only is None else only
        on_trial = threat is None or threat.eps == self.threat.eps
        keep = self.collector.listener(label) if self.collector is not None and on_trial else None

        def judge(where: Tensor, x_adv: Tensor) -> None:
            where = chosen[where]
            if keep is not None:
                keep(where, x_adv)
            again = self.asked_anew(x_adv, f"adversarial images ({label})")
            logits = self.asked(x_adv, f"adversarial images ({label})")
            y = self.data.y[where.to(self.data.y.device)].cpu()
            broken[where[(logits.argmax(dim=1) != y) | (again.argmax(dim=1) != y)]] = True
            disputed[where[differ(logits, again)]] = True
            if memory is not None:  # before the evaluator notes that this batch is done
                memory.parent.mkdir(parents=True, exist_ok=True)
                write_text(memory, f"{as_bits(broken)}\n{as_bits(disputed)}\n", TRY_AGAIN)

        with seeded_global_rng(derive_seed(self.seed, f"trust/{label}")):
            # Without a memory an attack must not continue either: what it broke before would not be judged again.
            scratch = self.scratch if resumable else None
            result = self._measured(label, evaluator, threat or self.threat, only, craft_on, scratch, judge)
        if result.accuracy is None:  # else it would seem that all images withstand it
            raise RunError(f"calfat trust: {label} did not run ({result.not_run}), so nothing can be judged by it.")
        if on_trial:
            self.robust &= ~broken
        zero = result.details.get("zero_gradients")
        return Row(
            attack=label,
            eps=exact_text((threat or self.threat).eps),
            accuracy=share((self.correct & ~broken)[chosen]),
            left=share(self.robust) if on_trial else None,
            examples=len(chosen),
            seconds=time.perf_counter() - started,
            zero_gradients=zero if isinstance(zero, int) and craft_on is None else None,
            disputed=int(disputed.sum()),
            of=len(self.correct),
        )

    def _measured(
        self,
        label: str,
        evaluator: Evaluator,
        threat: ThreatModel,
        only: Tensor | None,
        craft_on: nn.Module | None,
        scratch: Path | None,
        judge: Callable[[Tensor, Tensor], None],
    ) -> EvaluationResult:
        correct = self.correct if craft_on is None else None
        return measure(
            self.model if craft_on is None else craft_on,
            self.data if only is None else self.data.subset(only.numpy()),
            [(label, evaluator)],
            num_classes=self.num_classes,
            threat=threat,
            batch_size=self.batch_size,
            device=self.device,
            seed=self.seed,
            correct=correct if correct is None or only is None else correct[only],
            scratch=scratch,
            on_progress=self.on_progress,
            on_examples=judge,
        )[label]

    def asked(self, x: Tensor, what: str) -> Tensor:
        """Logits of the model on trial for (N, C, H, W) pixels, on the CPU."""
        with torch.no_grad(), float32_as("fp32", self.device):
            return finite(self.model(x).float().cpu(), what)

    def asked_anew(self, x: Tensor, what: str) -> Tensor:
        """The same of a copy that was asked nothing before: the last image first, some alone, the others in halves."""
        model, order = self.fresh(), torch.arange(len(x) - 1, -1, -1)
        alone, together = order[:_ALONE].split(1), order[_ALONE:].split(max(1, (len(x) - _ALONE + 1) // 2))
        parts = [part for part in (*alone, *together) if len(part)]
        with torch.no_grad(), float32_as("fp32", self.device):
            logits = torch.cat([model(x[part.to(x.device)]).float().cpu() for part in parts])
        return finite(logits.flip(0), what)

    def nearest_to_an_error(self, steps: int) -> Tensor:
        """The examples that are still right, by how little the true class leads after CW of so many steps: (n,)."""
        leads = torch.full((len(self.correct),), torch.inf)

        def note(where: Tensor, x_adv: Tensor) -> None:
            logits, y = self.asked(x_adv, "adversarial images"), self.data.y[where.to(self.data.y.device)].cpu()
            leads[where] = margin(logits, y)

        with seeded_global_rng(derive_seed(self.seed, "trust/nearest")):
            self._measured("nearest", CW(CWOptions(steps=steps)), self.threat, None, None, None, note)
        left = self.robust.nonzero().squeeze(1)
        return left[leads[left].argsort(stable=True)]

    def logits(self) -> Iterator[Tensor]:
        """Of the clean images, batch by batch, on the CPU."""
        for x, _, _ in batches(self.data, self.batch_size, self.device):
            yield self.asked(x, "clean images")


def differ(logits: Tensor, others: Tensor) -> Tensor:
    """Which rows of (N, C) two passes answered otherwise, beyond rounding: (N,) bool."""
    return (others - logits).abs().amax(dim=1) > _SAME * float(logits.abs().amax())
