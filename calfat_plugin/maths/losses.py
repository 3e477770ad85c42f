"""Losses that attacks climb and training descends: logits in, a scalar (or one value an example) out.

Shapes throughout: logits (N, C) float, y (N,) int64 labels. Nothing is modified in place. Half-precision logits are
widened to float32 first. ``reduction`` is ``mean`` over the batch, ``sum``, or ``none`` for (N,).

Loss modifiers (calibration, LogitAdj, RoBal ...) transform logits before they come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

_FEWEST_FALLING = 10  # examples; with fewer, chance could look like a wrong sign
_ROUNDING = 1e-5  # of a loss in float32, between batches of two sizes

# torch is imported inside functions: recipes are checked without it. F.cross_entropy and F.kl_div rather than tensor
# methods, because attacks take signs of gradients: only the very kernels of the published code reproduce its x_adv.

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(logits: Tensor, y: Tensor, reduction: Literal["mean", "sum", "none"] = "mean") -> Tensor:
    """CE = -log softmax(logits)[y]."""
    import torch.nn.functional as F

    return F.cross_entropy(wide(logits), y, reduction=reduction)


def kl_divergence(target_logits: Tensor, input_logits: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """KL(p || q), p = softmax(target_logits), q = softmax(input_logits). Gradients flow through both.

    TRADES and CalFAT take the clean logits as target and the adversarial ones as input. The gradient with respect to
    the input is exactly zero where both are equal, so an attack that climbs this must start from noise.

    ``mean`` divides by the batch size (not by N * C).
    """
    import torch.nn.functional as F

    target = wide(target_logits)
    log_q = wide(input_logits).log_softmax(dim=1)
    if not target.requires_grad:
        reduction_of_torch = "sum"
        if reduction == "mean":
            reduction_of_torch = "batchmean"  # torch's "mean" divides by N * C
        return F.kl_div(log_q, target.softmax(dim=1), reduction=reduction_of_torch)
    # The form above has a gradient through the target of 0 * inf = nan once a probability underflows to 0.
    divergences = F.kl_div(log_q, target.log_softmax(dim=1), reduction="none", log_target=True).sum(dim=1)
    if reduction == "mean":
        return divergences.mean()
    return divergences.sum()


def wide(logits: Tensor) -> Tensor:
    """Half precision to float32, anything else as it is."""
    if logits.element_size() < 4:
        return logits.float()
    return logits


def true_class(scores: Tensor, y: Tensor) -> Tensor:
    """Score of each example's class: (N, C) and (N,) to (N,)."""
    return scores.gather(1, y[:, None]).squeeze(1)


def without_true_class(scores: Tensor, y: Tensor) -> Tensor:
    """(N, C) with the true class at -inf, for the largest of the other classes."""
    return scores.scatter(1, y[:, None], float("-inf"))


def falling(clean: Tensor, attacked: Tensor) -> int:
    """For how many examples an attack lowers a loss, (N,), that it should raise; 0 where no wrong sign shows.

    It shows where the sum of the losses falls, and over three quarters of the losses that change do, at least 10.
    """
    rise = (attacked - clean).where((attacked - clean).abs() > _ROUNDING, 0)
    fell = int((rise < 0).sum())
    rose = int((rise > 0).sum())
    if fell >= _FEWEST_FALLING and fell > 3 * rose and float(rise.sum()) < 0:
        return fell
    return 0
