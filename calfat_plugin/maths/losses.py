"""Losses that climb in attacks and descend in training: logits in, scalars (or one value an
example) out.

Shapes throughout: logits (N, C) float, y (N,) int64 labels. Nothing is modified in place.
Half-precision logits are widened to float32 first. ``reduction`` is ``mean`` over the batch,
``sum``, or ``none`` for (N,).

Loss modifiers (calibration, LogitAdj, RoBal ...) transform logits before they come here: see
``priors`` and ``margins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

# torch is imported inside functions: recipes are checked without it. F.cross_entropy and F.kl_div
# rather than tensor methods, because attacks take signs of gradients: only the very kernels of the
# published code reproduce its x_adv.

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(logits: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """CE = -log softmax(logits)[y]."""
    import torch.nn.functional as F  # noqa: N812 (its usual name)

    return F.cross_entropy(wide(logits), y, reduction=reduction)


def soft_cross_entropy(target_logits: Tensor, input_logits: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Cross-entropy form of CKL, ``-sum_y p^y log q^y`` (CalFAT, inner loss of preset ``paper``).

    p = softmax(target_logits), q = softmax(input_logits). Differs from the divergence by the
    entropy of p, so its gradient with respect to the input logits is the same.
    """
    p, log_q = wide(target_logits).softmax(dim=1), wide(input_logits).log_softmax(dim=1)
    return reduced(-(p * log_q).sum(dim=1), reduction)


def kl_divergence(target_logits: Tensor, input_logits: Tensor, reduction: Reduction = "mean") -> Tensor:
    """KL(p || q), p = softmax(target_logits), q = softmax(input_logits). Gradients flow through
    both.

    TRADES and CalFAT take the clean logits as target and the adversarial ones as input. The
    gradient with respect to the input is exactly zero where both are equal, so an attack that
    climbs this must start from noise.

    ``mean`` divides by the batch size (not by N * C).
    """
    import torch.nn.functional as F  # noqa: N812 (its usual name)

    target, log_q = wide(target_logits), wide(input_logits).log_softmax(dim=1)
    if target.requires_grad:
        # The plain form's gradient through the target is 0 * inf = nan once a probability
        # underflows to 0.
        per_class = F.kl_div(log_q, target.log_softmax(dim=1), reduction="none", log_target=True)
        return reduced(per_class.sum(dim=1), reduction)
    p = target.softmax(dim=1)
    if reduction == "none":
        return F.kl_div(log_q, p, reduction="none").sum(dim=1)
    return F.kl_div(log_q, p, reduction="batchmean" if reduction == "mean" else "sum")


def cw_margin(logits: Tensor, y: Tensor, *, kappa: float = 50.0, reduction: Reduction = "sum") -> Tensor:
    """Carlini-Wagner margin to be **climbed**: -max(z_y - max_{k != y} z_k + kappa, 0) (methods.md
    9).

    kappa only controls how far an example that is already misclassified keeps moving: at 0 it stops
    at the boundary, at 50 it never saturates for usual logits.
    """
    logits = wide(logits)
    margin = true_class(logits, y) - without_true_class(logits, y).amax(dim=1)
    return reduced(-(margin + kappa).clamp_min(0.0), reduction)


def dlr(logits: Tensor, y: Tensor, reduction: Reduction = "sum") -> Tensor:
    """Untargeted difference of logits ratio, to be climbed: -(z_y - max_{k != y} z_k) / (z_(1) -
    z_(3)).

    z_(1) >= z_(2) >= z_(3) are the sorted logits; scale- and shift-invariant (Croce and Hein 2020,
    eq. 6). C >= 3.
    """
    logits = wide(logits)
    top = logits.topk(3, dim=1).values
    margin = true_class(logits, y) - without_true_class(logits, y).amax(dim=1)
    return reduced(-margin / (top[:, 0] - top[:, 2] + 1e-12), reduction)


# --- pieces that other loss modules share ---


def wide(logits: Tensor) -> Tensor:
    """Half precision to float32, anything else as it is."""
    return logits.float() if logits.element_size() < 4 else logits


def true_class(scores: Tensor, y: Tensor) -> Tensor:
    """Score of each example's class: (N, C) and (N,) to (N,)."""
    return scores.gather(1, y[:, None]).squeeze(1)


def without_true_class(scores: Tensor, y: Tensor) -> Tensor:
    """(N, C) with the true class at -inf, so that max and argmax speak of the other classes."""
    return scores.scatter(1, y[:, None], float("-inf"))


def reduced(per_example: Tensor, reduction: Reduction) -> Tensor:
    """Apply ``reduction`` to (N,)."""
    if reduction == "none":
        return per_example
    return per_example.mean() if reduction == "mean" else per_example.sum()
