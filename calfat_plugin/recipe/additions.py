"""Additions of a recipe to any method: ``awp`` and ``label_smoothing`` of the trainer, ``ema`` of the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from calfat_plugin.awp import AWP_PAPER, AWPOptions
from calfat_plugin.entries import Citation, paper
from calfat_plugin.options import option
from calfat_plugin.recipe.keys import Section, as_plain, key

_SMOOTHING_PAPER = paper("szegedy2016rethinking")
EMA_PAPER = paper("polyak1992acceleration")


@dataclass(frozen=True)
class Additions:
    """``calfat.trainer``: what can be added to any local trainer, beside its own options."""

    label_smoothing: float = option(
        0.0, low=0, high=1, help="s: (1 - s) of the classification loss, s of the mean cross-entropy over all classes"
    )
    awp: AWPOptions | None = key(Section(config=AWPOptions, may_lack=True), default_factory=lambda: None)

    def as_run(self) -> dict[str, Any]:
        """Those that are there, as a recipe writes them in full."""
        return {name: value for name, value in as_plain(self, Additions).items() if value}

    def citations(self) -> Iterator[Citation]:
        """Where those that are there come from."""
        papers = {"label_smoothing": _SMOOTHING_PAPER, "awp": AWP_PAPER}
        return (papers[name] for name in self.as_run())


ADDED = ("label_smoothing", "awp")  #: the keys of :class:`Additions`


@dataclass(frozen=True)
class EMAOptions:
    """``calfat.ema``: the server keeps an exponential moving average of the global models. It is what is evaluated and
    stored; the clients go on from the model that was trained. Without this section there is none."""

    decay: float = option(
        0.9, low=0, high=1, help="weight of each round's model as a share of the next one's; 1: the mean of all rounds"
    )
