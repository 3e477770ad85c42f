"""Common corruptions: no adversary, but changes of an image that happen (methods.md 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import OptionError, did_you_mean
from calfat_plugin.evaluators.base import AttackEvaluator, narrowed
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.corruptions import CORRUPTIONS, severities
from calfat_plugin.maths.passes import passed
from calfat_plugin.options import option
from calfat_plugin.threat import per_example

if TYPE_CHECKING:
    from torch import Generator, Tensor

MEAN = "mean"
_COUNTING = "right where every kind at every severity is; the mean is over kinds and severities"


@dataclass(frozen=True)
class CorruptionOptions:
    """Options of the common corruptions; ``null`` takes the value of ``calfat.evaluation``."""

    kinds: str = option(", ".join(CORRUPTIONS), help="which corruptions, each at five severities")
    max_examples: int | None = option(
        None, low=1, help="use a fixed random subset of this many test examples; null: all of them"
    )
    batch_size: int | None = option(None, low=1, help="examples a batch; null: that of calfat.evaluation")

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in CORRUPTIONS:
                hint = did_you_mean(name, CORRUPTIONS)
                raise OptionError(f"kinds: there is no corruption '{name}'.{hint} Known: {', '.join(CORRUPTIONS)}.")
            if self.names.count(name) > 1:
                raise OptionError(f"kinds: '{name}' is listed twice; once is enough.")

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds, in order."""
        return tuple(name.strip() for name in self.kinds.split(","))


class Corruptions(AttackEvaluator):
    """Each kind at each severity; the worst for an example is its final point."""

    options: CorruptionOptions
    has_budget = False

    def narrow(self, task: EvaluationTask) -> EvaluationTask:
        return narrowed(task, self.options.max_examples, self.options.batch_size)

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {
            "attack": "corruptions",
            "strengths": {name: list(CORRUPTIONS[name].strengths) for name in self.options.names},
            "counting": _COUNTING,
            "seed": task.seed,
            "batch_size": task.batch_size,
        }

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """For every example, the first version that the model gets wrong; where there is none, the last of all."""
        import torch

        final, broken = x, torch.zeros_like(y, dtype=torch.bool)
        verdicts = []
        for kind in self.options.names:
            for severity, version in enumerate(severities(kind, x, noise), start=1):
                with torch.no_grad():
                    right = passed(task.model, version, task.rows_at_once).argmax(dim=1) == y
                final = final.where(per_example(broken, x), version)
                broken = broken | ~right
                verdicts.append(right)
                task.tally(f"{kind}-{severity}", int(right.sum()))
        task.record(MEAN, torch.stack(verdicts).double().mean(dim=0))
        return final


ENTRY = EvaluatorEntry(
    "corruptions",
    build=Corruptions,
    config=CorruptionOptions,
    summary="noise, blur, brightness, contrast, rotation, translation and occlusion, each at five severities",
    formula="argmax f(x') = y for the x' of every kind and severity",
    citation=paper("hendrycks2019benchmarking"),
    metrics={MEAN: "mean accuracy over kinds and severities, whatever becomes of the clean image"},
)
