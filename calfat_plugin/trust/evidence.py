"""What the checks measured: plain numbers, which ``trust.json`` keeps and the verdict is a function of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The attack whose number is on trial: what papers report beside AutoAttack. Also its label.
CLAIM = "pgd20"

# Facts that the first check finds.
NATURAL = "natural"  # accuracy on the clean images
GUESS = "guess"  # share of the most frequent class: what a model that ignores the image has under every attack
CHANGED = "changed"  # share of images whose logits differ when the model is asked again


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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Evidence:
        """The inverse of ``dataclasses.asdict``.

        Raises:
            TypeError: keys are missing, or there are others.
        """
        return cls(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})


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
        return next((row.left for row in reversed(self.rows) if row.left is not None), self.natural)

    def contributions(self, evidence: Iterable[Evidence]) -> dict[str, float]:
        """Check to the share that its attacks broke of what withstood the checks before it, at the budget."""
        before, found = self.natural, {}
        for each in evidence:
            after = next((row.left for row in reversed(each.rows) if row.left is not None), before)
            found[each.check], before = before - after, after
        return found


def found(evidence: Iterable[Evidence], budget: str) -> Found | None:
    """The evidence at a glance; None before the first check.

    Args:
        evidence: of the checks that are done, in order.
        budget: eps on trial, as a text.
    """
    every = tuple(evidence)
    facts = {name: value for each in every for name, value in each.facts.items()}
    if NATURAL not in facts:
        return None
    rows = tuple(row for each in every for row in each.rows)
    claimed = next((row.accuracy for row in rows if row.attack == CLAIM and row.eps == budget), None)
    examples = max((row.examples for row in rows), default=0)
    return Found(facts[NATURAL], facts[GUESS], facts[CHANGED], budget, claimed, examples, rows)
