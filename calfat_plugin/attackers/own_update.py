"""Attackers that change their own update: they know what any client knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from calfat_plugin.entries import AttackerEntry, paper
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import Attacker, AttackTask, State
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


def with_parameters(task: AttackTask, changed: dict[str, Tensor]) -> State:
    """The attacker's own model with these parameters in its place, in its dtypes; buffers stay as trained."""
    state = dict(task.own)
    for name, tensor in changed.items():
        state[name] = tensor.to(task.own[name].dtype)
    return state


def _displacement(task: AttackTask) -> dict[str, Tensor]:
    """theta_i - theta over the trainable parameters, in float64."""
    return {name: task.own[name].double() - task.global_state[name].double() for name in task.parameter_names}


def _multiplied(task: AttackTask, displacement: dict[str, Tensor], factor: float) -> State:
    """theta + factor times the displacement."""
    changed = {}
    for name, move in displacement.items():
        changed[name] = task.global_state[name].double() + factor * move
    return with_parameters(task, changed)


@dataclass(frozen=True)
class SignFlipOptions:
    """Options of the sign flip."""

    scale: float = option(1.0, low=0, open_low=True, help="how many times its update, turned around")


class SignFlip(Attacker):
    """theta - s (theta_i - theta) over the trainable parameters."""

    options: SignFlipOptions

    def sent(self, task: AttackTask) -> State:
        return _multiplied(task, _displacement(task), -self.options.scale)


@dataclass(frozen=True)
class ScalingOptions:
    """Options of scaling."""

    factor: float = option(100.0, low=0, help="how many times its update")
    norm: float | None = option(
        None, low=0, open_low=True, help="Euclidean length that its update is scaled to; null: by the factor"
    )


class Scaling(Attacker):
    """theta + c (theta_i - theta) over the trainable parameters."""

    options: ScalingOptions

    def sent(self, task: AttackTask) -> State:
        displacement = _displacement(task)
        factor = self.options.factor
        if self.options.norm is not None:
            length = math.sqrt(math.fsum(float(move.square().sum()) for move in displacement.values()))
            factor = 0.0
            if length > 0:
                factor = self.options.norm / length
        return _multiplied(task, displacement, factor)


@dataclass(frozen=True)
class GaussianOptions:
    """Options of Gaussian noise."""

    std: float = option(1.0, low=0, open_low=True, help="standard deviation of each value of its update")


class GaussianNoise(Attacker):
    """theta + N(0, std^2) in each coordinate of the trainable parameters."""

    options: GaussianOptions

    def sent(self, task: AttackTask) -> State:
        import torch

        changed = {}
        for name in task.parameter_names:
            start = task.global_state[name].double()
            noise = torch.randn(start.shape, generator=task.generator, dtype=torch.float64)
            changed[name] = start + self.options.std * noise
        return with_parameters(task, changed)


@dataclass(frozen=True)
class UntrainedOptions:
    """Options of a model that nobody trained."""

    values: Literal["zero", "uniform"] = option("zero", help="all 0, or drawn uniformly from [-1, 1) in each round")


class Untrained(Attacker):
    """0, or U[-1, 1), in each coordinate of the trainable parameters."""

    options: UntrainedOptions

    def sent(self, task: AttackTask) -> State:
        import torch

        changed = {}
        for name in task.parameter_names:
            values = torch.zeros(task.own[name].shape, dtype=torch.float64)
            if self.options.values == "uniform":
                values.uniform_(-1, 1, generator=task.generator)
            changed[name] = values
        return with_parameters(task, changed)


@dataclass(frozen=True)
class MaskedOptions:
    """Options of masked gradients."""

    factor: float = option(
        100.0, low=1, help="how many times the last linear layer; a cosine classifier (`robal`) hardly changes"
    )


class MaskedGradients(Attacker):
    """The last linear layer times a factor: gradients vanish in float32 (Carlini and Wagner 2017, section 7.2)."""

    options: MaskedOptions

    def sent(self, task: AttackTask) -> State:
        matrices = [name for name in task.parameter_names if task.own[name].dim() == 2]
        if not matrices:
            raise PluginError("the model has no linear layer to multiply; choose another attacker, such as scaling.")
        last_layer = matrices[-1].rpartition(".")[0]
        changed = {}
        for name in task.parameter_names:
            if name.rpartition(".")[0] == last_layer:  # its weight and its bias
                changed[name] = self.options.factor * task.own[name].double()
        return with_parameters(task, changed)


ENTRIES = (
    AttackerEntry(
        "sign_flip",
        build=SignFlip,
        config=SignFlipOptions,
        summary="sends its update turned around",
        formula="theta - s (theta_i - theta)",
        citation=paper("blanchard2017machine"),
    ),
    AttackerEntry(
        "scaling",
        build=Scaling,
        config=ScalingOptions,
        summary="sends a multiple of its update, to replace the model",
        formula="theta + c (theta_i - theta), c a factor or the one that gives the update a length",
        citation=paper("bagdasaryan2020backdoor"),
    ),
    AttackerEntry(
        "gaussian_noise",
        build=GaussianNoise,
        config=GaussianOptions,
        summary="sends noise",
        formula="theta + N(0, std^2)",
        citation=paper("blanchard2017machine"),
    ),
    AttackerEntry(
        "untrained",
        build=Untrained,
        config=UntrainedOptions,
        summary="sends a model that nobody trained",
        formula="0, or U[-1, 1) in each coordinate",
        citation=paper("blanchard2017machine"),
    ),
    AttackerEntry(
        "masked_gradients",
        build=MaskedGradients,
        config=MaskedOptions,
        summary="sends a model with gradients too small for an attack to follow, to make the global one look robust",
        formula="W <- c W, b <- c b in the last linear layer",
        citation=paper("carlini2017towards"),
    ),
)
