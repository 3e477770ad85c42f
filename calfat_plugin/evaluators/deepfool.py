"""DeepFool: the shortest way across a decision boundary, found by linearising the model again and again (methods.md 9).

It minimises the distance instead of using up a budget. An example counts as broken where the distance is within eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.attacks import attack_mode, input_gradient
from calfat_plugin.maths.losses import wide
from calfat_plugin.maths.passes import micro_batches
from calfat_plugin.options import option
from calfat_plugin.profiling import timed
from calfat_plugin.threat import ThreatModel, per_example

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.recipe.schema import Recipe

DISTORTION = "distortion"
_EXTRA = 1e-4  # added to each step, in the norm: the authors' code does, for steps that rounding would swallow
_FLAT = 1e-30  # a slope to divide by where there is none
_FAR = 1e6  # longer than any image: no boundary is there, and 0 times it is 0
_COUNTING = "broken where the change that it found is at most eps long; elsewhere the clean image is the final point"


@dataclass(frozen=True)
class DeepFoolOptions(BudgetOptions):
    """Options of DeepFool; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    steps: int = option(50, low=1, help="linearisations at most; an example stops at the first that breaks it")
    overshoot: float = option(0.02, low=0, help="how far beyond the boundary, as a share of the way to it")
    candidates: int = option(
        10, low=2, help="classes whose boundaries count: those of the largest clean logits, the true one among them"
    )


class DeepFool(BudgetedAttack):
    """Steps to the nearest boundary of the linearised model until the class changes."""

    options: DeepFoolOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        how = self.options
        return {
            "attack": "deepfool",
            "steps": how.steps,
            "overshoot": how.overshoot,
            "candidates": min(how.candidates, task.num_classes),
            "counting": _COUNTING,
            "batch_size": task.batch_size,
        }

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """The point beyond the boundary where it is within eps, else x."""
        import torch

        threat, found = self.threat(task), torch.empty_like(x)
        with attack_mode(task.model):
            for part in micro_batches(len(y), task.rows_at_once):
                found[part] = self._across(task, threat, x[part], y[part])
        with torch.no_grad():
            broken = task.model(found).argmax(dim=1) != y
        distance = threat.distance(found, x)
        crossed = broken & (distance > 0)  # what was wrong from the start has not moved
        if crossed.any():
            task.record(DISTORTION, distance[crossed])
        task.tally("unbroken", int((~broken).sum()))
        return found.where(per_example(broken & (distance <= float(threat.eps)), x), x)

    def _across(self, task: EvaluationTask, threat: ThreatModel, x: Tensor, y: Tensor) -> Tensor:
        """Where each example first got another class; after the last step where it did not."""
        import torch

        found, change = x.clone(), torch.zeros_like(x)
        working, rivals = torch.arange(len(y), device=y.device), None
        for step in range(self.options.steps):
            x_adv = found[working].requires_grad_()
            with torch.enable_grad(), timed("forward"):
                logits = wide(task.model(x_adv))
            right = logits.argmax(dim=1) == y[working]
            if not right.any():
                break
            if rivals is None:
                rivals = logits.topk(min(self.options.candidates, logits.shape[1])).indices
            length, direction = _to_nearest(threat, x_adv, logits, y[working], rivals[working])
            working, length, direction = working[right], length[right], direction[right]
            if step == 0:
                task.tally("zero_gradients", int((direction.flatten(1).abs().amax(dim=1) == 0).sum()))
            change[working] += per_example(length + _EXTRA, x) * direction
            beyond = x[working] + (1 + self.options.overshoot) * change[working]
            found[working] = beyond.clamp(*threat.bounds)
        return found


def _check(options: DeepFoolOptions, recipe: Recipe) -> None:
    """Entry check: of what ``check_budget`` looks at, and the norm."""
    if options.threat(recipe.threat).norm == "l1":
        raise OptionError(
            "deepfool has no l1: its step would change one pixel, which soon cannot change further. Take fab for the "
            "smallest change in l1, or give deepfool a norm and an eps of its own."
        )


def _to_nearest(threat: ThreatModel, x_adv: Tensor, logits: Tensor, y: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
    """The way to the nearest boundary of the model linearised at x_adv, (N, ...), which the logits, (N, C), are of.

    Of the classes only ``rivals``, (N, K), count. Returns (N,) lengths in the threat's norm, and (N, ...) directions of
    length 1; 0 where no boundary has a slope.
    """
    import torch

    rows = torch.arange(len(y), device=y.device)
    nearest, towards = torch.full_like(logits[:, 0], torch.inf), torch.zeros_like(x_adv)
    for rival in rivals.unbind(dim=1):
        with torch.enable_grad():
            behind = logits[rows, y] - logits[rows, rival]
        grad = input_gradient(-behind.sum(), x_adv, keep_graph=True)
        length = (behind.detach().abs() / threat.slope(grad).clamp_min(_FLAT)).clamp_max(_FAR)
        closer = (length < nearest) & (rival != y)
        nearest = length.where(closer, nearest)
        towards = threat.steepest(grad).where(per_example(closer, x_adv), towards)
    return nearest, towards


ENTRY = EvaluatorEntry(
    "deepfool",
    build=DeepFool,
    config=DeepFoolOptions,
    summary="the smallest change that DeepFool finds; broken where it is within eps",
    formula="x' <- x' + (min_k (z_y - z_k) / ||grad (z_k - z_y)||_* + 1e-4) d, d of length 1, until argmax f(x') != y",
    citation=paper("moosavidezfooli2016deepfool"),
    number_option="steps",
    check=_check,
    metrics={
        DISTORTION: "mean length of the smallest change found, in the norm, over the examples that were right and were "
        "broken, whatever eps"
    },
)
