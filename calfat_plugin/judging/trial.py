"""The model on trial: its images, its budget, and which images no attack has broken yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.disk import TRY_AGAIN, read_whole, write_text
from calfat_plugin.errors import ModelError, RunError
from calfat_plugin.evaluators.autoattack import as_bits, from_bits
from calfat_plugin.evaluators.base import PROBABILITIES, are_probabilities, finite, refuse_training_mode, share
from calfat_plugin.evaluators.evidence import Collector
from calfat_plugin.evaluators.gradient import CW, CWOptions, margin
from calfat_plugin.evaluators.measure import Progress, evaluation_task, measure, no_progress, with_model
from calfat_plugin.exact import exact_text
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.interfaces import EvaluationTask, Evaluator, SetUpTask
from calfat_plugin.judging.findings import Row
from calfat_plugin.maths.passes import float32_as
from calfat_plugin.results import EvaluationResult
from calfat_plugin.seeds import derive_seed
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from calfat_plugin.recipe.schema import Recipe

_ALONE = 8  # images that a fresh copy is asked about one by one
_SAME = 1e-4  # of the largest logit: what the order of additions may change


@dataclass
class Trial:
    """One model under the battery, as :func:`put_on_trial` makes it."""

    task: EvaluationTask  # the model, the images on trial, at least one, and the budget
    surrogates: Mapping[str, nn.Module]  # other models of the same task, whose adversarial examples are tried
    fresh: Callable[[], nn.Module]  # gives a copy of the model that was asked nothing yet
    more: ImageData | None = None  # further images that the model may be asked about
    scratch: Path | None = None  # where a long attack keeps what it needs to continue after a crash
    on_progress: Progress = no_progress
    collector: Collector | None = None  # keeps adversarial images at the budget
    robust: Tensor = field(init=False)  # (N,) bool on the CPU, right clean and under every attack at the budget so far

    def __post_init__(self) -> None:
        self.robust = self.correct.clone()

    @property
    def correct(self) -> Tensor:
        """(N,) bool on the CPU, right on the clean image."""
        return self.task.clean_correct

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

        Args:
            threat: another budget than the one on trial.
            only: attack these examples, ascending (n,) indices on the CPU; None: all.
            craft_on: the model whose gradients the attack follows; None: this one.
            resumable: the evaluator continues where a killed process stopped, so what that one broke is kept, too.
        """
        started = time.perf_counter()
        task = self.task
        if threat is not None:
            task = replace(task, threat=threat)
        on_trial = task.threat.eps == self.task.threat.eps
        chosen = torch.arange(len(self.correct))
        if only is not None:
            chosen = only
            task = replace(task, data=task.data.subset(only.numpy()), clean_predictions=task.clean_predictions[only])
        judge = _Judge(self, label, chosen)
        if on_trial and self.collector is not None:
            judge.listener = self.collector.listener(label)
        if resumable and self.scratch is not None:
            # Without this an attack must not continue either: what it broke before would not be judged again.
            judge.continue_from(self.scratch / f"{label}.txt")
            task = replace(task, scratch=self.scratch)
        with seeded_global_rng(derive_seed(task.seed, f"trust/{label}")):
            if craft_on is not None:
                task = with_model(task, craft_on)
            result = self._measured(replace(task, on_examples=judge), label, evaluator)
        if result.accuracy is None:  # else it would seem that all images withstand it
            raise RunError(f"calfat trust: {label} did not run ({result.not_run}), so nothing can be judged by it.")
        left = None
        if on_trial:
            self.robust &= ~judge.broken
            left = share(self.robust)
        zero_gradients = result.details.get("zero_gradients")
        if craft_on is not None or not isinstance(zero_gradients, int):
            zero_gradients = None
        return Row(
            attack=label,
            eps=exact_text(task.threat.eps),
            accuracy=share((self.correct & ~judge.broken)[chosen]),
            left=left,
            examples=len(chosen),
            seconds=time.perf_counter() - started,
            zero_gradients=zero_gradients,
            disputed=int(judge.disputed.sum()),
            of=len(self.correct),
        )

    def _measured(self, task: EvaluationTask, label: str, evaluator: Evaluator) -> EvaluationResult:
        return measure(task, [(label, evaluator)], on_progress=self.on_progress)[label]

    def asked(self, x: Tensor, what: str) -> Tensor:
        """Logits of the model on trial for (N, C, H, W) pixels, on the CPU."""
        with torch.no_grad(), float32_as("fp32", self.task.device):
            return finite(self.task.model(x).float().cpu(), what)

    def asked_anew(self, x: Tensor, what: str) -> Tensor:
        """The same of a copy that was asked nothing before: the last image first, some alone, the others in halves."""
        model = self.fresh()
        order = torch.arange(len(x) - 1, -1, -1)
        alone = order[:_ALONE].split(1)
        half = max(1, (len(x) - _ALONE + 1) // 2)
        logits = []
        with torch.no_grad(), float32_as("fp32", self.task.device):
            for part in (*alone, *order[_ALONE:].split(half)):
                if len(part):
                    logits.append(model(x[part.to(x.device)]).float().cpu())
        return finite(torch.cat(logits).flip(0), what)

    def nearest_to_an_error(self, steps: int) -> Tensor:
        """The examples that are still right, by how little the true class leads after CW of so many steps: (n,)."""
        leads = torch.full((len(self.correct),), torch.inf)

        def note(where: Tensor, x_adv: Tensor) -> None:
            leads[where] = margin(self.asked(x_adv, "adversarial images"), self.labels(where))

        with seeded_global_rng(derive_seed(self.task.seed, "trust/nearest")):
            self._measured(replace(self.task, on_examples=note), "nearest", CW(CWOptions(steps=steps)))
        left = self.robust.nonzero().squeeze(1)
        return left[leads[left].argsort(stable=True)]

    def labels(self, where: Tensor) -> Tensor:
        """The true classes at (n,) positions, on the CPU."""
        y = self.task.data.y
        return y[where.to(y.device)].cpu()

    def logits(self) -> Iterator[Tensor]:
        """Of the clean images, batch by batch, on the CPU."""
        for x, _, _ in batches(self.task.data, self.task.batch_size, self.task.device):
            yield self.asked(x, "clean images")


class _Judge:
    """Which images an attack breaks; called with positions among ``chosen`` and adversarial images.

    The model on trial judges, and a copy that was asked nothing before, in another order and in other batches. An image
    is broken if either is wrong about it: whoever loads the model next gets that answer.
    """

    def __init__(self, trial: Trial, label: str, chosen: Tensor) -> None:
        self._trial = trial
        self._what = f"adversarial images ({label})"
        self._chosen = chosen
        self._memory: Path | None = None
        self.listener: Callable[[Tensor, Tensor], None] = lambda where, x_adv: None
        self.broken = torch.zeros_like(trial.correct)
        self.disputed = torch.zeros_like(trial.correct)  # images that the two answer otherwise

    def continue_from(self, memory: Path) -> None:
        """Go on with what a killed process noted in this file, and note there what is judged from now on."""
        self._memory = memory
        if memory.exists():
            count = len(self.broken)
            broken, disputed = read_whole(memory, 2 * count + 2).decode().split()  # a digit an image, in two lines
            self.broken = from_bits(broken, count)
            self.disputed = from_bits(disputed, count)

    def __call__(self, where: Tensor, x_adv: Tensor) -> None:
        where = self._chosen[where]
        self.listener(where, x_adv)
        again = self._trial.asked_anew(x_adv, self._what)
        logits = self._trial.asked(x_adv, self._what)
        y = self._trial.labels(where)
        wrong = (logits.argmax(dim=1) != y) | (again.argmax(dim=1) != y)
        self.broken[where[wrong]] = True
        self.disputed[where[differ(logits, again)]] = True
        if self._memory is not None:  # before the evaluator notes that this batch is done
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._memory, f"{as_bits(self.broken)}\n{as_bits(self.disputed)}\n", TRY_AGAIN)


def put_on_trial(
    model: nn.Module,
    data: ImageData,
    recipe: Recipe,
    set_up: SetUpTask,
    *,
    transfer: Sequence[Path] = (),
    fresh: Callable[[], nn.Module],
    more: ImageData | None = None,
) -> Trial:
    """A model under the battery; one that cannot be attacked is refused here, before any work.

    Args:
        model: in evaluation mode on ``set_up.device``; raw logits for pixels in [0, 1].
        data: the images on trial, at least one.
        recipe: its budget, batch size and seed are those of the attacks.
        set_up: loads the other models.
        transfer: run directories or checkpoints of these.
        fresh: gives a copy of the model that was asked nothing yet.
        more: further images that the model may be asked about.
    """
    surrogates = {str(target): set_up.load_model(str(target), None) for target in transfer}
    for other in (model, *surrogates.values()):
        refuse_training_mode(other)
    with seeded_global_rng(derive_seed(recipe.seed, "trust/clean")):
        task = evaluation_task(model, data.to(set_up.device), recipe, set_up)
        for other in surrogates.values():
            with_model(task, other)  # refuses one that gives no logits of these classes
    trial = Trial(task, surrogates, fresh, more)
    if all(are_probabilities(logits) for logits in trial.logits()):
        raise ModelError(PROBABILITIES["text"])
    return trial


def differ(logits: Tensor, others: Tensor) -> Tensor:
    """Which rows of (N, C) two passes answered otherwise, beyond rounding: (N,) bool."""
    return (others - logits).abs().amax(dim=1) > _SAME * float(logits.abs().amax())
