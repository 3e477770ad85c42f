"""One check of the battery: some attacks on the model, and what in their numbers speaks against it.

A check is a small object that keeps nothing. ``run`` needs torch and the model; ``symptoms`` is a function of numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from calfat_plugin.judging.evidence import Evidence, Found, Row

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial

#: How far the accuracies (shares) of two attacks of one strength may differ without a reason to doubt; one image is
#: never one. Both attacked the same images, so this allows for the chance in random starts, not for that in the images.
SLACK = 0.02
#: Steps of the attack on trial, and of those that differ from it in one thing.
STEPS = 20
#: Passes of one gradient step: forward, and backward which costs two.
STEP = 3.0


class Symptom(NamedTuple):
    """What an honest measurement would not show.

    Attributes:
        text: a part of a sentence.
        masks: whether the model hides from attacks, so that what withstood them all is no usable number either.
        decides: sentences: what would settle whether the number holds, and whether ``--full`` does; empty where
            ``masks``, whose advice is the same for all.
    """

    text: str
    masks: bool = False
    decides: str = ""


class Check(ABC):
    """One question to the model.

    Attributes:
        weakness: what it says about the number on trial if these attacks break more; empty: nothing.
        masks: whether ``weakness`` says that the model hides from attacks.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    weakness: ClassVar[str] = ""
    masks: ClassVar[bool] = False

    @abstractmethod
    def cost(self, examples: int) -> float:
        """About how many single images pass through the model."""

    def run(self, trial: Trial) -> Evidence:
        """Look at the model; what its attacks break is noted in ``trial.robust``."""
        return Evidence(self.name, tuple(self.rows(trial)))

    def rows(self, trial: Trial) -> Iterator[Row]:
        """Make the attacks."""
        return iter(())

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        """What in ``rows``, and in what else was found, an honest measurement would not show."""
        return iter(())
