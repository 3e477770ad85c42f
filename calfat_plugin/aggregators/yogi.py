"""Yogi, which torch does not have (Zaheer et al., NeurIPS 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Yogi(torch.optim.Optimizer):
    """torch's Adam with another second moment: v <- v - (1 - beta2) g^2 sign(v - g^2).

    Bias of both moments is corrected as in Adam, so the first step is Adam's.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float) -> None:
        """lr > 0; betas in [0, 1); eps is added to the root of the second moment."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter by its gradient. ``closure`` is torch's convention, and not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        step, square, second = float(state["step"]), gradient.square(), state["exp_avg_sq"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        second.sub_((second - square).sign() * square, alpha=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
