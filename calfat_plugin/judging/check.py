"""What a check of the battery is: some attacks on the model, and what in their numbers speaks against it.

A check keeps nothing. Its attacks need torch and the model; its symptoms are a function of numbers. Some attacks are
made by checks alone: random points, and losses that do not depend on the scale of the logits. They are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from calfat_plugin.evaluators.alarms import clearly_below
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.evaluators.gradient import PGD, margin
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.judging.findings import Findings, Overview, Row
from calfat_plugin.maths.losses import true_class, wide, without_true_class
from calfat_plugin.options import option
from calfat_plugin.report.numbers import percent
from calfat_plugin.threat import per_example

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.judging.trial import Trial

#: How far the accuracies (shares) of two attacks of one strength may differ without a reason to doubt. A single image
#: is no reason. Both attacked the same images, so this allows for the chance in random starts, not in the images.
SLACK = 0.02
#: Steps of the attack on trial, and of those that differ from it in one thing.
STEPS = 20


class Symptom(NamedTuple):
    """What an honest measurement would not show."""

    text: str  # a part of a sentence
    masks: bool = False  # the model hides from attacks, so that what withstood them all is no usable number either
    decides: str = ""  # what would settle whether the number holds, and whether --full does; empty where it hides


class Attack(NamedTuple):
    """An attack of a check."""

    label: str
    evaluator: Evaluator
    resumable: bool = False  # whether it continues where a killed process stopped
    classes: int = 2  # it needs so many


@dataclass(frozen=True)
class Check:
    """One question to the model; a class of its own where more is computed than attacks."""

    name: str
    title: str
    attacks: tuple[Attack, ...] = ()
    weakness: str = ""  # what it says about the number on trial if these attacks break more; empty: nothing
    masks: bool = False  # whether ``weakness`` says that the model hides from attacks
    # Of attacks that need no gradient of the model, so that they should break fewer images: what is said of one that
    # breaks more, of {attack}, what it {leaves}, and the {least} that gradients leave.
    finds: str = ""
    # What else in the rows, and in all that was found, an honest measurement would not show.
    symptom: Callable[[Sequence[Row], Overview], Iterator[Symptom]] = lambda rows, overview: iter(())

    def run(self, trial: Trial) -> Findings:
        """Look at the model; what its attacks break is noted in ``trial.robust``."""
        return Findings(self.name, tuple(self.rows(trial)))

    def rows(self, trial: Trial) -> Iterator[Row]:
        """Make the attacks."""
        for attack in self.attacks:
            if trial.task.num_classes >= attack.classes:
                yield trial.attack(attack.label, attack.evaluator, resumable=attack.resumable)

    def symptoms(self, rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
        """What in ``rows``, and in what else was found, an honest measurement would not show."""
        if self.finds and overview.white_box is not None:
            least = percent(overview.white_box)
            for row in rows:
                if clearly_below(row.accuracy, overview.white_box, row.examples, SLACK):
                    text = self.finds.format(attack=row.attack, leaves=percent(row.accuracy), least=least)
                    yield Symptom(text, masks=True)
        yield from self.symptom(rows, overview)


# --- attacks of checks alone ------------------------------------------------------------------------------------------

_SPREAD = 10.0  # logits from 0 to 10: the softmax neither saturates nor is flat
_TINY = 1e-12


class DLR(PGD):
    """PGD on the difference of logits ratio (Croce and Hein 2020), for at least three classes."""

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "loss": "difference of logits ratio"}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """-(z_y - max_{k != y} z_k) / (z^1 - z^3), z^1 >= z^2 >= z^3 the largest logits; summed over the batch."""
        logits = wide(logits)
        largest = logits.topk(3, dim=1).values
        return -(margin(logits, y) / (largest[:, 0] - largest[:, 2] + _TINY)).sum()


class ProbabilityMargin(PGD):
    """PGD on the margin of probabilities, of logits that were brought to one spread first."""

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "loss": f"probability margin, logits of spread {_SPREAD:g}"}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """max_{k != y} p_k - p_y with p = softmax(10 z / (max z - min z)); summed over the batch."""
        logits = wide(logits)
        spread = (logits.amax(dim=1, keepdim=True) - logits.amin(dim=1, keepdim=True)).detach()
        p = (logits * (_SPREAD / (spread + _TINY))).softmax(dim=1)
        return (without_true_class(p, y).amax(dim=1) - true_class(p, y)).sum()


@dataclass(frozen=True)
class NoiseOptions(BudgetOptions):
    """Options of random noise; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    draws: int = option(100, low=1, help="points of the ball to try")


class Noise(BudgetedAttack):
    """Uniform points of the ball: the first that is misclassified, else the last one."""

    options: NoiseOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {"attack": "noise", "draws": self.options.draws, "seed": task.seed, "batch_size": task.batch_size}

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """Every draw is for the whole batch, so no point depends on which examples are broken already."""
        import torch

        threat = self.threat(task)
        x_adv = x
        withstands = torch.ones_like(y, dtype=torch.bool)
        with torch.no_grad():
            for _ in range(self.options.draws):
                points = threat.random_start(x, noise)
                x_adv = points.where(per_example(withstands, x), x_adv)
                withstands = withstands & (task.model(points).argmax(dim=1) == y)
        return x_adv
