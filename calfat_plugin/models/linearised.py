"""A network's first-order expansion in its weights around fixed ones (Fed-LAT), itself a model to attack and store."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp


class Linearised(nn.Module):
    """f(x; w0) + J_w f(x; w0) (w - w0) once :meth:`linearise` was called; the network itself, f(x; w), before.

    The state dict has all that this depends on: w as ``network.*``, w0 as ``origin.*``, and which of the two it is. The
    network at w0 is always in evaluation mode: its statistics are those at w0, and it drops nothing out.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.origin = deepcopy(network).requires_grad_(False).eval()
        self.linear = False

    @property
    def passes(self) -> int:
        """What a pass costs in passes of the network: a jvp takes w0 x, w0 x' and (w - w0) x in each layer."""
        return 3 if self.linear else 1

    def linearise(self) -> None:
        """Take the present weights for w0: the logits are at first those of the network in evaluation mode."""
        self.origin.load_state_dict(self.network.state_dict())
        self.linear = True

    def train(self, mode: bool = True) -> Linearised:
        super().train(mode)
        self.origin.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) pixels to (N, num_classes) logits, differentiable in x and w, not in w0."""
        if not self.linear:
            logits: Tensor = self.network(x)
            return logits
        origin = _parameters(self.origin)
        change = {name: weight - origin[name] for name, weight in _parameters(self.network).items()}
        with torch.autocast(x.device.type, enabled=False):  # it gives group normalisation's derivative another type
            both = jvp(self._at_origin(x), (origin,), (change,))
        expanded: Tensor = both[0] + both[1]  # f and its slope along the change
        return expanded

    def _at_origin(self, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        """The logits of x as a function of the weights, by the statistics of w0."""

        def logits(weights: dict[str, Tensor]) -> Tensor:
            # With tie_weights torch would leave the weights of this call in a layer that is in two places.
            at_origin: Tensor = functional_call(self.origin, weights, (x,), tie_weights=False)
            return at_origin

        return logits

    def get_extra_state(self) -> Tensor:
        """``linear`` as a tensor, which checkpoints and messages hold and aggregators average."""
        return torch.tensor(int(self.linear))

    def set_extra_state(self, state: Tensor) -> None:
        self.linear = bool(state)


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """All parameters of all layers; a parameter of two layers has both names."""
    parameters: dict[str, Tensor] = {}
    for layer, module in network.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{layer}.{name}".removeprefix(".")  # the network itself has an empty name
            parameters[full_name] = parameter
    return parameters
