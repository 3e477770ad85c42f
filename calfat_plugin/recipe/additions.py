"""Additions of a recipe to any method: of the trainer, of the threat, and of the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from calfat_plugin.entries import Citation, paper
from calfat_plugin.options import option
from calfat_plugin.recipe.keys import Section, as_plain, key

_SMOOTHING_PAPER = paper("szegedy2016rethinking")
_CLEAN_ROUNDS_PAPER = paper("wang2025ignition")
AWP_PAPER = paper("wu2020adversarial")
BY_CLASS_PAPER = paper("zhang2026taming")
EMA_PAPER = paper("polyak1992acceleration")


@dataclass(frozen=True)
class AWPOptions:
    """``calfat.trainer.awp``: adversarial weight perturbation, added to a method: each training gradient is taken at
    weights that are perturbed against the training loss."""

    gamma: float = option(0.005, low=0, help="length of the perturbation, relative to each layer's weights")
    warmup: int = option(10, low=0, help="rounds of plain training before weights are perturbed", unit="rounds")


@dataclass(frozen=True)
class Additions:
    """``calfat.trainer``: what can be added to any local trainer, beside its own options."""

    label_smoothing: float = option(
        0.0, low=0, high=1, help="s: (1 - s) of the classification loss, s of the mean cross-entropy over all classes"
    )
    awp: AWPOptions | None = key(Section(config=AWPOptions, may_lack=True), default_factory=lambda: None)
    clean_rounds: int = option(
        0, low=0, help="first rounds in which the method trains on clean images and attacks nothing", unit="rounds"
    )

    def as_run(self) -> dict[str, Any]:
        """The additions that the recipe makes, as a recipe in full writes them."""
        return {name: value for name, value in as_plain(self, Additions).items() if value}

    def citations(self) -> Iterator[Citation]:
        """The papers of the additions that the recipe makes."""
        papers = {"label_smoothing": _SMOOTHING_PAPER, "awp": AWP_PAPER, "clean_rounds": _CLEAN_ROUNDS_PAPER}
        return (papers[name] for name in self.as_run())


ADDED = ("label_smoothing", "awp", "clean_rounds")  #: the keys of :class:`Additions`


@dataclass(frozen=True)
class ByClassOptions:
    """``calfat.threat.by_class``: in training, each client's examples have an eps by their class (RobustLT); the mean
    over its examples is eps. Evaluation stays at eps. Without this section each example has the same."""

    alpha: float = option(0.3, low=0, high=1, help="share of eps that goes by class; 0: none")
    warmup: float = option(
        0.8,
        low=0,
        high=1,
        help="share of the rounds in which every eps grows from 0 in the first one; 0: none. The source counts epochs",
    )


@dataclass(frozen=True)
class EMAOptions:
    """``calfat.ema``: the server keeps an exponential moving average of the global models. It is what is evaluated and
    stored; the clients go on from the model that was trained. Without this section there is none."""

    decay: float = option(
        0.9, low=0, high=1, help="weight of each round's model as a share of the next one's; 1: the mean of all rounds"
    )
