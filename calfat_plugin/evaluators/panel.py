"""A panel of threats, most of which a model was not trained for: three norms and common corruptions (methods.md 9)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

from calfat_plugin import __version__
from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.evaluators.autoattack.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.base import PIXELS, counts_of, narrowed, refuse_training_mode
from calfat_plugin.evaluators.corruptions import ENTRY as CORRUPTIONS
from calfat_plugin.evaluators.corruptions import MEAN, CorruptionOptions, Corruptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.exact import QUARTER
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.options import option
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import Norm, ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.recipe.schema import Recipe

_COUNTING = "right clean and under every threat. The mean is over the threats, of corruptions their mean"
_BALL = "eps of the threat in {}; null leaves it out"


@dataclass(frozen=True)
class PanelOptions:
    """Options of the panel; ``null`` leaves a threat out, or takes the value of ``calfat.evaluation``."""

    linf: Fraction | None = option(
        Fraction(8, 255), low=0, high=1, open_low=True, help=_BALL.format("linf"), unit=PIXELS
    )
    l2: Fraction | None = option(Fraction(1, 2), low=0, open_low=True, help=_BALL.format("l2"), unit=PIXELS)
    l1: Fraction | None = option(Fraction(12), low=0, open_low=True, help=_BALL.format("l1"), unit=PIXELS)
    attack: Literal["pgd", "autoattack"] = option("pgd", help="what looks for the worst point of each ball")
    steps: int = option(20, low=1, help="gradient steps of pgd, each a quarter of eps long")
    restarts: int = option(1, low=1, help="independent starts of pgd")
    max_examples: int | None = option(
        None, low=1, help="use a fixed random subset of this many test examples; null: all of them"
    )
    batch_size: int | None = option(None, low=1, help="examples a batch; null: that of calfat.evaluation")


class Panel(Evaluator):
    """Every threat by the evaluator that measures it alone; an example counts if none of them breaks it."""

    has_budget = False  # of the run: each threat has its own, and keeps it
    gives_examples = True  # those that broke something

    def __init__(self, options: PanelOptions) -> None:
        self.options = options

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Let each threat work on all examples."""
        refuse_training_mode(task.model)
        started = time.perf_counter()
        task = narrowed(task, self.options.max_examples, self.options.batch_size)
        threats = dict(self._threats())
        robust = task.clean_correct.cpu().clone()
        results = {}
        for position, (name, evaluator) in enumerate(threats.items()):
            part = _part(task, position, len(threats), robust)
            results[name] = evaluator.evaluate(part, f"{label}/{name}")
        figures = {name: result.metrics.get(MEAN, result.accuracy) for name, result in results.items()}
        return EvaluationResult(
            **counts_of(task.data.y, task.clean_correct, robust, task.num_classes),
            label=label,
            settings={
                "attack": "panel",
                "threats": {name: dict(result.settings) for name, result in results.items()},
                "counting": _COUNTING,
            },
            implementation=f"calfat-plugin {__version__}",
            seconds=time.perf_counter() - started,
            details={
                "threats": {
                    name: {"accuracy": result.accuracy, "seconds": result.seconds, **result.details}
                    for name, result in results.items()
                },
                "zero_gradients": max(result.details.get("zero_gradients", 0) for result in results.values()),
                "warnings": [
                    {**warning, "text": f"{name}: {warning['text']}"}
                    for name, result in results.items()
                    for warning in result.details.get("warnings", ())
                ],
            },
            metrics={MEAN: sum(figures.values()) / len(figures), **figures},
        )

    def _threats(self) -> Iterator[tuple[str, Evaluator]]:
        how = self.options
        for norm in get_args(Norm):
            eps: Fraction | None = getattr(how, norm)
            if eps is None:
                continue
            if how.attack == "autoattack":
                yield norm, AutoAttack(AutoAttackOptions(norm=norm, eps=eps))
            else:
                ball: dict[str, Any] = {"norm": norm, "eps": eps, "step_size": QUARTER}
                yield norm, PGD(PGDOptions(**ball, steps=how.steps, restarts=how.restarts))
        yield CORRUPTIONS.name, Corruptions(CorruptionOptions())


def _part(task: EvaluationTask, position: int, count: int, robust: Tensor) -> EvaluationTask:
    """The task of one threat of ``count``, which clears in ``robust`` what it breaks."""
    import torch

    examples = len(robust)

    def judge(where: Tensor, x_adv: Tensor) -> None:
        with torch.no_grad():
            broken = (
                task.model(x_adv).argmax(dim=1) != task.data.y[where.to(task.data.y.device)].to(x_adv.device)
            ).cpu()
        robust[where[broken]] = False
        task.on_examples(where[broken], x_adv[broken.to(x_adv.device)])

    def progress(done: int, total: int, correct: int) -> None:
        so_far = position * examples + examples * done // total
        task.on_progress(so_far, count * examples, so_far * int(robust.sum()) // examples)

    return replace(
        task,
        scratch=None,  # what an earlier process broke would not be handed to ``judge`` again
        on_progress=progress,
        on_examples=judge,
    )


def _check(options: PanelOptions, recipe: Recipe) -> None:
    """Entry check: every radius is one of its norm."""
    for norm in get_args(Norm):
        eps: Fraction | None = getattr(options, norm)
        if eps is not None:
            ThreatModel(norm, eps)


ENTRY = EvaluatorEntry(
    "panel",
    build=Panel,
    config=PanelOptions,
    summary="worst case over linf, l2, l1 and common corruptions, each with a budget of its own",
    formula="argmax f(x) = y and argmax f(x') = y for the x' of every threat",
    citation=paper("maini2020adversarial"),
    check=_check,
    metrics={
        MEAN: "mean of the threats' figures",
        **{norm: f"accuracy under the attack in {norm}" for norm in get_args(Norm)},
        CORRUPTIONS.name: "mean accuracy over the kinds and severities of corruptions",
    },
)
