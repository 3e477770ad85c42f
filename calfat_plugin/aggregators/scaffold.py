"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020).

With SGD momentum only two pairings of correction and measured variate are consistent (:func:`divisor`);
the option ``pairing`` names them. Trainable parameters only: buffers are averaged as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.errors import OptionError, UpdateError
from calfat_plugin.interfaces import (
    ActiveCorrection,
    Aggregate,
    AggregationTask,
    Aggregator,
    LocalCorrection,
    LocalTask,
    State,
)
from calfat_plugin.maths.averaging import check_update, weighted_average, weighted_sum
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.recipe.schema import Recipe

Pairing = Literal["after_step", "gradient"]

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
    pairing: Pairing = option(
        "after_step",
        help="after_step: correct the weights after each step; gradient: correct the gradient before it. They differ "
        "with momentum only, and each has its own measure of the distance; with momentum variant I needs gradient",
    )
    server_lr: float = option(1.0, low=0, open_low=True, help="eta_g, step of the server along the clients' mean")


@dataclass(frozen=True)
class ControlVariates(LocalCorrection):
    """Moves each local step by c - c_i."""

    options: ScaffoldOptions

    def begin(self, task: LocalTask) -> ActiveCorrection:
        return _ActiveVariates(task, self.options)


class _ActiveVariates(ActiveCorrection):
    needs_sgd = True

    def __init__(self, task: LocalTask, options: ScaffoldOptions) -> None:
        self.task, self.options = task, options
        self.parameters = task.shared_parameters()
        self.start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.own, self.server = (  # by name of the parameter, on its device
            {name: _variate(extras, name, like=weights).to(weights.device) for name, weights in self.start.items()}
            for extras in (task.client_state, task.broadcast)
        )
        self.shift = {name: self.server[name] - own for name, own in self.own.items()}  # c - c_i
        self.steps = 0
        self.wants_full_gradient = options.variant == "I"
        self.gradient: Mapping[str, Tensor] | None = None

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
        settings = self.task.settings
        if not self.wants_full_gradient:
            count = divisor(self.steps, settings.momentum, self.options.pairing, nesterov=settings.nesterov)
            walked = count * settings.learning_rate
            new = {
                name: self.own[name] - self.server[name] + (self.start[name] - parameter.detach()) / walked
                for name, parameter in self.parameters.items()
            }
        elif self.gradient is not None:
            new = {name: self.gradient[name].clone() for name in self.parameters}
        else:
            raise UpdateError(
                "SCAFFOLD with variant I needs the gradient of the whole local loss, which this local trainer does not "
                "give; use variant II."
            )
        extras = {_CHANGE + name: (variate - self.own[name]).cpu() for name, variate in new.items()}
        return extras, {_VARIATE + name: variate.cpu() for name, variate in new.items()}


def divisor(steps: int, momentum: float, pairing: Pairing, *, nesterov: bool = False) -> float:
    """How many plain steps of length lr the measured displacement stands for: the divisor of variant II.

    With momentum rho only these pairings have a fixed point where the variate is what it should be: ``after_step``
    divides by K; ``gradient``, where momentum amplifies the correction too, divides by
    a = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho), with rho^2 for the first rho where momentum has Nesterov's form.
    Without momentum both are K. (Mixing them over-corrects up to 1 / (1 - rho) times and tends to diverge.)
    """
    if steps < 1:
        raise UpdateError(f"SCAFFOLD needs at least one local step to measure a variate; got {steps}")
    if pairing == "after_step":
        return float(steps)
    first = momentum**2 if nesterov else momentum
    return (steps - first * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def _variate(state: State, name: str, *, like: Tensor) -> Tensor:
    """The variate of a parameter in a kept or received state: zeros where there is none yet."""
    kept = state.get(_VARIATE + name)
    return like.new_zeros(like.shape) if kept is None else kept


class Scaffold(Aggregator):
    """x <- x + eta_g mean_S (y_i - x); c <- c + (|S| / N) mean_S (c_i+ - c_i)."""

    options: ScaffoldOptions

    def correction(self) -> LocalCorrection:
        return ControlVariates(self.options)

    def check_extras(self, extras: State, parameters: State, *, who: str) -> None:
        sent = {name.removeprefix(_CHANGE): tensor for name, tensor in extras.items() if name.startswith(_CHANGE)}
        check_update(sent, parameters, who=f"{who}: SCAFFOLD's {_CHANGE}")

    def combine(self, task: AggregationTask) -> Aggregate:
        updates, start = list(task.updates.values()), task.global_state
        weights = [1.0 / len(updates)] * len(updates)
        steps = [1.0, *[self.options.server_lr / len(updates)] * len(updates)]
        shares = [1.0, *[1.0 / task.num_clients] * len(updates)]  # of all clients: that keeps c the mean of all c_i
        moved = {
            name: weighted_sum([start[name], *(update.state[name] - start[name] for update in updates)], steps)
            for name in task.parameter_names
        }
        kept = {
            _VARIATE + name: weighted_sum(
                [
                    _variate(task.server_state, name, like=start[name]),
                    *(update.extras[_CHANGE + name] for update in updates),
                ],
                shares,
            )
            for name in task.parameter_names
        }
        return Aggregate(
            state={**weighted_average([update.state for update in updates], weights), **moved},
            server_state=kept,
            broadcast=kept,
            weights=dict(zip(task.updates, weights, strict=True)),
        )


def _check(options: ScaffoldOptions, recipe: Recipe) -> None:
    """Variates cancel while each step is linear in the client's gradients; the server cannot undo any other scale."""
    train, found = recipe.train, ""
    if train.client_optimizer != "sgd":
        found = f"client_optimizer is {train.client_optimizer}"
    elif train.max_grad_norm is not None:
        found = f"max_grad_norm is {train.max_grad_norm:g}"
    if found:
        raise OptionError(
            f"SCAFFOLD measures gradients by how far SGD moved, but train_args.{found}, which scales the steps of each "
            "client in another way. Remove that key, or choose another aggregator, such as fedavg."
        )
    if options.variant == "I" and options.pairing == "after_step" and train.momentum:
        times = 1 / (1 - train.momentum)
        raise OptionError(
            f"variant: I measures plain gradients. With train_args.momentum {train.momentum:g} a step has up to "
            f"{times:.3g} times as much of the client's, and pairing: after_step takes it off once, so most of the "
            "drift stays. Write pairing: gradient, or momentum: 0."
        )


ENTRY = AggregatorEntry(
    "scaffold",
    build=Scaffold,
    config=ScaffoldOptions,
    check=_check,
    summary="control variates that cancel client drift; twice the traffic both ways",
    formula="y <- y - lr (g(y) - c_i + c); c_i+ = c_i - c + (x - y) / (K lr); x <- x + eta_g mean (y_i - x)",
    citation=paper("karimireddy2020scaffold"),
)
