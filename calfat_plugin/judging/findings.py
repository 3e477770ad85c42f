"""What the checks measured: plain numbers, which ``trust.json`` keeps and the verdict is a function of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from calfat_plugin.maths.intervals import Interval, wilson

#: The attack whose number is on trial: what papers report beside AutoAttack. Also its label.
CLAIM = "pgd20"

# Facts that the first check finds; those of other checks are named beside them.
NATURAL = "natural"  # accuracy on the clean images
GUESS = "guess"  # share of the most frequent class: what a model that ignores the image has under every attack
CHANGED = "changed"  # share of images whose logits differ when the model is asked again
BATCHED = "batched"  # share of images whose logits depend on the other images of the batch, or on their order
REPEATED = "repeated"  # share of images whose logits stay exactly the same at a random point of the ball
REMEMBERED = "remembered"  # share of points that a freshly loaded copy of the model answers otherwise

_INTERVALS = ("interval", "left_interval")  # of a row in JSON, which follow from the rest of it


@dataclass(frozen=True)
class Row:
    """One attack on the model. Shares are of the examples that it attacked, in [0, 1]."""

    attack: str  # its label: ``pgd20``
    eps: str  # exact
    accuracy: float  # classified correctly both clean and under this attack alone
    left: float | None  # under this and all before it at the budget on trial, of all; None: at another budget
    examples: int
    seconds: float
    zero_gradients: int | None = None  # examples at whose start the gradient is exactly zero; None: it takes none
    disputed: int = 0  # examples whose adversarial images a freshly loaded copy of the model answers otherwise
    of: int | None = None  # how many examples are on trial, which ``left`` is a share of

    @property
    def interval(self) -> Interval | None:
        """Of ``accuracy``; None of images that were picked for being near to an error, which are like no others."""
        if self.of not in (None, self.examples):
            return None
        return wilson(self.accuracy, self.examples)

    @property
    def left_interval(self) -> Interval | None:
        """Of ``left``."""
        if self.left is None:
            return None
        return wilson(self.left, self.of or self.examples)

    def as_json(self) -> dict[str, Any]:
        """Its fields, and the intervals of its accuracies."""
        return {**asdict(self), **{name: getattr(self, name) for name in _INTERVALS}}


@dataclass(frozen=True)
class Findings:
    """What one check found."""

    check: str
    rows: tuple[Row, ...]
    facts: Mapping[str, float] = field(default_factory=dict)  # further shares by name
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [row.as_json() for row in self.rows]
        return {"check": self.check, "seconds": self.seconds, "rows": rows, "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Findings:
        """The inverse of ``as_json``."""
        rows = []
        for row in content["rows"]:
            fields = {key: value for key, value in row.items() if key not in _INTERVALS}
            rows.append(Row(**fields))
        return cls(**{**content, "rows": tuple(rows)})


@dataclass(frozen=True)
class Overview:
    """What checks may compare their own rows with."""

    natural: float
    guess: float  # share of the most frequent class
    facts: Mapping[str, float]
    budget: str  # eps on trial
    claimed: float | None  # accuracy under :data:`CLAIM`; None: not measured
    examples: int
    rows: tuple[Row, ...]

    @property
    def worst(self) -> float:
        """What all attacks at the budget leave together."""
        return _left(self.rows, self.natural)

    @property
    def white_box(self) -> float | None:
        """The least that an attack along the model's own gradients leaves; None: there is none yet."""
        along = (row.accuracy for row in self.rows if row.left is not None and row.zero_gradients is not None)
        return min(along, default=None)

    @property
    def disputed(self) -> float:
        """The largest share of an attack's images that a fresh copy answers otherwise; a single image is none."""
        return max((row.disputed / row.examples for row in self.rows if row.disputed > 1), default=0.0)

    @property
    def difference(self) -> float | None:
        """The share of images that only other attacks than :data:`CLAIM` break; None: it is not measured."""
        if self.claimed is None:
            return None
        return round(max(0.0, self.claimed - self.worst), 9)  # 5 points are 0.05

    @property
    def intervals(self) -> dict[str, Interval]:
        """Of every share above that is measured, by its name."""
        shares = {
            "natural": self.natural,
            "claimed": self.claimed,
            "worst": self.worst,
            "difference": self.difference,
        }
        return {name: wilson(share, self.examples) for name, share in shares.items() if share is not None}

    def contributions(self, evidence: Iterable[Findings]) -> dict[str, float]:
        """Check to the share that its attacks broke of what withstood the checks before it, at the budget."""
        broken = {}
        before = self.natural
        for findings in evidence:
            after = _left(findings.rows, before)
            broken[findings.check] = before - after
            before = after
        return broken


def _left(rows: Sequence[Row], before: float) -> float:
    """What the last of these attacks at the budget on trial left; what was there before, if there is none."""
    for row in reversed(rows):
        if row.left is not None:
            return row.left
    return before


def overview_of(evidence: Iterable[Findings], budget: str, examples: int) -> Overview | None:
    """The evidence at a glance; None before the first check."""
    facts: dict[str, float] = {}
    rows: list[Row] = []
    for findings in evidence:
        facts.update(findings.facts)
        rows += findings.rows
    if NATURAL not in facts:
        return None
    claimed = None
    for row in rows:
        if row.attack == CLAIM and row.eps == budget:
            claimed = row.accuracy
            break
    return Overview(facts[NATURAL], facts[GUESS], facts, budget, claimed, examples, tuple(rows))
