"""Checks that need no gradient of the model, or trust none: other ways to find what PGD may have missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from calfat_plugin.evaluators.alarms import clearly_below
from calfat_plugin.evaluators.autoattack.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import CW, MIFGSM, PGD, CWOptions, MIFGSMOptions, PGDOptions
from calfat_plugin.judging.attacks import Noise, NoiseOptions
from calfat_plugin.judging.check import SLACK, STEP, STEPS, Check, Symptom
from calfat_plugin.judging.evidence import CLAIM, DEAD, Evidence, Found, Row
from calfat_plugin.report.numbers import percent

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial


class _Independent(Check):
    """Attacks that break fewer images than those along the model's own gradients, where these are of any use.

    Attributes:
        finds: what it says of one that breaks more, of {attack}, what it leaves, and the {least} that gradients leave.
    """

    masks = True
    finds: ClassVar[str]

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        for row in rows:
            if found.white_box is not None and clearly_below(row.accuracy, found.white_box, row.examples, SLACK):
                leaves, least = percent(row.accuracy), percent(found.white_box)
                yield Symptom(self.finds.format(attack=row.attack, leaves=leaves, least=least), masks=True)


class RandomNoise(_Independent):
    """Random points of the ball, without any gradient."""

    name, title = "noise", "random noise"
    weakness = "random points of the ball break what PGD does not: its gradients point nowhere"
    finds = (
        "random noise leaves {leaves}, fewer than the best attack along its gradients with {least}: the gradients "
        "point nowhere"
    )
    draws = 100

    def cost(self, examples: int) -> float:
        return float(self.draws) * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        yield trial.attack(f"noise{self.draws}", Noise(NoiseOptions(draws=self.draws)))


class Transfer(_Independent):
    """Adversarial examples of other models of the same task."""

    name, title = "transfer", "adversarial examples of other models"
    weakness = "other models' adversarial examples break what its own gradients do not: they are masked"
    finds = "{attack} leaves {leaves}, fewer than the best attack along its own gradients with {least}: they are masked"

    def __init__(self, surrogates: int) -> None:
        self._surrogates = surrogates

    def cost(self, examples: int) -> float:
        return self._surrogates * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        for name, model in trial.surrogates.items():
            yield trial.attack(f"{CLAIM} of {name}", PGD(PGDOptions(steps=STEPS)), craft_on=model)


class Surrogate(Transfer):
    """Adversarial examples of a network that is trained on the spot on the labels that the model gives."""

    name, title = "surrogate", "adversarial examples of a surrogate trained here"
    weakness = (
        "adversarial examples of a surrogate, a network trained here on the model's labels, break what its own "
        "gradients do not: they are masked"
    )

    def __init__(self) -> None:
        super().__init__(1)

    def cost(self, examples: int) -> float:
        from calfat_plugin.judging.surrogate import passes

        return passes(examples) + 3 * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        from calfat_plugin.judging.surrogate import trained_surrogate

        model = trained_surrogate(trial)
        attacks: dict[str, PGD] = {
            "pgd20": PGD(PGDOptions(steps=STEPS)),
            "cw20": CW(CWOptions(steps=STEPS)),
            "mi-fgsm20": MIFGSM(MIFGSMOptions(steps=STEPS)),
        }
        for label, attack in attacks.items():
            yield trial.attack(f"{label} of surrogate", attack, craft_on=model)


class DeadUnits(_Independent):
    """Images that wake units which no image on trial wakes, be they planted or an accident of training."""

    name, title = "dead-units", "units that no image wakes"
    weakness = (
        "images that wake dead units (a ReLU whose input is below 0 for every image on trial) break what PGD does not: "
        "no gradient passes through a unit that sleeps, so no attack comes to where it changes the answer"
    )
    masks = False  # the way there is also one along the margin, so only what ``symptoms`` says counts
    finds = (
        "{attack} leaves {leaves}, fewer than the best attack along its gradients with {least}: units that sleep at "
        "every image change the answer where they are awake"
    )

    def cost(self, examples: int) -> float:
        from calfat_plugin.judging.dead_units import passes

        return passes(examples)

    def run(self, trial: Trial) -> Evidence:
        from calfat_plugin.judging.dead_units import Waking, worst_units

        if not trial.robust.any():
            return Evidence(self.name, ())
        units, dead = worst_units(trial)
        label = f"waking {len(units)} dead unit{'s' if len(units) > 1 else ''}"
        rows = (trial.attack(label, Waking(units)),) if units else ()
        return Evidence(self.name, rows, {} if dead is None else {DEAD: dead})


class BlackBox(_Independent):
    """Square, a random search that asks for logits alone, against everything before it that used gradients."""

    name, title = "black-box", "attack without gradients"
    weakness = (
        "Square, which uses no gradients, breaks what all gradient attacks do not: the gradients are masked (a step "
        "without a derivative, or noise, between the pixels and the logits)"
    )
    finds = (
        "Square, which uses no gradients, leaves {leaves}, fewer than the best attack that uses them with {least}: the "
        "gradients are masked"
    )
    queries = 1000

    def cost(self, examples: int) -> float:
        return float(self.queries) * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        options = AutoAttackOptions(version="custom", attacks="square", queries=self.queries)
        yield trial.attack(f"square{self.queries}", AutoAttack(options), resumable=True)


@dataclass(frozen=True)
class AutoAttackCheck(Check):
    """AutoAttack as published, on all images, or on those nearest to an error until so many in a row withstand it.

    A random sample would leave the number too uncertain: of 64 images that all withstand, 5.7 % may still fall. What
    AutoAttack breaks and nothing before it did are images that came close to an error, so it attacks these first, and
    what it leaves is counted for all images.

    Attributes:
        examples: it attacks so many images at a time, of those that are left, and ends when none of them falls; None:
            all images at once.
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
        attack = AutoAttack(AutoAttackOptions(iterations=self.iterations, queries=self.queries))
        if self.examples is None:
            yield trial.attack("autoattack", attack, resumable=True)
            return
        left = trial.nearest_to_an_error(STEPS)
        for number, part in enumerate(left.split(self.examples) if len(left) else (), 1):
            label = "autoattack" if number == 1 else f"autoattack ({number})"
            row = trial.attack(label, attack, only=part.sort().values, resumable=True)
            yield row
            if row.accuracy == 1:
                return
