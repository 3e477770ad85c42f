"""For methods whose step is not the gradient of one loss: take gradients, change them, and hand them to the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """d(loss)/d(parameter) by name, for the trainable parameters that ``loss`` depends on; no ``.grad`` is touched."""
    import torch

    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parts = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: part for name, part in zip(parameters, parts, strict=True) if part is not None}


def clipped(gradients: Mapping[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Scale all gradients down together where their joint Euclidean norm exceeds ``max_norm``."""
    squares = [gradient.square().sum() for gradient in gradients.values()]
    norm = sum(squares[1:], start=squares[0]).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


def carrying(value: Tensor, model: nn.Module, gradients: Mapping[str, Tensor]) -> Tensor:
    """A scalar that equals ``value`` and whose backward pass gives exactly ``gradients`` to the parameters named.

    It lets a method shape the gradient while the loop keeps its one ``backward`` and one optimiser step.
    """
    named = dict(model.named_parameters())
    terms: Sequence[Tensor] = [
        ((named[name] - named[name].detach()) * gradient).sum() for name, gradient in gradients.items()
    ]
    return value.detach() + sum(terms[1:], start=terms[0])
