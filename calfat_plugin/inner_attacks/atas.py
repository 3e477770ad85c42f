"""ATAS: one step from an example's last perturbation, as long as its gradients are small."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import InnerAttackEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import InnerAttack, InnerTask, LocalTask
from calfat_plugin.options import option
from calfat_plugin.threat import Bounds, per_example

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.recipe.schema import Recipe
    from calfat_plugin.results import State
    from calfat_plugin.threat import ThreatModel

_MULTIPLE = "multiple of eps"


@dataclass(frozen=True)
class ATASOptions:
    """Options of ATAS; the published lengths are those for eps 8/255."""

    step: float = option(2.0, low=0, open_low=True, help="length of a step where the gradient is 0", unit=_MULTIPLE)
    shortest: float = option(0.5, low=0, open_low=True, help="least length of a step", unit=_MULTIPLE)
    longest: float = option(1.75, low=0, open_low=True, help="greatest length of a step", unit=_MULTIPLE)
    c: float = option(
        1.28,
        low=0,
        open_low=True,
        help="gradient norm at which a step has half its length; the published 0.01 is of the mean of 128 losses",
    )
    momentum: float = option(0.5, low=0, high=0.9999, help="decay of the moving average")
    warmup: int = option(5, low=0, help="rounds at first with steps of eps, which are not averaged")
    reset: int = option(10, low=1, help="rounds after which perturbations are drawn anew")

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise OptionError(f"shortest is {self.shortest:g}; expected at most longest, {self.longest:g}.")


@dataclass
class _Memory:
    """Of a client's n examples."""

    change: Tensor  # (n, C, H, W) float32, last perturbation of each, its image padded as augmentation pads it
    squares: Tensor  # (n,) float32, moving average of the squared L2 norm of each one's gradient
    adaptive: bool  # whether the lengths of this round follow ``squares``


class ATAS(InnerAttack):
    """Remembers a perturbation and a gradient norm of each example."""

    options: ATASOptions

    def begin_round(self, task: LocalTask) -> _Memory:
        import torch  # here, not above: recipes are checked without torch

        is_reset = task.round % self.options.reset == 0 and task.round < task.settings.num_rounds
        change = task.client_state.get("change")
        squares = task.client_state.get("squares", torch.zeros(len(task.data)))
        if change is None or is_reset:
            change = self._drawn_anew(task)
        # Copies, since the memory is written to.
        change = change.to(task.device, torch.float32, copy=True)
        squares = squares.to(task.device, copy=True)
        return _Memory(change, squares, adaptive=task.round > self.options.warmup)

    def _drawn_anew(self, task: LocalTask) -> Tensor:
        """(n, C, H, W) a random point of the ball for each example, its image padded as augmentation pads it."""
        import torch

        from calfat_plugin.seeds import generator

        noise = generator(task.seed, "inner attack", round=task.round, client=task.client)
        images, channels, height, width = task.data.x.shape
        border = 2 * task.augment.crop_padding
        nothing = torch.zeros(images, channels, height + border, width + border)
        threat = dataclasses.replace(task.threat, bounds=Bounds(-1, 1))  # changes are no pixels: they may be below 0
        return threat.random_start(nothing, noise)

    def end_round(self, memory: _Memory) -> State:
        return {"change": memory.change.half(), "squares": memory.squares}  # half: checkpoints hold all clients'

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> None:
        """None: the method draws its own start, which is not used, since the memory has one for each example."""

    def craft(self, task: InnerTask) -> Tensor:
        memory = task.memory
        examples = task.examples
        threat = task.threat
        assert examples is not None  # of a client's mini-batch
        change = examples.cut(memory.change, *task.x_nat.shape[2:])
        start = threat.project(task.x_nat + change, task.x_nat)
        grad = task.gradient(start)
        length: float | Tensor = float(threat.eps)
        if memory.adaptive:
            options = self.options
            index = examples.index.to(memory.squares.device)
            norms = grad.flatten(1).norm(dim=1)
            squares = options.momentum * memory.squares[index] + (1 - options.momentum) * norms.square()
            memory.squares[index] = squares
            length = length * (options.step / (1 + squares.sqrt() / options.c)).clamp(options.shortest, options.longest)
        x_adv = threat.project(threat.ascend(start, grad, length), task.x_nat)
        next_change = x_adv - task.x_nat
        if threat.factors is not None:  # where the ball is a point, as in a warm-up's first round, what was drawn stays
            next_change = next_change.where(per_example(threat.factors, next_change) > 0, change)
        examples.put_back(memory.change, next_change)
        return x_adv


def _warn(options: ATASOptions, recipe: Recipe) -> str:
    rounds = recipe.train.comm_round
    if rounds > options.warmup:
        return ""
    return (
        f"takes steps of eps in all of the {rounds} rounds, for its warm-up has {options.warmup}: no step is adapted. "
        "Give it a lower warmup, or train for more rounds."
    )


ENTRY = InnerAttackEntry(
    "atas",
    build=ATAS,
    config=ATASOptions,
    warn=_warn,
    steps=lambda options: 1,
    by_class=True,
    summary="one projected step from each example's last perturbation, the shorter the larger its gradients",
    formula="x~ = P(x' + a sign(grad)), a = eps clamp(step / (1 + sqrt(v) / c)), v <- m v + (1 - m) ||grad||^2",
    citation=paper("huang2023fast"),
)
