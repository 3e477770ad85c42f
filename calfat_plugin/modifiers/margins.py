"""Loss modifiers other than calibration: LogitAdj, RoBal, FedLC, GEAR, FedRS (methods.md 6 and 17).

Each turns logits (N, C) into the logits whose plain cross-entropy is the modified loss. What
depends on the class counts alone is built once per client, as a (C,) float32 tensor. Class counts
are numbers of this client's training labels; a class without examples is allowed everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.modifiers.priors import calibrated_logits

if TYPE_CHECKING:
    from torch import Tensor


def subtract_at_label(logits: Tensor, y: Tensor, margins: Tensor) -> Tensor:
    """z_y - m_y for the true class, the other logits unchanged; a new (N, C). margins: (C,)."""
    shift = logits.new_zeros(logits.shape).scatter(1, y[:, None], margins[y][:, None].to(logits.dtype))
    return logits - shift


# --- LogitAdj (Menon et al. 2020) ---


def adjusted_logits(logits: Tensor, log_prior: Tensor, *, tau: float = 1.0) -> Tensor:
    """z + tau * log pi. With tau = 1 and the same prior this is CalFAT's CCE; the methods differ in
    the attack.

    log_prior: (C,), floored, such as :func:`priors.log_frequencies`.
    """
    return calibrated_logits(logits, log_prior, prior_weight=tau)


# --- RoBal (Wu et al., CVPR 2021) ---


def cosine_logits(features: Tensor, weight: Tensor, *, gamma: float = 1 / 32) -> Tensor:
    """RoBal's classifier: cos_k = <w_k, h> / ((||w_k|| + gamma) * ||h||), no bias, scale 1.

    Args:
        features: (N, D), h, input of the classifier. An all-zero h gives zero logits.
        weight: (C, D), rows w_k.
        gamma: keeps the scale of small weights in the game.

    Returns:
        (N, C) in (-1, 1).
    """
    directions = weight / (weight.norm(dim=1, keepdim=True) + gamma)
    unit_features = features / features.norm(dim=1, keepdim=True).clamp_min(1e-12)
    cosines: Tensor = unit_features @ directions.T
    return cosines


@dataclass(frozen=True)
class RoBal:
    """Constants of RoBal's loss and its two operators; the defaults are CIFAR-10 RoBal-R.

    Attributes:
        scale: s, factor of the cosines in the loss (never in the attack or in KL terms).
        m0: margin of the rarest class.
        tau_b: factor of the log prior.
        tau_m: growth of the margin with the class count; head classes get the larger margin.
        kl_weight: weight of the original's KL regulariser on unscaled cosines.
        gamma: see :func:`cosine_logits`.
    """

    scale: float = 10.0
    m0: float = 0.1
    tau_b: float = 1.5
    tau_m: float = 0.3
    kl_weight: float = 6.0
    gamma: float = 1 / 32

    def margins(self, class_counts: Tensor) -> Tensor:
        """m_y = m0 + (tau_m / s) * log(n_y / n_min), (C,) float32.

        n_min is taken over the classes present on the client; a missing class gets m0.
        """
        counts = class_counts.double()
        rarest = counts[counts > 0].min()
        return (self.m0 + self.tau_m / self.scale * (counts.clamp_min(rarest) / rarest).log()).float()

    def logits(self, cosines: Tensor, y: Tensor, margins: Tensor, log_prior: Tensor) -> Tensor:
        """s * (cos_k - 1[k = y] m_y) + tau_b * log pi_k, whose cross-entropy with y is the RoBal
        loss.

        log_prior: (C,), floored, such as :func:`priors.log_frequencies`.
        """
        return self.scale * subtract_at_label(cosines, y, margins) + self.tau_b * log_prior


ROBAL_R_CIFAR10 = RoBal()
ROBAL_N_CIFAR10 = RoBal(tau_b=1.2, tau_m=0.0)
ROBAL_R_CIFAR100 = RoBal(m0=0.3, tau_b=0.0, tau_m=0.0, gamma=1 / 16)
ROBAL_N_CIFAR100 = RoBal(m0=0.2, tau_b=0.0, tau_m=0.0, kl_weight=3.0)


# --- FedLC (Zhang et al., ICML 2022) ---


def fedlc_margins(class_counts: Tensor, *, tau: float = 1.0) -> Tensor:
    """tau * n_y^(-1/4), (C,) float32, to be subtracted from every logit: rare classes are pressed
    down.

    A missing class counts as 1e-8 examples, a margin of 100 tau, which takes it out of the softmax.
    """
    return (tau * class_counts.double().clamp_min(1e-8).pow(-0.25)).float()


# --- GEAR (FL-AAAI 2022) ---


def gear_margins(class_counts: Tensor, *, delta: float = 0.01) -> Tensor:
    """delta * (n_min / n_y)^(1/4), (C,) float32, for :func:`subtract_at_label`: rare classes get
    the larger margin.

    n_min is taken over the classes present; a missing class, which is never a label, gets
    ``delta``.
    """
    counts = class_counts.double()
    rarest = counts[counts > 0].min()
    return (delta * (rarest / counts.clamp_min(rarest)).pow(0.25)).float()


# --- FedRS (Li and Zhan, KDD 2021) ---


def fedrs_factors(class_counts: Tensor, *, alpha: float = 0.5, absent_below: int = 3) -> Tensor:
    """Factors of the restricted softmax, (C,) float32, to multiply the logits with.

    Args:
        class_counts: (C,).
        alpha: factor of an absent class, in [0, 1]; 1 changes nothing.
        absent_below: a class with fewer examples counts as absent.
    """
    absent = (class_counts < absent_below).float()
    return 1.0 - (1.0 - alpha) * absent
