"""FedAdam, FedYogi and FedAdagrad: an adaptive optimiser on the server (Reddi et al., ICLR 2021).

The clients' weighted mean displacement is the negative gradient of one step of torch's optimiser (Yogi: of ours). As
in torch, and unlike in the paper, Adam and Yogi correct the moments' bias, and second moments start at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.options import option

if TYPE_CHECKING:
    import torch
    from torch import nn

_CITATION = paper("reddi2021adaptive")


@dataclass(frozen=True)
class ServerOptimizerOptions(FedAvgOptions):
    """Options of every server optimiser."""

    server_lr: float = option(0.01, low=0, open_low=True, help="step of the server's optimiser")
    tau: float = option(1e-3, low=0, open_low=True, help="added to the root of the second moment: adaptivity's floor")


@dataclass(frozen=True)
class MomentOptions(ServerOptimizerOptions):
    """Options of FedAdam and FedYogi."""

    beta1: float = option(0.9, low=0, high=0.9999, help="decay of the first moment")
    beta2: float = option(0.99, low=0, high=0.9999, help="decay of the second moment")


class ServerOptimizer(FedAvg):
    """theta <- one step of an optimiser from theta_t along the weighted mean of theta_i - theta_t; buffers averaged."""

    def __init__(self, make: Callable[[list[nn.Parameter], Any], torch.optim.Optimizer], options: Any) -> None:
        super().__init__(options)
        self._make = make

    def combine(self, task: AggregationTask) -> Aggregate:
        from torch import nn

        mean = super().combine(task)
        parameters = {name: nn.Parameter(task.global_state[name].clone()) for name in task.parameter_names}
        for name, parameter in parameters.items():
            parameter.grad = task.global_state[name] - mean.state[name]
        optimizer = self._make(list(parameters.values()), self.options)
        for key, tensor in task.server_state.items():  # empty in a first round
            _, kind, name = key.split("/", 2)
            optimizer.state[parameters[name]][kind] = tensor.clone()
        optimizer.step()
        memory = {
            f"optimizer/{kind}/{name}": tensor
            for name, parameter in parameters.items()
            for kind, tensor in optimizer.state[parameter].items()
        }
        moved = {name: parameter.detach() for name, parameter in parameters.items()}
        return Aggregate({**mean.state, **moved}, server_state=memory, weights=mean.weights)


def _adam(parameters: list[nn.Parameter], options: MomentOptions) -> torch.optim.Optimizer:
    import torch

    betas = (options.beta1, options.beta2)
    return torch.optim.Adam(parameters, lr=options.server_lr, betas=betas, eps=options.tau, foreach=False)


def _yogi(parameters: list[nn.Parameter], options: MomentOptions) -> torch.optim.Optimizer:
    from calfat_plugin.aggregators.yogi import Yogi

    return Yogi(parameters, lr=options.server_lr, betas=(options.beta1, options.beta2), eps=options.tau)


def _adagrad(parameters: list[nn.Parameter], options: ServerOptimizerOptions) -> torch.optim.Optimizer:
    import torch

    return torch.optim.Adagrad(parameters, lr=options.server_lr, eps=options.tau, foreach=False)


def _entry(name: str, make: Callable[..., Any], config: type, moments: str, step: str) -> AggregatorEntry:
    return AggregatorEntry(
        f"fed{name.lower()}",
        build=partial(ServerOptimizer, make),
        config=config,
        summary=f"{name} on the server",
        formula=f"{moments}, theta = theta + lr {step} / (sqrt(v) + tau), d = sum_i w_i theta_i - theta",
        citation=_CITATION,
    )


ENTRIES = (
    _entry("Adam", _adam, MomentOptions, "m = b1 m + (1 - b1) d, v = b2 v + (1 - b2) d^2", "m"),
    _entry("Yogi", _yogi, MomentOptions, "m = b1 m + (1 - b1) d, v = v - (1 - b2) d^2 sign(v - d^2)", "m"),
    _entry("Adagrad", _adagrad, ServerOptimizerOptions, "v = v + d^2", "d"),
)
