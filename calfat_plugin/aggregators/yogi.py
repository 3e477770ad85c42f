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
        """Move every parameter by its gradient. ``closure`` is torch's convention, and not used."""
        for group, parameter in [(each, parameter) for each in self.param_groups for parameter in each["params"]]:
            gradient, state, (beta1, beta2) = parameter.grad, self.state[parameter], group["betas"]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            step, square, second = float(state["step"]), gradient.square(), state["exp_avg_sq"]
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            second.sub_((second - square).sign() * square, alpha=1 - beta2)
            root = (second / (1 - beta2**step)).sqrt().add_(group["eps"])
            parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
