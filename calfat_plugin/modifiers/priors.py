"""Class priors of a client and the calibrated logits made from them (CalFAT equations CCE and CKL,
methods.md 2-3).

Calibration adds ``prior_weight * log prior`` to the logits in training; evaluation uses raw logits.
A prior is built once from the labels a client trains on, and never leaves the client. It must have
a floor: log 0 turns the CE of a missing class into inf and the KL into nan (methods.md 15.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

PriorKind = Literal["frequencies", "counts"]


def log_frequencies(class_counts: Tensor, *, delta: float = 1e-6) -> Tensor:
    """log(n^y / n + delta), the prior of preset ``paper``: (C,) counts to (C,) float32.

    delta: floor for missing classes, > 0. The paper names it and never gives it; 1e-6 is our
        choice.
    """
    counts = class_counts.double()
    return (counts / counts.sum() + delta).log().float()


def log_counts(class_counts: Tensor) -> Tensor:
    """log of the counts, a missing class counted once: the prior of preset ``release``, (C,) to
    (C,) float32.

    The 1e-7 inside the log is the release's; only a count of 1 feels it (methods.md 2).
    """
    counts = class_counts.clamp_min(1).float()
    return (counts + 1e-7).log()


def calibrated_logits(logits: Tensor, log_prior: Tensor, *, scale: float = 1.0, prior_weight: float = 1.0) -> Tensor:
    """scale * (logits + prior_weight * log_prior): (N, C) and (C,) to a new (N, C).

    With scale 1 this is also LogitAdj (Menon et al. 2020) with tau = prior_weight.
    """
    calibrated = logits + prior_weight * log_prior
    return calibrated if scale == 1.0 else calibrated * scale


@dataclass(frozen=True)
class Calibration:
    """The constants that tell the presets apart, and the two operators of methods.md 3.2.

    Attributes:
        prior: ``frequencies`` (:func:`log_frequencies`) or ``counts`` (:func:`log_counts`).
        prior_weight: k, factor of the log prior.
        scale: s, factor of the outer logits; changes the effective learning rate.
        delta: floor of ``frequencies``.
    """

    prior: PriorKind = "frequencies"
    prior_weight: float = 1.0
    scale: float = 1.0
    delta: float = 1e-6

    def log_prior(self, class_counts: Tensor) -> Tensor:
        """log nu, (C,) float32, from this client's training label counts."""
        if self.prior == "counts":
            return log_counts(class_counts)
        return log_frequencies(class_counts, delta=self.delta)

    def outer(self, logits: Tensor, log_prior: Tensor) -> Tensor:
        """C_out(z) = s * (z + k * log nu), for the loss that trains."""
        return calibrated_logits(logits, log_prior, scale=self.scale, prior_weight=self.prior_weight)

    def inner(self, logits: Tensor, log_prior: Tensor) -> Tensor:
        """C_in(z) = z + k * log nu, for attacks and divergences; never scaled."""
        return calibrated_logits(logits, log_prior, prior_weight=self.prior_weight)


PAPER = Calibration()
RELEASE = Calibration(prior="counts", prior_weight=0.1, scale=10.0)
