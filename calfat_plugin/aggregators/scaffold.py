"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020).

With SGD momentum only two pairings of correction and measured variate are consistent (``drift.scaffold_divisor``);
the option ``pairing`` names them. Trainable parameters only: buffers are averaged as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from calfat_plugin.aggregators.drift import (
    ScaffoldPairing,
    scaffold_correction,
    scaffold_divisor,
    scaffold_server_step,
    scaffold_server_variate,
    scaffold_variate,
)
from calfat_plugin.entries import AggregatorEntry, Citation
from calfat_plugin.errors import UpdateError
from calfat_plugin.interfaces import (
    ActiveCorrection,
    Aggregate,
    AggregationTask,
    Aggregator,
    LocalCorrection,
    LocalTask,
    State,
)
from calfat_plugin.maths.averaging import check_update, displacement, weighted_average
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor, nn

_VARIATE = "scaffold/c/"  # c in broadcast and server state, c_i in the client's state
_CHANGE = "scaffold/change/"  # c_i+ - c_i, sent up


@dataclass(frozen=True)
class ScaffoldOptions:
    """Options of SCAFFOLD."""

    variant: Literal["I", "II"] = option(
        "II",
        help="new variate: I, the gradient of the whole local loss at the global model (one more pass, attack "
        "included); II, from the distance the client moved",
    )
    pairing: ScaffoldPairing = option(
        "after_step",
        help="after_step: correct the weights after each step; gradient: correct the gradient before it. They differ "
        "with momentum only, and each has its own measure of the distance",
    )
    server_lr: float = option(1.0, low=0, open_low=True, help="eta_g, step of the server along the clients' mean")


class ControlVariates(LocalCorrection):
    """Moves each local step by c - c_i."""

    def __init__(self, options: ScaffoldOptions) -> None:
        self.options = options

    def begin(self, task: LocalTask) -> ActiveCorrection:
        return _ActiveVariates(task, self.options)


class _ActiveVariates(ActiveCorrection):
    def __init__(self, task: LocalTask, options: ScaffoldOptions) -> None:
        self.task, self.options = task, options
        self.parameters = task.shared_parameters()
        self.start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.own = self._received(task.client_state)
        self.server = self._received(task.broadcast)
        self.shift = scaffold_correction(self.own, self.server)
        self.steps = 0
        self.wants_full_gradient = options.variant == "I"
        self.gradient: Mapping[str, Tensor] | None = None

    def _received(self, extras: State) -> dict[str, Tensor]:
        """A variate by parameter name, zeros where there is none yet; on the parameters' device."""
        return {name: _variate(extras, name, like=weights).to(weights.device) for name, weights in self.start.items()}

    def take_full_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        self.gradient = gradient

    def after_backward(self, model: nn.Module) -> None:
        self.steps += 1
        if self.options.pairing == "gradient":
            for name, parameter in self.parameters.items():
                shift = self.shift[name]
                parameter.grad = shift.clone() if parameter.grad is None else parameter.grad.add_(shift)

    def after_step(self, model: nn.Module, learning_rate: float) -> None:
        if self.options.pairing == "after_step":
            for name, parameter in self.parameters.items():
                parameter.data.sub_(self.shift[name], alpha=learning_rate)

    def finish(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        new = self._new_variate()
        extras = {_CHANGE + name: (variate - self.own[name]).cpu() for name, variate in new.items()}
        return extras, {_VARIATE + name: variate.cpu() for name, variate in new.items()}

    def _new_variate(self) -> dict[str, Tensor]:
        if self.wants_full_gradient:
            if self.gradient is None:
                raise UpdateError(
                    "SCAFFOLD with variant I needs the gradient of the whole local loss, which this local trainer does "
                    "not give; use variant II, or train through trainers.loop.train_locally."
                )
            return {name: self.gradient[name].clone() for name in self.parameters}
        settings = self.task.settings
        divisor = scaffold_divisor(self.steps, momentum=settings.momentum, pairing=self.options.pairing)
        end = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return scaffold_variate(
            self.own, self.server, self.start, end, learning_rate=settings.learning_rate, divisor=divisor
        )


def _variate(state: State, name: str, *, like: Tensor) -> Tensor:
    """The variate of a parameter in a kept or received state: zeros where there is none yet."""
    kept = state.get(_VARIATE + name)
    return like.new_zeros(like.shape) if kept is None else kept


class Scaffold(Aggregator):
    """x <- x + eta_g mean_S (y_i - x); c <- c + (|S| / N) mean_S (c_i+ - c_i)."""

    def __init__(self, options: ScaffoldOptions) -> None:
        self.options = options

    def correction(self) -> LocalCorrection:
        return ControlVariates(self.options)

    def check_extras(self, extras: State, parameters: State, *, who: str) -> None:
        sent = {name.removeprefix(_CHANGE): tensor for name, tensor in extras.items() if name.startswith(_CHANGE)}
        check_update(sent, parameters, who=f"{who}: SCAFFOLD's {_CHANGE}")

    def combine(self, task: AggregationTask) -> Aggregate:
        names, updates = task.parameter_names, list(task.updates.values())
        weights = [1.0 / len(updates)] * len(updates)
        moved = scaffold_server_step(
            {name: task.global_state[name] for name in names},
            [displacement(update.state, task.global_state, names) for update in updates],
            server_lr=self.options.server_lr,
        )
        variate = scaffold_server_variate(
            {name: _variate(task.server_state, name, like=task.global_state[name]) for name in names},
            [{name: update.extras[_CHANGE + name] for name in names} for update in updates],
            num_clients=task.num_clients,
        )
        kept = {_VARIATE + name: tensor for name, tensor in variate.items()}
        return Aggregate(
            state={**weighted_average([update.state for update in updates], weights), **moved},
            server_state=kept,
            broadcast=kept,
            weights=dict(zip(task.updates, weights, strict=True)),
        )


ENTRY = AggregatorEntry(
    "scaffold",
    build=Scaffold,
    config=ScaffoldOptions,
    summary="control variates that cancel client drift; twice the traffic both ways",
    formula="y <- y - lr (g(y) - c_i + c); c_i+ = c_i - c + (x - y) / (K lr); x <- x + eta_g mean (y_i - x)",
    citation=Citation(
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        """@inproceedings{karimireddy2020scaffold,
  title     = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author    = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and Stich, Sebastian and
               Suresh, Ananda Theertha},
  booktitle = {International Conference on Machine Learning},
  year      = {2020}
}""",
    ),
)
