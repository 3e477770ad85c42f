"""Adversarial weight perturbation (AWP; Wu et al., NeurIPS 2020) inside a client (methods.md 17,
Fed-AWP).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def awp_perturbation(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, gamma: float = 0.005
) -> dict[str, Tensor]:
    """v = gamma * ||w|| / ||g|| * g, tensor by tensor: how far up the adversarial loss each layer
    is pushed.

    The training gradient is then taken at w + v and applied to w. A tensor with a zero gradient
    stays put.

    Args:
        weights: name to w.
        gradients: name to g, gradient of the adversarial cross-entropy at w; the names perturbed
            are these.
        gamma: relative size of the perturbation.
    """
    return {name: _aligned(weights[name], g, gamma) for name, g in gradients.items()}


def _aligned(weight: Tensor, gradient: Tensor, gamma: float) -> Tensor:
    # Divided by the largest entry first, so that squares of tiny gradients do not underflow.
    direction = gradient / gradient.abs().amax().clamp_min(1e-30)
    perturbation: Tensor = direction * (gamma * weight.norm() / direction.norm().clamp_min(1e-30))
    return perturbation
