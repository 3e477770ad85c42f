"""Attackers that change their own update: they know what any client knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.entries import AttackerEntry, paper
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import Attacker, AttackTask, State
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SignFlipOptions:
    """Options of the sign flip."""

    scale: float = option(1.0, low=0, open_low=True, help="how many times its update, turned around")


@dataclass(frozen=True)
class ScalingOptions:
    """Options of scaling."""

    factor: float = option(100.0, low=0, help="how many times its update")
    norm: float | None = option(
        None, low=0, open_low=True, help="Euclidean length that its update is scaled to; null: by the factor"
    )


class Multiple(Attacker):
    """theta + c (theta_i - theta) over the trainable parameters; buffers as trained."""

    def __init__(self, options: Any) -> None:
        self.factor = -options.scale if isinstance(options, SignFlipOptions) else options.factor
        self.norm = getattr(options, "norm", None)

    def sent(self, task: AttackTask) -> State:
        start = {name: task.global_state[name].double() for name in task.parameter_names}
        moves = {name: task.own[name].double() - start[name] for name in start}
        factor = self.factor
        if self.norm is not None:
            length = math.sqrt(math.fsum(float(move.square().sum()) for move in moves.values()))
            factor = self.norm / length if length else 0.0
        return with_parameters(task, {name: start[name] + factor * moves[name] for name in start})


@dataclass(frozen=True)
class GaussianOptions:
    """Options of Gaussian noise."""

    std: float = option(1.0, low=0, open_low=True, help="standard deviation of each value of its update")


class GaussianNoise(Attacker):
    """theta + N(0, std^2) in each coordinate; buffers as trained."""

    options: GaussianOptions

    def sent(self, task: AttackTask) -> State:
        import torch

        start = {name: task.global_state[name].double() for name in task.parameter_names}
        noise = {n: torch.randn(s.shape, generator=task.generator, dtype=torch.float64) for n, s in start.items()}
        return with_parameters(task, {name: start[name] + self.options.std * noise[name] for name in start})


@dataclass(frozen=True)
class UntrainedOptions:
    """Options of a model that nobody trained."""

    values: Literal["zero", "uniform"] = option("zero", help="all 0, or drawn uniformly from [-1, 1) in each round")


class Untrained(Attacker):
    """0, or U[-1, 1), in each coordinate; buffers as trained."""

    options: UntrainedOptions

    def sent(self, task: AttackTask) -> State:
        import torch

        made = {name: torch.zeros(task.own[name].shape, dtype=torch.float64) for name in task.parameter_names}
        if self.options.values == "uniform":
            for values in made.values():
                values.uniform_(-1, 1, generator=task.generator)
        return with_parameters(task, made)


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
        layer = matrices[-1].rpartition(".")[0]
        last = [name for name in task.parameter_names if name.rpartition(".")[0] == layer]
        return with_parameters(task, {name: self.options.factor * task.own[name].double() for name in last})


def with_parameters(task: AttackTask, changed: dict[str, Tensor]) -> State:
    """The attacker's own model with these parameters, in its dtypes."""
    return {**task.own, **{name: tensor.to(task.own[name].dtype) for name, tensor in changed.items()}}


BLANCHARD = paper("blanchard2017machine")
BAGDASARYAN = paper("bagdasaryan2020backdoor")

ENTRIES = (
    AttackerEntry(
        "sign_flip",
        build=Multiple,
        config=SignFlipOptions,
        summary="sends its update turned around",
        formula="theta - s (theta_i - theta)",
        citation=BLANCHARD,
    ),
    AttackerEntry(
        "scaling",
        build=Multiple,
        config=ScalingOptions,
        summary="sends a multiple of its update, to replace the model",
        formula="theta + c (theta_i - theta), c a factor or the one that gives the update a length",
        citation=BAGDASARYAN,
    ),
    AttackerEntry(
        "gaussian_noise",
        build=GaussianNoise,
        config=GaussianOptions,
        summary="sends noise",
        formula="theta + N(0, std^2)",
        citation=BLANCHARD,
    ),
    AttackerEntry(
        "untrained",
        build=Untrained,
        config=UntrainedOptions,
        summary="sends a model that nobody trained",
        formula="0, or U[-1, 1) in each coordinate",
        citation=BLANCHARD,
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
