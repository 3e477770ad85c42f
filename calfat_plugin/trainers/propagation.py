"""FedRBN's propagation of robust batch-norm statistics (Hong et al., AAAI 2023; methods.md 5.7).

Clients that train adversarially (AT) own statistics of the noise branch; the server lends them to
clients that do not (ST), weighted by how similar the clean statistics of both are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class BranchStatistics(NamedTuple):
    """Running statistics of one branch of one normalisation layer, (channels,) each."""

    mean: Tensor
    var: Tensor


Layers = Sequence[BranchStatistics]


def propagation_weights(
    target_clean: Layers, sources_clean: Sequence[Layers], *, temperature: float = 0.01
) -> list[float]:
    """Softmax over AT clients of the layers' mean similarity, sum 1.

    The similarity of a layer is [cos(mean, mean') + cos(var, var')] / (2 * temperature) between
    clean-branch statistics.

    Args:
        target_clean: the ST client's clean statistics, layer by layer.
        sources_clean: the same of each AT client, at least one.
        temperature: small values let the most similar client win; inf weighs all alike.
    """
    scores = [
        math.fsum(_similarity(own, theirs) for own, theirs in zip(target_clean, source, strict=True))
        / (len(target_clean) * temperature)
        for source in sources_clean
    ]
    best = max(scores)
    raw = [math.exp(score - best) for score in scores]
    total = math.fsum(raw)
    return [weight / total for weight in raw]


def _similarity(own: BranchStatistics, theirs: BranchStatistics) -> float:
    return (_cosine(own.mean, theirs.mean) + _cosine(own.var, theirs.var)) / 2


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-30))


def propagated_noise(
    weights: Sequence[float],
    sources_noise: Sequence[Layers],
    *,
    debias: float = 0.0,
    target_clean: Layers = (),
    sources_clean: Sequence[Layers] = (),
) -> list[BranchStatistics]:
    """Noise statistics for an ST client: the AT clients' weighted mean, summed in float64 and cast
    back.

    One AT client of weight 1 is copied bit for bit.

    Args:
        weights: one per AT client, summing to 1 (:func:`propagation_weights`).
        sources_noise: each AT client's noise statistics, layer by layer.
        debias: d >= 0; each source is first moved by the difference of the clean statistics,
            mean + d * (mean_t - mean_a) and var * (var_t / var_a)^d. 0, the default, leaves it out.
        target_clean: the ST client's clean statistics; only for ``debias``.
        sources_clean: the AT clients' clean statistics; only for ``debias``.
    """
    if debias:
        sources_noise = [
            [_debiased(*layer, debias) for layer in zip(noise, clean, target_clean, strict=True)]
            for noise, clean in zip(sources_noise, sources_clean, strict=True)
        ]
    return [
        BranchStatistics(
            _mean([layer.mean for layer in layers], weights),
            _mean([layer.var for layer in layers], weights),
        )
        for layers in zip(*sources_noise, strict=True)
    ]


def _debiased(noise: BranchStatistics, clean: BranchStatistics, target: BranchStatistics, d: float) -> BranchStatistics:
    return BranchStatistics(noise.mean + d * (target.mean - clean.mean), noise.var * (target.var / clean.var).pow(d))


def _mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = tensors[0].double() * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor.double(), alpha=weight)
    return total.to(tensors[0].dtype)
