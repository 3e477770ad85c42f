"""What a check of the battery is: some attacks on the model, and what in their numbers speaks against it.

A check keeps nothing. Its attacks need torch and the model; its symptoms are a function of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from calfat_plugin.evaluators.alarms import clearly_below
from calfat_plugin.judging.findings import Findings, Found, Row
from calfat_plugin.report.numbers import percent

if TYPE_CHECKING:
    from calfat_plugin.interfaces import Evaluator
    from calfat_plugin.judging.trial import Trial

#: How far the accuracies (shares) of two attacks of one strength may differ without a reason to doubt; one image is
#: never one. Both attacked the same images, so this allows for the chance in random starts, not for that in the images.
SLACK = 0.02
#: Steps of the attack on trial, and of those that differ from it in one thing.
STEPS = 20


class Symptom(NamedTuple):
    """What an honest measurement would not show."""

    text: str  # a part of a sentence
    masks: bool = False  # the model hides from attacks, so that what withstood them all is no usable number either
    decides: str = ""  # what would settle whether the number holds, and whether --full does; empty where it hides


class Attack(NamedTuple):
    """An attack of a check."""

    label: str
    evaluator: Evaluator
    resumable: bool = False  # whether it continues where a killed process stopped
    classes: int = 2  # it needs so many


@dataclass(frozen=True)
class Check:
    """One question to the model; a class of its own where more is computed than attacks."""

    name: str
    title: str
    attacks: tuple[Attack, ...] = ()
    weakness: str = ""  # what it says about the number on trial if these attacks break more; empty: nothing
    masks: bool = False  # whether ``weakness`` says that the model hides from attacks
    # Of attacks that need no gradient of the model, so that they should break fewer images: what is said of one that
    # breaks more, of {attack}, what it {leaves}, and the {least} that gradients leave.
    finds: str = ""
    # What else in the rows, and in all that was found, an honest measurement would not show.
    symptom: Callable[[Sequence[Row], Found], Iterator[Symptom]] = lambda rows, found: iter(())

    def run(self, trial: Trial) -> Findings:
        """Look at the model; what its attacks break is noted in ``trial.robust``."""
        return Findings(self.name, tuple(self.rows(trial)))

    def rows(self, trial: Trial) -> Iterator[Row]:
        """Make the attacks."""
        for attack in self.attacks:
            if trial.task.num_classes >= attack.classes:
                yield trial.attack(attack.label, attack.evaluator, resumable=attack.resumable)

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        """What in ``rows``, and in what else was found, an honest measurement would not show."""
        if self.finds and found.white_box is not None:
            least = percent(found.white_box)
            for row in rows:
                if clearly_below(row.accuracy, found.white_box, row.examples, SLACK):
                    text = self.finds.format(attack=row.attack, leaves=percent(row.accuracy), least=least)
                    yield Symptom(text, masks=True)
        yield from self.symptom(rows, found)
