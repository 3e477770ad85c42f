"""A budget of training by class (RobustLT): the rarer a client's class, the larger the ball of its examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import paper
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor

BY_CLASS_PAPER = paper("zhang2026taming")


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


def class_factors(class_counts: Tensor, options: ByClassOptions, round: int, num_rounds: int) -> Tensor | None:
    """What eps is multiplied by for the examples of each class, (C,) float64; None: all have eps itself.

    1 - alpha + tau sqrt(log(n_max / n_c)), with tau such that the mean over examples is 1, times the warm-up's share.
    A class without examples has none that could be attacked: it is left out, and its factor is 0. Where all classes
    have as many examples, no tau is: they share alike.

    Args:
        class_counts: (C,) training examples of the client.
        round: counted from 1.
    """
    counts = class_counts.double()
    share = min((round - 1) / (options.warmup * num_rounds), 1.0) if options.warmup else 1.0
    here, most = counts > 0, counts.max().clamp_min(1.0)
    rarity = (most / counts.where(here, most)).log().sqrt()  # 0 also for classes that are left out
    mean = (counts * rarity).sum() / counts.sum().clamp_min(1.0)
    if options.alpha == 0 or mean == 0:
        return None if share == 1 else share * here.double()
    factors: Tensor = 1 - options.alpha + options.alpha / mean * rarity
    return share * factors * here
