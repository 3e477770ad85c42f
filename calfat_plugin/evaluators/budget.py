"""Options of every budgeted evaluator: norm, eps, and how much to evaluate at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.options import option
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel, exact_text

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.datasets import ImageData
    from calfat_plugin.recipe.schema import Recipe

PIXELS = "fraction of the pixel range"
_SUBSET_SEED = 0  # one subset for every seed and evaluator of a study, so that numbers compare


@dataclass(frozen=True)
class BudgetOptions:
    """Options of every attack; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    norm: Literal["linf", "l2"] | None = option(None, help="norm of the ball; needs eps beside it")
    eps: Fraction | None = option(None, low=0, help="radius of the ball", unit=PIXELS)
    max_examples: int | None = option(
        None, low=1, help="attack a fixed random subset of this many test examples; null: all of them"
    )
    batch_size: int | None = option(None, low=1, help="examples a batch")

    def __post_init__(self) -> None:
        if self.norm is not None and self.eps is None:
            raise OptionError(f"norm: {self.norm} needs an eps beside it; the same eps is another budget in each norm.")
        for name, value in self.lengths().items():
            if value is not None and value > 1 and self.norm != "l2":
                raise OptionError(
                    f"{name} is a fraction of the pixel range, such as 8/255; got {exact_text(value)}. "
                    "(For an L2 ball wider than 1, say norm: l2 beside it.)"
                )

    def lengths(self) -> dict[str, Fraction | None]:
        """The options that are lengths in the norm."""
        return {"eps": self.eps}

    def threat(self, run: ThreatModel) -> ThreatModel:
        """The budget in force: the run's, with this evaluator's own values where given.

        Raises:
            OptionError: both together make no sense.
        """
        own: dict[str, Any] = {"norm": self.norm, **self.lengths()}
        return dataclasses.replace(run, **{name: value for name, value in own.items() if value is not None})


def check_budget(options: BudgetOptions, recipe: Recipe) -> None:
    """Entry check: the options and the recipe's threat model must go together.

    Raises:
        OptionError: they do not.
    """
    options.threat(recipe.threat)


def narrowed(task: EvaluationTask, max_examples: int | None, batch_size: int | None) -> EvaluationTask:
    """The same task on fewer examples or in other batches."""
    task = dataclasses.replace(task, batch_size=batch_size or task.batch_size)
    where = fixed_subset(len(task.data), max_examples)
    if where is None:
        return task
    return dataclasses.replace(
        task,
        data=task.data.subset(where.numpy()),
        clean_correct=task.clean_correct[where],
        on_examples=lambda of_chosen, x_adv: task.on_examples(where[of_chosen], x_adv),
    )


def fixed_subset(num_examples: int, max_examples: int | None) -> Tensor | None:
    """Ascending indices, on the CPU, of a random subset that is always the same one; None: it would be everything.

    A smaller subset is part of a larger one. Random, because test sets from folders are sorted by class.
    """
    if max_examples is None or max_examples >= num_examples:
        return None
    import torch  # here, not above: recipes are checked without torch

    order = torch.randperm(num_examples, generator=generator(_SUBSET_SEED, "monitor subset"))
    return order[:max_examples].sort().values


def subset(data: ImageData, max_examples: int | None) -> ImageData:
    """``data`` at :func:`fixed_subset`."""
    where = fixed_subset(len(data), max_examples)
    return data if where is None else data.subset(where.numpy())
