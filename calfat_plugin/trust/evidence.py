"""What the checks measured: plain numbers, which ``trust.json`` keeps and the verdict is a function of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from calfat_plugin.maths.intervals import Interval, wilson

#: The attack whose number is on trial: what papers report beside AutoAttack. Also its label.
CLAIM = "pgd20"

# Facts that the first check finds.
NATURAL = "natural"  # accuracy on the clean images
GUESS = "guess"  # share of the most frequent class: what a model that ignores the image has under every attack
CHANGED = "changed"  # share of images whose logits differ when the model is asked again

_INTERVALS = ("interval", "left_interval")  # of a row in JSON, which follow from the rest of it


@dataclass(frozen=True)
class Row:
    """One attack on the model. Shares are of the examples that it attacked, in [0, 1].

    Attributes:
        attack: its label: ``pgd20``.
        eps: of the ball, exact, as a text.
        accuracy: classified correctly both clean and under this attack alone (``accuracy_strict``).
        left: classified correctly under this attack and everything before it at the budget on trial; None where the
            budget is another one. Of an attack on a sample it is the estimate for all examples.
        examples: how many it attacked.
        seconds: wall-clock time.
        zero_gradients: examples that it found a gradient of exactly zero for at its start; None: it takes none.
    """

    attack: str
    eps: str
    accuracy: float
    left: float | None
    examples: int
    seconds: float
    zero_gradients: int | None = None

    @property
    def interval(self) -> Interval:
        """Of ``accuracy``."""
        return wilson(self.accuracy, self.examples)

    @property
    def left_interval(self) -> Interval | None:
        """Of ``left``; where that is an estimate from a sample, as wide as so few examples make it."""
        return None if self.left is None else wilson(self.left, self.examples)

    def as_json(self) -> dict[str, Any]:
        """Its fields, and the intervals of its accuracies."""
        return {**asdict(self), **{name: getattr(self, name) for name in _INTERVALS}}


@dataclass(frozen=True)
class Evidence:
    """What one check found.

    Attributes:
        check: its name.
        rows: its attacks, in order.
        facts: further shares by name.
    """

    check: str
    rows: tuple[Row, ...]
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Wall-clock time of its attacks."""
        return sum(row.seconds for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"check": self.check, "rows": [row.as_json() for row in self.rows], "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Evidence:
        """The inverse of ``as_json``.

        Raises:
            TypeError: keys are missing, or there are others.
        """
        rows = ({key: value for key, value in row.items() if key not in _INTERVALS} for row in content["rows"])
        return cls(**{**content, "rows": tuple(Row(**row) for row in rows)})


@dataclass(frozen=True)
class Found:
    """What checks may compare their own rows with.

    Attributes:
        natural: clean accuracy.
        guess: share of the most frequent class.
        changed: share of images whose logits differ when the model is asked again.
        budget: eps on trial, as a text.
        claimed: accuracy under :data:`CLAIM`; None: not measured.
        examples: how many images there are.
        rows: every row, in order.
    """

    natural: float
    guess: float
    changed: float
    budget: str
    claimed: float | None
    examples: int
    rows: tuple[Row, ...]

    @property
    def worst(self) -> float:
        """What all attacks at the budget leave together."""
        return self._last[0]

    @property
    def difference(self) -> float | None:
        """The share of images that only other attacks than :data:`CLAIM` break; None: it is not measured."""
        return None if self.claimed is None else round(max(0.0, self.claimed - self.worst), 9)  # 5 points are 0.05

    @property
    def intervals(self) -> dict[str, Interval]:
        """Of every share above that is measured, by its name."""
        _, judged = self._last
        counted = {
            "natural": (self.natural, self.examples),
            "claimed": (self.claimed, self.examples),
            "worst": (self.worst, judged),
            "difference": (self.difference, judged),
        }
        return {name: wilson(share, number) for name, (share, number) in counted.items() if share is not None}

    @property
    def _last(self) -> tuple[float, int]:
        """What is left at the end, and of how many images that is known."""
        return next(
            ((row.left, row.examples) for row in reversed(self.rows) if row.left is not None),
            (self.natural, self.examples),
        )

    def contributions(self, evidence: Iterable[Evidence]) -> dict[str, float]:
        """Check to the share that its attacks broke of what withstood the checks before it, at the budget."""
        before, found = self.natural, {}
        for each in evidence:
            after = next((row.left for row in reversed(each.rows) if row.left is not None), before)
            found[each.check], before = before - after, after
        return found


def found(evidence: Iterable[Evidence], budget: str, examples: int) -> Found | None:
    """The evidence at a glance; None before the first check.

    Args:
        evidence: of the checks that are done, in order.
        budget: eps on trial, as a text.
        examples: how many images there are.
    """
    every = tuple(evidence)
    facts = {name: value for each in every for name, value in each.facts.items()}
    if NATURAL not in facts:
        return None
    rows = tuple(row for each in every for row in each.rows)
    claimed = next((row.accuracy for row in rows if row.attack == CLAIM and row.eps == budget), None)
    return Found(facts[NATURAL], facts[GUESS], facts[CHANGED], budget, claimed, examples, rows)
