"""FedAdam, FedYogi and FedAdagrad: an adaptive optimiser on the server (Reddi et al., ICLR 2021).

The clients' weighted mean displacement is the negative gradient of one step of torch's optimiser (Yogi: of ours). As
in torch, and unlike in the paper, Adam and Yogi correct the moments' bias, and second moments start at zero.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor, nn


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


class Optimizer(Protocol):
    """What a server optimiser needs of torch's optimisers."""

    state: Any  # parameter to its tensors of memory, by name

    def step(self) -> Any:
        """Move every parameter by its gradient."""


class ServerOptimizer(FedAvg):
    """theta <- one step of an optimiser from theta_t along the weighted mean of theta_i - theta_t; buffers averaged."""

    options: ServerOptimizerOptions

    @abstractmethod
    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """A fresh optimiser of these parameters."""

    def combine(self, task: AggregationTask) -> Aggregate:
        from torch import nn

        mean = super().combine(task)
        parameters = {}
        for name in task.parameter_names:
            start = task.global_state[name]
            parameters[name] = nn.Parameter(start.clone())
            parameters[name].grad = start - mean.state[name]

        optimizer = self.optimizer(list(parameters.values()))
        for key, tensor in task.server_state.items():  # empty in the first round
            _, kind, name = key.split("/", 2)
            optimizer.state[parameters[name]][kind] = tensor.clone()
        optimizer.step()

        state = dict(mean.state)
        server_state = {}
        for name, parameter in parameters.items():
            state[name] = parameter.detach()
            for kind, tensor in optimizer.state[parameter].items():
                server_state[f"optimizer/{kind}/{name}"] = tensor
        return Aggregate(state, server_state=server_state, weights=mean.weights)


class FedAdam(ServerOptimizer):
    """m <- b1 m + (1 - b1) d; v <- b2 v + (1 - b2) d^2."""

    options: MomentOptions

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        import torch

        options = self.options
        betas = (options.beta1, options.beta2)
        return torch.optim.Adam(parameters, lr=options.server_lr, betas=betas, eps=options.tau, foreach=False)


class FedYogi(ServerOptimizer):
    """FedAdam with v <- v - (1 - b2) d^2 sign(v - d^2)."""

    options: MomentOptions

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return Yogi(parameters, self.options)


class Yogi:
    """Yogi, which torch does not have (Zaheer et al., NeurIPS 2018): torch's Adam with another second moment."""

    def __init__(self, parameters: list[nn.Parameter], options: MomentOptions) -> None:
        self.options = options
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for parameter in parameters}

    def step(self) -> None:
        import torch

        beta1 = self.options.beta1
        beta2 = self.options.beta2
        with torch.no_grad():
            for parameter, state in self.state.items():
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                gradient = parameter.grad
                assert gradient is not None  # the aggregator has set it
                state["step"] += 1
                step = float(state["step"])
                first = state["exp_avg"]
                first.lerp_(gradient, 1 - beta1)
                second = state["exp_avg_sq"]
                square = gradient.square()
                second.sub_((second - square).sign() * square, alpha=1 - beta2)
                root = (second / (1 - beta2**step)).sqrt().add_(self.options.tau)
                parameter.addcdiv_(first, root, value=-self.options.server_lr / (1 - beta1**step))


class FedAdagrad(ServerOptimizer):
    """v <- v + d^2, without a first moment."""

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        import torch

        return torch.optim.Adagrad(parameters, lr=self.options.server_lr, eps=self.options.tau, foreach=False)


_STEP = "theta = theta + lr {} / (sqrt(v) + tau), d = sum_i w_i theta_i - theta"

ENTRIES = (
    AggregatorEntry(
        "fedadam",
        build=FedAdam,
        config=MomentOptions,
        summary="Adam on the server",
        formula="m = b1 m + (1 - b1) d, v = b2 v + (1 - b2) d^2, " + _STEP.format("m"),
        citation=paper("reddi2021adaptive"),
    ),
    AggregatorEntry(
        "fedyogi",
        build=FedYogi,
        config=MomentOptions,
        summary="Yogi on the server",
        formula="m = b1 m + (1 - b1) d, v = v - (1 - b2) d^2 sign(v - d^2), " + _STEP.format("m"),
        citation=paper("reddi2021adaptive"),
    ),
    AggregatorEntry(
        "fedadagrad",
        build=FedAdagrad,
        config=ServerOptimizerOptions,
        summary="Adagrad on the server",
        formula="v = v + d^2, " + _STEP.format("d"),
        citation=paper("reddi2021adaptive"),
    ),
)
