"""Yogi, which torch does not have (Zaheer et al., NeurIPS 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


class Yogi(torch.optim.Optimizer):
    """torch's Adam with another second moment: v <- v - (1 - beta2) g^2 sign(v - g^2)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter by its gradient. ``closure`` belongs to torch's interface and is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._move(parameter, **group)

    def _move(
        self, parameter: nn.Parameter, lr: float, betas: tuple[float, float], eps: float, **other: object
    ) -> None:
        beta1, beta2 = betas
        gradient = parameter.grad
        assert gradient is not None  # the aggregator has set it
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        first = state["exp_avg"]
        second = state["exp_avg_sq"]

        first.lerp_(gradient, 1 - beta1)
        square = gradient.square()
        second.sub_((second - square).sign() * square, alpha=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt().add_(eps)
        parameter.addcdiv_(first, root, value=-lr / (1 - beta1**step))
