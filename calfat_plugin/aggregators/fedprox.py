"""FedProx: FedAvg whose clients stay near the global model (Li et al., MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import ActiveCorrection, LocalCorrection, LocalTask
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class FedProxOptions(FedAvgOptions):
    """Options of FedProx."""

    mu: float = option(0.01, low=0, help="weight of the proximal term; 0 is FedAvg. CalFAT's paper does not give it")


@dataclass(frozen=True)
class Proximal(LocalCorrection):
    """Adds mu (theta - theta_t), the proximal term's gradient, to the gradient of the weights.

    Attacks climb the loss without this term.
    """

    mu: float

    def begin(self, task: LocalTask) -> ActiveCorrection:
        if self.mu == 0:
            return ActiveCorrection()
        return _ActiveProximal(task, self.mu)


class _ActiveProximal(ActiveCorrection):
    """The proximal term of one client's local training."""

    def __init__(self, task: LocalTask, mu: float) -> None:
        self.mu = mu
        self.parameters = list(task.shared_parameters().values())
        self.anchors = [parameter.detach().clone() for parameter in self.parameters]

    def after_backward(self, model: nn.Module) -> None:
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            pull = (parameter.detach() - anchor) * self.mu
            if parameter.grad is None:
                parameter.grad = pull
            else:
                parameter.grad.add_(pull)


class FedProx(FedAvg):
    """FedAvg on the server, the proximal term on the clients."""

    def correction(self) -> LocalCorrection:
        return Proximal(self.options.mu)


ENTRY = AggregatorEntry(
    "fedprox",
    build=FedProx,
    config=FedProxOptions,
    summary="FedAvg with a proximal term that keeps clients near the global model",
    formula="local loss + (mu/2) ||theta - theta_t||^2; theta = sum_i w_i theta_i",
    citation=paper("li2020federated"),
)
