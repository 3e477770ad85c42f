"""Accuracies as counts, and their summary over seeds. Accuracies are fractions in [0, 1], never
percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Verdicts counted per class; batches add up with ``+``, exactly.

    Two conventions of robust accuracy exist (methods.md 9), and both follow from these counts:
    the *release* counts an example as robust when its final adversarial point is classified
    correctly, whatever became of the clean image; *strict* wants both right, and so never exceeds
    natural accuracy.

    Attributes:
        examples: examples per class, length C.
        clean: of those, clean image classified correctly.
        adv: final adversarial point classified correctly; None where nothing was attacked.
        both: both classified correctly; None where nothing was attacked.
    """

    examples: tuple[int, ...]
    clean: tuple[int, ...]
    adv: tuple[int, ...] | None = None
    both: tuple[int, ...] | None = None

    @classmethod
    def from_verdicts(
        cls, clean_correct: Tensor, y: Tensor, num_classes: int, adv_correct: Tensor | None = None
    ) -> Counts:
        """Count verdicts.

        Args:
            clean_correct: (N,) bool.
            y: (N,) labels in 0 .. num_classes - 1.
            num_classes: C.
            adv_correct: (N,) bool, verdict on the final adversarial point.
        """

        def per_class(selected: Tensor) -> tuple[int, ...]:
            return tuple(selected.bincount(minlength=num_classes).tolist())

        clean_correct = clean_correct.bool()  # numbers would be taken for positions below
        examples, clean = per_class(y), per_class(y[clean_correct])
        if adv_correct is None:
            return cls(examples, clean)
        adv_correct = adv_correct.bool()
        return cls(examples, clean, per_class(y[adv_correct]), per_class(y[clean_correct & adv_correct]))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            _sum(self.examples, other.examples),
            _sum(self.clean, other.clean),
            _sum(self.adv, other.adv) if self.adv is not None and other.adv is not None else None,
            _sum(self.both, other.both) if self.both is not None and other.both is not None else None,
        )

    @property
    def num_examples(self) -> int:
        """All examples counted."""
        return sum(self.examples)

    @property
    def natural_acc(self) -> float | None:
        """Share of clean images classified correctly; None when nothing was counted."""
        return _share(self.clean, self.examples)

    @property
    def robust_acc(self) -> float | None:
        """Release convention; None when nothing was attacked. May exceed natural accuracy."""
        return _share(self.adv, self.examples)

    @property
    def robust_acc_strict(self) -> float | None:
        """Clean and adversarial both right; None when nothing was attacked. At most natural
        accuracy.
        """
        return _share(self.both, self.examples)

    @property
    def natural_per_class(self) -> tuple[float | None, ...]:
        """Natural accuracy of each class, None for a class without examples."""
        return _shares(self.clean, self.examples)

    @property
    def robust_per_class(self) -> tuple[float | None, ...] | None:
        """Release convention per class, None for a class without examples."""
        return None if self.adv is None else _shares(self.adv, self.examples)

    @property
    def robust_per_class_strict(self) -> tuple[float | None, ...] | None:
        """Strict convention per class, None for a class without examples."""
        return None if self.both is None else _shares(self.both, self.examples)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _share(part: tuple[int, ...] | None, whole: tuple[int, ...]) -> float | None:
    total = sum(whole)
    return None if part is None or total == 0 else sum(part) / total


def _shares(part: tuple[int, ...], whole: tuple[int, ...]) -> tuple[float | None, ...]:
    return tuple(p / w if w else None for p, w in zip(part, whole, strict=True))


class MeanStd(NamedTuple):
    """Mean over seeds and sample standard deviation; ``std`` is None for a single value."""

    mean: float
    std: float | None


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and sample standard deviation (ddof 1, methods.md 12) of at least one value.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return MeanStd(mean, None)
    return MeanStd(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)))
