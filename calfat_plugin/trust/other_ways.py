"""Checks that need no gradient of the model, or trust none: other ways to find what PGD may have missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from calfat_plugin.evaluators.alarms import clearly_below
from calfat_plugin.evaluators.autoattack.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.report.numbers import percent
from calfat_plugin.trust.attacks import Noise, NoiseOptions
from calfat_plugin.trust.check import SLACK, STEP, STEPS, Check
from calfat_plugin.trust.evidence import CHANGED, CLAIM, GUESS, NATURAL, Evidence, Found, Row

if TYPE_CHECKING:
    from calfat_plugin.trust.trial import Trial

_DRAWS = 3
_SAME = 1e-4  # of the largest logit: what the order of additions on a GPU may change


class Answers(Check):
    """The clean images, asked about again and again: does the model answer the same?"""

    name, title = "answers", "same answers to the same images"

    def cost(self, examples: int) -> float:
        return (1.0 + _DRAWS) * examples

    def run(self, trial: Trial) -> Evidence:
        import torch

        from calfat_plugin.federation.ambient import seeded_world
        from calfat_plugin.seeds import derive_seed
        from calfat_plugin.trust.trial import share

        draws = []
        for draw in range(_DRAWS):
            with seeded_world(derive_seed(trial.seed, "trust/answers", extra=draw)):
                draws.append(torch.cat(list(trial.logits())))
        tolerance = _SAME * float(draws[0].abs().max())
        differs = torch.stack([(other - draws[0]).abs().amax(dim=1) > tolerance for other in draws[1:]]).any(dim=0)
        frequencies = trial.data.y.cpu().bincount(minlength=trial.num_classes)
        facts = {
            NATURAL: share(trial.correct),
            GUESS: int(frequencies.max()) / len(trial.correct),
            CHANGED: share(differs),
        }
        return Evidence(self.name, tuple(self.rows(trial)) if differs.any() else (), facts)

    def rows(self, trial: Trial) -> Iterator[Row]:
        """For a randomised model: the attack on trial, as often as the clean images, to show what one run is worth."""
        for draw in range(_DRAWS):
            yield trial.attack(f"{CLAIM}, draw {draw + 1}", PGD(PGDOptions(steps=STEPS)))

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[str]:
        if found.changed > 0:
            spread = [row.accuracy for row in rows]
            text = f", and the same attack leaves from {percent(min(spread))} to {percent(max(spread))}" if rows else ""
            yield (
                f"the model is randomised: asked about the same images again, it gives other logits for "
                f"{percent(found.changed)} of them{text}. One run decides nothing: average gradients and verdicts over "
                "many draws (autoattack with version: rand)"
            )


class RandomNoise(Check):
    """Random points of the ball, without any gradient."""

    name, title = "noise", "random noise"
    weakness = "random points of the ball break what PGD does not: its gradients point nowhere"
    draws = 100

    def cost(self, examples: int) -> float:
        return float(self.draws) * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        yield trial.attack(f"noise{self.draws}", Noise(NoiseOptions(draws=self.draws)))

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[str]:
        for row in rows:
            if found.claimed is not None and clearly_below(row.accuracy, found.claimed, row.examples, SLACK):
                yield (
                    f"random noise leaves {percent(row.accuracy)}, fewer than {CLAIM} with {percent(found.claimed)}: "
                    "the gradients point nowhere"
                )


class Transfer(Check):
    """Adversarial examples of other models of the same task."""

    name, title = "transfer", "adversarial examples of other models"
    weakness = "other models' adversarial examples break what its own gradients do not: they are masked"

    def __init__(self, surrogates: int) -> None:
        self._surrogates = surrogates

    def cost(self, examples: int) -> float:
        return self._surrogates * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        for name, model in trial.surrogates.items():
            yield trial.attack(f"{CLAIM} of {name}", PGD(PGDOptions(steps=STEPS)), craft_on=model)

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[str]:
        for row in rows:
            if found.claimed is not None and clearly_below(row.accuracy, found.claimed, row.examples, SLACK):
                yield (
                    f"{row.attack} leaves {percent(row.accuracy)}, fewer than the model's own {CLAIM} with "
                    f"{percent(found.claimed)}: its gradients are masked"
                )


class BlackBox(Check):
    """Square, a random search that asks for logits alone, against everything before it that used gradients."""

    name, title = "black-box", "attack without gradients"
    weakness = (
        "Square, which uses no gradients, breaks what all gradient attacks do not: the gradients are masked (a step "
        "without a derivative, or noise, between the pixels and the logits)"
    )
    queries = 1000

    def cost(self, examples: int) -> float:
        return float(self.queries) * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        options = AutoAttackOptions(version="custom", attacks="square", queries=self.queries)
        yield trial.attack(f"square{self.queries}", AutoAttack(options), resumable=True)

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[str]:
        white = [row.accuracy for row in found.rows if row.left is not None and row.zero_gradients is not None]
        for row in rows:
            if white and clearly_below(row.accuracy, min(white), row.examples, SLACK):
                yield (
                    f"Square, which uses no gradients, leaves {percent(row.accuracy)}, fewer than the best attack that "
                    f"uses them with {percent(min(white))}: the gradients are masked"
                )


@dataclass(frozen=True)
class LastWord(Check):
    """AutoAttack as published.

    Attributes:
        examples: it attacks so many of the images, a fixed random subset; None: all.
        iterations, queries: fewer than published, for tests.
    """

    examples: int | None = None
    iterations: int = 100
    queries: int = 5000
    title: ClassVar[str] = "AutoAttack"
    weakness: ClassVar[str] = "AutoAttack breaks what PGD-20 does not"

    @property
    def name(self) -> str:  # type: ignore[override]
        return "autoattack" if self.examples is None else f"autoattack-{self.examples}"

    def cost(self, examples: int) -> float:
        passes = (1 + 9) * self.iterations * STEP + 9 * self.iterations * 2 * STEP + self.queries
        return passes * min(examples, self.examples or examples)

    def rows(self, trial: Trial) -> Iterator[Row]:
        options = AutoAttackOptions(max_examples=self.examples, iterations=self.iterations, queries=self.queries)
        yield trial.attack("autoattack", AutoAttack(options), max_examples=self.examples, resumable=True)
