"""Corrections of client drift: FedProx's proximal term and SCAFFOLD's control variates (methods.md
7.2, 7.3).

Pure functions on tensors and on mappings from parameter name to tensor. Trainable parameters only:
normalisation statistics and counters have no gradient, so neither a proximal term nor a variate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from calfat_plugin.errors import OptionError, UpdateError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

Parameters = Mapping[str, "Tensor"]

# --- FedProx (Li et al., MLSys 2020) ---


def proximal_value(parameters: Parameters, anchor: Parameters, *, mu: float = 0.01) -> Tensor:
    """(mu / 2) * ||theta - theta_t||^2, a scalar; the norm is squared (some released codes forget
    to).
    """
    squares = [(parameters[name] - fixed).square().sum() for name, fixed in anchor.items()]
    return mu / 2 * sum(squares[1:], start=squares[0])


def proximal_gradient(parameter: Tensor, anchor: Tensor, *, mu: float = 0.01) -> Tensor:
    """mu * (theta - theta_t), what the proximal term adds to a parameter's gradient. anchor:
    round-start weights.
    """
    return (parameter - anchor) * mu


# --- SCAFFOLD (Karimireddy et al., ICML 2020) ---

ScaffoldPairing = Literal["after_step", "gradient"]


def scaffold_correction(client_variate: Parameters, server_variate: Parameters) -> dict[str, Tensor]:
    """c - c_i, by name. Pairing ``after_step`` moves the parameter by -lr times it after the
    optimiser's step; ``gradient`` adds it to the gradient before the step.
    """
    return {name: server_variate[name] - own for name, own in client_variate.items()}


def scaffold_divisor(steps: int, *, momentum: float, pairing: ScaffoldPairing = "after_step") -> float:
    """How many plain steps of length lr the measured displacement stands for: the divisor of option
    II.

    With momentum rho only these pairings have a fixed point where the variate is what it should be:
    ``after_step`` divides by K; ``gradient``, where momentum amplifies the correction too, divides
    by a = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho). Without momentum both are K. (Mixing them
    over-corrects up to 1 / (1 - rho) times and tends to diverge.)

    Args:
        steps: K, this client's local steps this round, at least 1.
        momentum: rho in [0, 1), with a buffer that started at zero this round.
        pairing: where the correction is applied.
    """
    if pairing not in get_args(ScaffoldPairing):
        hint = did_you_mean(str(pairing), get_args(ScaffoldPairing))
        raise OptionError(f"pairing must be after_step or gradient; got {pairing!r}.{hint}")
    if steps < 1:
        raise UpdateError(f"SCAFFOLD needs at least one local step to measure a variate; got {steps}")
    if pairing == "after_step":
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def scaffold_variate(
    client_variate: Parameters,
    server_variate: Parameters,
    start: Parameters,
    end: Parameters,
    *,
    learning_rate: float,
    divisor: float,
) -> dict[str, Tensor]:
    """Option II: c_i+ = c_i - c + (x - y) / (divisor * lr).

    Option I has no formula: c_i+ is the gradient of the client's whole adversarial loss at x.

    Args:
        client_variate: c_i, zeros at first.
        server_variate: c, zeros at first.
        start: x, the weights that the server sent.
        end: y, the weights after local training.
        learning_rate: lr of the local steps.
        divisor: :func:`scaffold_divisor`.
    """
    return {
        name: own - server_variate[name] + (start[name] - end[name]) / (divisor * learning_rate)
        for name, own in client_variate.items()
    }


def scaffold_server_variate(
    server_variate: Parameters, variate_changes: Sequence[Parameters], *, num_clients: int
) -> dict[str, Tensor]:
    """c + (|S| / N) * mean_{i in S} (c_i+ - c_i), summed in float64 and cast back.

    num_clients: N, all clients, not only this round's: that keeps c the mean of all c_i.
    """
    return {
        name: _moved(c, [change[name] for change in variate_changes], 1.0 / num_clients)
        for name, c in server_variate.items()
    }


def scaffold_server_step(
    parameters: Parameters, changes: Sequence[Parameters], *, server_lr: float = 1.0
) -> dict[str, Tensor]:
    """x + server_lr * mean_{i in S} (y_i - x): a uniform mean, summed in float64 and cast back."""
    return {
        name: _moved(x, [change[name] for change in changes], server_lr / len(changes))
        for name, x in parameters.items()
    }


def _moved(tensor: Tensor, changes: list[Tensor], factor: float) -> Tensor:
    moved = tensor.double().clone()
    for change in changes:
        moved.add_(change.double(), alpha=factor)
    return moved.to(tensor.dtype)
