"""What the adversarial training methods add to cross-entropy: TRADES, MART, GAIRAT, MixFAT
(methods.md 5).

Conventions as in ``losses``: logits (N, C), y (N,) labels, nothing modified in place, gradients
through everything that the published method does not detach. The logits may already carry a loss
modifier (table 6.3); which terms see which logits is the trainer's choice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from calfat_plugin.errors import OptionError, did_you_mean
from calfat_plugin.maths.losses import (
    Reduction,
    cross_entropy,
    kl_divergence,
    reduced,
    true_class,
    wide,
    without_true_class,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor

# --- TRADES (Zhang et al., ICML 2019) ---


def trades_loss(nat_logits: Tensor, adv_logits: Tensor, y: Tensor, *, beta: float = 6.0) -> Tensor:
    """CE(f(x), y) + beta * (1/B) sum_j KL(softmax f(x_j) || softmax f(x~_j)), a scalar.

    Gradients flow through both branches of the divergence. beta = 0 is training on clean examples.
    """
    return cross_entropy(nat_logits, y) + beta * kl_divergence(nat_logits, adv_logits)


# --- MART (Wang et al., ICLR 2020) ---


def mart_margin(adv_logits: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """-log(1.0001 - p~^{k*} + 1e-12), k* the most probable wrong class of p~ = softmax(adv_logits).

    Added to CE(adv_logits, y) it makes MART's boosted cross-entropy (BCE). Ties go to the lowest
    class index.
    """
    p_adv = wide(adv_logits).softmax(dim=1)
    runner_up = without_true_class(p_adv.detach(), y).argmax(dim=1)
    # 1.0001 keeps the log finite in float32 where p = 1; the 1e-12 is below float32's resolution
    # there.
    return reduced(-(1.0001 - true_class(p_adv, runner_up) + 1e-12).log(), reduction)


def mart_regulariser(nat_logits: Tensor, adv_logits: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """KL(p || p~) * (1.0000001 - p^y): the divergence, weighted up where the clean example is
    unsure.

    p = softmax(nat_logits), p~ = softmax(adv_logits), with log p~ taken as log(p~ + 1e-12). Nothing
    is detached.
    """
    log_p = wide(nat_logits).log_softmax(dim=1)
    p, p_adv = log_p.exp(), wide(adv_logits).softmax(dim=1)
    kl = (p * (log_p - (p_adv + 1e-12).log())).sum(dim=1)
    return reduced(kl * (1.0000001 - true_class(p, y)), reduction)


def mart_loss(nat_logits: Tensor, adv_logits: Tensor, y: Tensor, *, lam: float = 6.0) -> Tensor:
    """BCE + lam * R, a scalar. lam: 6 (WideResNet script and function default) or 5 (ResNet-18
    script).
    """
    boosted = cross_entropy(adv_logits, y) + mart_margin(adv_logits, y)
    return boosted + lam * mart_regulariser(nat_logits, adv_logits, y)


# --- GAIRAT (Zhang et al., ICLR 2021) ---

GairatWeighting = Literal["tanh", "sigmoid", "discrete"]


def gairat_weights(kappa: Tensor, steps: int, *, lam: float = -1.0, weighting: GairatWeighting = "tanh") -> Tensor:
    """Weights of a batch, normalised to mean 1: examples that are easier to attack weigh more.

    With h = floor(steps / 2) and a = lam + 5 * (h - kappa) / h the raw weight is (1 + tanh(a)) / 2
    for ``tanh``, sigmoid(a) for ``sigmoid``, and (steps + 1 - kappa) / (steps + 1) for
    ``discrete``.

    Args:
        kappa: (N,) correctly classified iterates, 0 .. steps (``attacks.CorrectIterates``).
        steps: steps of the attack that counted them; at least 2 unless ``discrete``.
        lam: Lambda; +inf means weights of 1 for every weighting, which is plain adversarial
            training.
        weighting: the raw weight's form.

    Returns:
        (N,) float32 without gradient, summing to N.

    Raises:
        OptionError: an unknown weighting, lam nan or -inf, too few steps.
    """
    import torch.nn.functional as F  # noqa: N812 (its usual name)

    _check_gairat(steps, lam, weighting)
    if lam == math.inf:
        return kappa.new_ones(kappa.shape).float()
    if weighting == "discrete":
        log_raw = (steps + 1 - kappa).float().log()
    else:
        half = steps // 2
        argument = lam + 5.0 * (half - kappa.float()) / half
        # (1 + tanh a) / 2 = sigmoid(2 a); in logs, because the raw weights of a batch may
        # underflow.
        log_raw = F.logsigmoid(2.0 * argument if weighting == "tanh" else argument)
    return len(kappa) * log_raw.softmax(dim=0)


def _check_gairat(steps: int, lam: float, weighting: str) -> None:
    if weighting not in get_args(GairatWeighting):
        hint = did_you_mean(str(weighting), get_args(GairatWeighting))
        raise OptionError(f"weighting must be tanh, sigmoid or discrete; got {weighting!r}.{hint}")
    if math.isnan(lam) or lam == -math.inf:
        raise OptionError(f"lam must be a finite number or +inf; got {lam}")
    if weighting != "discrete" and steps < 2:
        raise OptionError(
            f"GAIRAT's {weighting} weighting divides by half the attack's steps, rounded down, "
            f"so it needs at least 2 steps; got {steps}"
        )


def gairat_lambda(round: int, *, start_round: int = 60, lam: float = -1.0) -> float:
    """Lambda of a 1-based round: +inf (plain adversarial training) before ``start_round``, then
    ``lam``.
    """
    return math.inf if round < start_round else lam


def gairat_loss(per_example: Tensor, weights: Tensor) -> Tensor:
    """mean_j w_j * l_j, no gradient through w. per_example and weights: (N,) of the same whole
    batch.
    """
    return (weights.detach() * per_example).mean()


# --- MixFAT (Zizzo et al. 2020) and CalFAT's adversarial ratio (methods.md 3.4) ---


def adversarial_mask(num_examples: int, ratio: float, generator: Generator) -> Tensor:
    """Choose floor(ratio * num_examples) examples at random: (num_examples,) bool on the
    generator's device.

    Called per mini-batch for sampling mode ``per_batch``, once per client's data for mode
    ``fixed``.

    Raises:
        OptionError: ratio outside [0, 1].
    """
    import torch

    if not 0.0 <= ratio <= 1.0:
        raise OptionError(f"ratio must lie in [0, 1]; got {ratio:g}")
    # 0.29 * 100 is 28.999999999999996 in floating point; the slack makes it the 29 that was meant.
    chosen = math.floor(ratio * num_examples + 1e-9)
    order = torch.randperm(num_examples, generator=generator, device=generator.device)
    return order < chosen


def mixed_batch(x_nat: Tensor, x_adv: Tensor, adversarial: Tensor) -> Tensor:
    """x_adv where ``adversarial`` (N,) is true, else x_nat, in the original order; (N, ...)."""
    return x_adv.where(adversarial.view(-1, *[1] * (x_nat.dim() - 1)), x_nat)
