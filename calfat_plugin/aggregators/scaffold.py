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

_VARIATE = "scaffold/c/"  # c in broadcast and server state; c_i in the client's state
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
    """The control variates of one client's local training, by parameter name, on the model's device."""

    needs_sgd = True

    def __init__(self, task: LocalTask, options: ScaffoldOptions) -> None:
        self.task = task
        self.options = options
        self.parameters = task.shared_parameters()
        self.start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.client_variates = _variates(task.client_state, self.start)  # c_i
        self.server_variates = _variates(task.broadcast, self.start)  # c
        self.shift = {name: self.server_variates[name] - self.client_variates[name] for name in self.start}  # c - c_i
        self.steps = 0
        self.wants_full_gradient = options.variant == "I"
        self.gradient: Mapping[str, Tensor] | None = None

    def take_full_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        self.gradient = gradient

    def after_backward(self, model: nn.Module) -> None:
        self.steps += 1
        if self.options.pairing != "gradient":
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = self.shift[name].clone()
            else:
                parameter.grad.add_(self.shift[name])

    def after_step(self, model: nn.Module, learning_rate: float) -> None:
        if self.options.pairing != "after_step":
            return
        for name, parameter in self.parameters.items():
            parameter.data.sub_(self.shift[name], alpha=learning_rate)

    def finish(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not self.wants_full_gradient:
            new_variates = self._distance_as_variates()
        elif self.gradient is not None:  # c_i+ of variant I: the gradient of the whole local loss at the global model
            new_variates = {name: self.gradient[name].clone() for name in self.parameters}
        else:
            raise UpdateError(
                "SCAFFOLD with variant I needs the gradient of the whole local loss, which this local trainer does not "
                "give; use variant II."
            )
        extras = {}
        client_state = {}
        for name, variate in new_variates.items():
            extras[_CHANGE + name] = (variate - self.client_variates[name]).cpu()
            client_state[_VARIATE + name] = variate.cpu()
        return extras, client_state

    def _distance_as_variates(self) -> dict[str, Tensor]:
        """c_i+ of variant II: c_i - c + (x - y) / (K lr), with the divisor of the pairing for K."""
        settings = self.task.settings
        count = divisor(self.steps, settings.momentum, self.options.pairing, nesterov=settings.nesterov)
        walked = count * settings.learning_rate
        new_variates = {}
        for name, parameter in self.parameters.items():
            measured = (self.start[name] - parameter.detach()) / walked
            new_variates[name] = self.client_variates[name] - self.server_variates[name] + measured
        return new_variates


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
    first = momentum
    if nesterov:
        first = momentum**2
    return (steps - first * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def _variates(state: State, parameters: State) -> dict[str, Tensor]:
    """The variates of these parameters in a state, on the parameters' devices; zeros where there are none yet."""
    variates = {}
    for name, parameter in parameters.items():
        variate = state.get(_VARIATE + name)
        if variate is None:
            variate = parameter.new_zeros(parameter.shape)
        variates[name] = variate.to(parameter.device)
    return variates


class Scaffold(Aggregator):
    """x <- x + eta_g mean_S (y_i - x); c <- c + (|S| / N) mean_S (c_i+ - c_i)."""

    options: ScaffoldOptions

    def correction(self) -> LocalCorrection:
        return ControlVariates(self.options)

    def check_extras(self, extras: State, parameters: State, *, who: str) -> None:
        changes = {name.removeprefix(_CHANGE): tensor for name, tensor in extras.items() if name.startswith(_CHANGE)}
        check_update(changes, parameters, who=f"{who}: SCAFFOLD's {_CHANGE}")

    def combine(self, task: AggregationTask) -> Aggregate:
        updates = list(task.updates.values())
        count = len(updates)
        parameters = {name: task.global_state[name] for name in task.parameter_names}
        server_variates = _variates(task.server_state, parameters)
        step_shares = [1.0] + [self.options.server_lr / count] * count
        # A share of all clients, and not of the round's: that keeps c the mean of all c_i.
        variate_shares = [1.0] + [1.0 / task.num_clients] * count

        mean_weights = [1.0 / count] * count
        state = weighted_average([update.state for update in updates], mean_weights)  # the buffers remain
        variates = {}
        for name, start in parameters.items():
            displacements = [update.state[name] - start for update in updates]
            state[name] = weighted_sum([start, *displacements], step_shares)
            changes = [update.extras[_CHANGE + name] for update in updates]
            variates[_VARIATE + name] = weighted_sum([server_variates[name], *changes], variate_shares)
        return Aggregate(
            state,
            server_state=variates,
            broadcast=variates,
            weights=dict(zip(task.updates, mean_weights, strict=True)),
        )


def _check(options: ScaffoldOptions, recipe: Recipe) -> None:
    """Variates cancel while each step is linear in the client's gradients; the server cannot undo any other scale."""
    train = recipe.train
    scaling_key = ""
    if train.client_optimizer != "sgd":
        scaling_key = f"client_optimizer is {train.client_optimizer}"
    elif train.max_grad_norm is not None:
        scaling_key = f"max_grad_norm is {train.max_grad_norm:g}"
    if scaling_key:
        raise OptionError(
            f"SCAFFOLD measures gradients by how far SGD moved, but train_args.{scaling_key}, which scales the steps "
            "of each client in another way. Remove that key, or choose another aggregator, such as fedavg."
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
