"""SORA: one step of random length, the longer the more alike the loss's gradients before and after it were."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from calfat_plugin.entries import InnerAttackEntry, paper
from calfat_plugin.interfaces import InnerAttack, InnerTask, LocalTask, TrainBatch
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.recipe.schema import Recipe
    from calfat_plugin.results import State
    from calfat_plugin.threat import ThreatModel


@dataclass(frozen=True)
class SORAOptions:
    """Options of SORA, with the published constants."""

    longest: float = option(2.0, low=0, open_low=True, help="greatest length of a step", unit="multiple of eps")
    slack: float = option(0.02, low=0, open_low=True, help="how far from 1 the alignment may be for the longest step")
    decay: float = option(0.95, low=0, high=0.9999, help="decay of the moving average of alignments")
    first: float = option(0.99, low=-1, high=1, help="a client's alignment before its first mini-batch")
    alignment: Literal["slope", "cosine"] = option(
        "slope",
        help="slope: of the training loss along the step over that of the attack's loss, as the published code has it; "
        "cosine: PertAlign, for methods whose attack climbs another loss than they train on",
    )


@dataclass
class _Memory:
    """Of a client."""

    alignment: Tensor  # (), float32, moving average
    gradients: list[Tensor] = field(default_factory=list)  # of the mini-batch's parts, at the attack's start


class SORA(InnerAttack):
    """Measures how linear the loss is by the gradient that the training step leaves in the images."""

    options: SORAOptions

    def begin_round(self, task: LocalTask) -> _Memory:
        import torch  # here, not above: recipes are checked without torch

        alignment = task.client_state.get("alignment", torch.tensor(self.options.first))
        return _Memory(alignment.to(task.device))

    def end_round(self, memory: _Memory) -> State:
        return {"alignment": memory.alignment}

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor:
        return threat.random_start(x_nat, generator)

    def draw(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor:
        import torch

        return torch.rand(x_nat.shape, generator=generator, device=generator.device).to(x_nat)

    def craft(self, task: InnerTask) -> Tensor:
        memory = task.memory
        threat = task.threat
        assert task.drawn is not None
        gradient = task.gradient(task.start)
        memory.gradients.append(gradient)
        share = (self.options.slack / (1 - memory.alignment)).clamp(max=1)  # at 1 a division by 0, and so 1
        length = self.options.longest * float(threat.eps) * share
        x_adv: Tensor = task.start + length * task.drawn * threat.steepest(gradient)
        return x_adv.clamp_(*threat.bounds)

    def reach(self, threat: ThreatModel) -> ThreatModel:
        return threat.scaled(1 + self.options.longest)

    def after_step(self, batch: TrainBatch, gradient: Tensor | None, memory: _Memory) -> None:
        import torch

        from calfat_plugin.maths.attacks import cosine

        before = memory.gradients
        memory.gradients = []
        if gradient is None or not before:
            return
        count = len(gradient)
        if batch.attacked is not None:
            gradient = gradient[batch.attacked]
        after = count * gradient  # of the sum over the mini-batch, as the attack's is; the loss of a step is the mean
        first = torch.cat(before)
        if self.options.alignment == "cosine":
            values = cosine(first, after).nan_to_num(0.0)
        else:
            threat = batch.task.threat
            along = (threat.steepest(first) * after).flatten(1).sum(dim=1)
            values = along / threat.slope(first).clamp_min(1e-30)
        decay = self.options.decay
        memory.alignment = decay * memory.alignment + (1 - decay) * values.mean().clamp(-1, 1)


def _warn(options: SORAOptions, recipe: Recipe) -> str:
    """Label smoothing shortens the gradient of training, which the slope takes for a loss that turns."""
    smoothing = recipe.additions.label_smoothing
    if options.alignment != "slope" or smoothing <= options.slack:
        return ""
    return (
        f"goes by a slope that with label_smoothing {smoothing:g} is hardly above {1 - smoothing:g}, so a step is "
        f"about {options.longest * options.slack / smoothing:.2g} eps long at most, not {options.longest:g}: a weak "
        "attack. Add alignment: cosine, or remove label_smoothing."
    )


ENTRY = InnerAttackEntry(
    "sora",
    build=SORA,
    config=SORAOptions,
    warn=_warn,
    steps=lambda options: 1,
    replaces=("craft", "take_steps"),
    summary="one step of random length from noise, clipped to the pixels but not to the ball, the longer the more "
    "linear the loss was",
    formula="x~ = x' + a u sign(grad), x' = x + U(-eps, eps), u = U(0, 1), a = longest eps min(1, slack / (1 - v)), "
    "v <- decay v + (1 - decay) <sign(grad), grad_x~ loss> / ||grad||_1",
    citation=paper("teymourian2026sora"),
)
