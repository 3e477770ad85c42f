"""The base of every attack that measures a model: its options, batches, budget check and counting, written once.

A subclass only crafts adversarial examples. What it returns is re-checked against the budget before it counts, so an
attack with a bug cannot report a win outside eps or outside the pixel range.
"""

from __future__ import annotations

import dataclasses
import time
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from calfat_plugin import returned
from calfat_plugin.errors import ModelError, OptionError
from calfat_plugin.exact import QUARTER, StepSize, exact_text
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.options import option
from calfat_plugin.results import EvaluationResult
from calfat_plugin.seeds import generator
from calfat_plugin.threat import PIXELS, Norm, ThreatModel, lacks_eps
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from calfat_plugin.datasets import ImageData
    from calfat_plugin.recipe.schema import Recipe

_SUBSET_SEED = 0  # one subset for every seed and evaluator of a study, so that numbers compare
_ROW_SUM_TOLERANCE = 1e-5  # of a softmax in float32


class AttackEvaluator(Evaluator):
    """Counts, in both conventions, what a crafted batch does to the model. Subclasses are final and stateless.

    Attributes:
        options: an instance of the entry's options.
        implementation: package and version that make the adversarial examples.
        takes_steps: whether ``craft`` takes the steps of ``threat``, so that a step that does not fit eps is reported.
    """

    implementation = f"calfat-plugin {__version__}"
    takes_steps: ClassVar[bool] = False
    gives_examples = True

    def __init__(self, options: Any) -> None:
        self.options = options

    def threat(self, task: EvaluationTask) -> ThreatModel:
        """The budget in force, which is reported and checked; default: that of ``task``, the run's."""
        return task.threat

    def narrow(self, task: EvaluationTask) -> EvaluationTask:
        """The examples to attack and the batch size; default: all of ``task`` as it is."""
        return task

    @abstractmethod
    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        """How the adversarial examples of ``task`` are made, ready for JSON. Norm and eps are added from ``threat``."""

    @abstractmethod
    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """Adversarial examples for one batch.

        Args:
            task: the model and the budget; ``task.tally`` adds up what is worth reporting.
            x: (N, C, H, W) float32 in [0, 1], a copy.
            y: (N,) labels, a copy.
            noise: the only source of randomness; a CPU generator, so that every device draws the same.

        Returns:
            Shape of x, inside the budget.
        """

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Craft, re-check and count batch by batch.

        Raises:
            BudgetError: what ``craft`` returned is outside eps, outside the pixel range, or not finite; not where
                there is no budget.
            PluginError: it returned something else than images.
            ModelError: the model is in training mode, or returned nan or inf.
        """
        import torch

        from calfat_plugin.datasets.batches import batches

        refuse_training_mode(task.model)
        started = time.perf_counter()
        tally: Counter[str] = Counter()
        numbers: dict[str, list[Tensor]] = {}

        def add(name: str, count: int) -> None:
            tally[name] += count

        def record(name: str, values: Tensor) -> None:
            numbers.setdefault(name, []).append(values.detach().cpu().double())

        task = dataclasses.replace(self.narrow(task), tally=add, record=record)
        noise = generator(task.seed, f"evaluate/{label}", round=task.round)
        threat = self.threat(task)
        settings = returned.mapping(self.settings(task), "settings returned")  # first: an error costs no attack
        verdicts: list[Tensor] = []
        probabilities = True
        done = correct = 0
        for x, y, examples in batches(task.data, task.batch_size, task.device):
            crafted = self.craft(task, x.clone(), y.clone(), noise)  # copies: it may write into them
            x_adv = returned.like(crafted, x, "craft returned")
            if self.has_budget:
                threat.check(x_adv, x, who=f"evaluator '{label}'")
            task.on_examples(torch.arange(done, done + len(y)), x_adv)
            with torch.no_grad():
                logits = finite(task.model(x_adv), f"images of evaluator '{label}'")
            probabilities = probabilities and are_probabilities(logits)
            verdicts.append((logits.argmax(dim=1) == y).cpu())
            done += len(y)
            correct += int((verdicts[-1] & task.clean_correct[examples.index.cpu()]).sum())
            task.on_progress(done, len(task.data), correct)
        details: dict[str, Any] = dict(tally)
        warnings = self._warnings(threat, probabilities)
        if warnings:
            details["warnings"] = warnings
        if self.has_budget:
            budget = budget_as_json(threat)
            settings = {**budget, **settings, **budget}  # in front, and no plugin can change it
        return EvaluationResult(
            **counts_of(task.data.y, task.clean_correct, torch.cat(verdicts), task.num_classes),
            label=label,
            settings=settings,
            implementation=self.implementation,
            seconds=time.perf_counter() - started,
            details=details,
            metrics={name: float(torch.cat(parts).mean()) for name, parts in numbers.items()},
        )

    def _warnings(self, threat: ThreatModel, probabilities: bool) -> list[dict[str, str]]:
        """Findings about the model's answers and the attack's steps."""
        warnings = []
        if probabilities:
            warnings.append(PROBABILITIES)
        if self.takes_steps and threat.step_problem():
            warnings.append({"code": STEP_SIZE, "text": threat.step_problem()})
        return warnings


@dataclass(frozen=True)
class BudgetOptions:
    """Options of every attack; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``.

    Attributes:
        norm: of the ball, ``linf``, ``l2`` or ``l1``; needs eps beside it.
        eps: radius of the ball, >= 0, a fraction of the pixel range.
        max_examples: attack a fixed random subset of so many test examples, >= 1; None: all of them.
        batch_size: examples a batch, >= 1.
    """

    norm: Norm | None = option(None, help="norm of the ball; needs eps beside it; null: that of calfat.threat")
    eps: Fraction | None = option(None, low=0, help="radius of the ball; null: that of calfat.threat", unit=PIXELS)
    max_examples: int | None = option(
        None, low=1, help="use a fixed random subset of this many test examples; null: all of them"
    )
    batch_size: int | None = option(None, low=1, help="examples a batch; null: that of calfat.evaluation")

    def __post_init__(self) -> None:
        if self.norm is not None and self.eps is None:
            raise OptionError(f"norm: {lacks_eps(self.norm)}")
        for name, value in self.lengths().items():
            follows_eps = isinstance(value, StepSize) and value.factor is not None
            if value is not None and value > 1 and not follows_eps and self.norm not in ("l2", "l1"):
                raise OptionError(
                    f"{name} is a fraction of the pixel range, such as 8/255; got {exact_text(value)}. "
                    "(For an L2 or L1 ball wider than 1, say norm: l2 or norm: l1 beside it.)"
                )

    def lengths(self) -> dict[str, Fraction | None]:
        """The options that are lengths in the norm."""
        return {"eps": self.eps}

    def threat(self, run: ThreatModel) -> ThreatModel:
        """The budget in force: that of ``run``, with this evaluator's own values where given.

        In another norm than the run's the step is a quarter of eps unless there is an own one.

        Raises:
            OptionError: both together make no sense.
        """
        changes: dict[str, Any] = {}
        if self.norm not in (None, run.norm):
            changes = {"norm": self.norm, "step_size": QUARTER}
        for name, value in self.lengths().items():
            if value is not None:
                changes[name] = value
        return dataclasses.replace(run, **changes)


class BudgetedAttack(AttackEvaluator):
    """Abstract: an attack whose options are ``BudgetOptions``."""

    options: BudgetOptions

    def threat(self, task: EvaluationTask) -> ThreatModel:
        return self.options.threat(task.threat)

    def narrow(self, task: EvaluationTask) -> EvaluationTask:
        return narrowed(task, self.options)


def check_budget(options: BudgetOptions, recipe: Recipe) -> None:
    """Entry check: the options and the recipe's threat model must go together."""
    options.threat(recipe.threat)


def narrowed(task: EvaluationTask, options: BudgetOptions) -> EvaluationTask:
    """The same task on ``max_examples``, and in batches of ``batch_size``."""
    where = fixed_subset(len(task.data), options.max_examples)
    return dataclasses.replace(
        task,
        data=subset(task.data, options.max_examples),
        batch_size=options.batch_size or task.batch_size,
        clean_predictions=task.clean_predictions[where],
        on_examples=lambda of_chosen, x_adv: task.on_examples(where[of_chosen], x_adv),
    )


def fixed_subset(num_examples: int, max_examples: int | None) -> Tensor:
    """Ascending indices, on the CPU, of a random subset that is always the same one; None: of all examples.

    A smaller subset is part of a larger one. Random, because test sets from folders are sorted by class.
    """
    import torch  # here, not above: recipes are checked without torch

    order = torch.randperm(num_examples, generator=generator(_SUBSET_SEED, "monitor subset"))
    return order[:max_examples].sort().values


def subset(data: ImageData, max_examples: int | None) -> ImageData:
    """``data`` at ``fixed_subset``; itself, no copy, where that is everything."""
    where = fixed_subset(len(data), max_examples)
    if len(where) == len(data):
        return data
    return data.subset(where.numpy())


STEP_SIZE = "step-size"  #: the code of the finding that steps do not fit eps, of an attack or of training
#: A finding in ``EvaluationResult.details["warnings"]``: a code for programs and a text for people.
PROBABILITIES = {
    "code": "probabilities",
    "text": "the model returns probabilities, not logits: every row is in [0, 1] and sums to 1. The gradient of a "
    "cross-entropy on top of a softmax vanishes, so the attacks are weak and the accuracy under them is too high. "
    "Let the model return the logits in front of its softmax.",
}


def are_probabilities(logits: Tensor) -> bool:
    """Whether every row of (N, C), C > 1, is a probability distribution."""
    if logits.shape[1] < 2:
        return False
    off = (logits.sum(dim=1) - 1).abs().amax()
    low, high = logits.aminmax()
    return bool((low >= 0) & (high <= 1 + _ROW_SUM_TOLERANCE) & (off <= _ROW_SUM_TOLERANCE))


def finite(logits: Tensor, what: str) -> Tensor:
    """The same logits, (N, C)."""
    wrong = int((~logits.isfinite()).any(dim=1).sum())
    if wrong:
        raise ModelError(
            f"the model returned nan or inf for {wrong} of {len(logits)} {what}. Such an answer is no class, so "
            "nothing can be counted: find the operation that overflows or divides by zero, and repair the model."
        )
    return logits


def share(verdicts: Tensor) -> float:
    """The share of True in (N,) bool."""
    return int(verdicts.sum()) / len(verdicts)


def budget_as_json(threat: ThreatModel) -> dict[str, str]:
    """Norm and exact eps."""
    return {"norm": threat.norm, "eps": exact_text(threat.eps)}


def counts_of(y: Tensor, clean_correct: Tensor, adv_correct: Tensor, num_classes: int) -> dict[str, Any]:
    """Numbers of examples, accuracies in both conventions of robust accuracy (evaluation.md), and what guessing gives.

    An example is robust when it is classified correctly both clean and at its final adversarial point: ``adv_correct``,
    (N,) bool on the CPU, like ``clean_correct``. The *release* of CalFAT leaves the clean image out of account, so its
    accuracy may exceed the natural one.
    """
    y = y.cpu()
    examples = y.bincount(minlength=num_classes).tolist()
    counts: dict[str, Any] = {"num_examples": len(y), "guess": max(examples) / len(y)}
    for suffix, right in (("", adv_correct & clean_correct.cpu()), ("_release", adv_correct)):
        right_of_class = y[right].bincount(minlength=num_classes).tolist()
        per_class: list[float | None] = []
        for number_right, number in zip(right_of_class, examples, strict=True):
            accuracy = None
            if number:
                accuracy = number_right / number
            per_class.append(accuracy)
        counts[f"accuracy{suffix}"] = sum(right_of_class) / len(y)
        counts[f"per_class{suffix}"] = tuple(per_class)
    return counts


def refuse_training_mode(model: nn.Module) -> None:
    """Refuse a model in which anything is in training mode: its numbers would depend on the batch."""
    for name, module in model.named_modules():
        if getattr(module, "training", False):  # TorchScript that was frozen has no mode
            todo = "Call model.eval() first."
            if "eval" in vars(model):  # torch.export replaces the method of what it makes by one that refuses
                todo = "Its code is that of one mode: if it was exported in evaluation mode, set `training = False` "
                todo += "of each of its modules()."
            raise ModelError(
                f"the model is in training mode (module '{name or type(module).__name__}'), so dropout and batch "
                f"statistics would blur the evaluation. {todo}"
            )
