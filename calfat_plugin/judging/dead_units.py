"""Units that no image wakes: which there are, and images of the ball that wake them.

relu(w.x - t) with t above w.x for all data passes no gradient there, so an attack that follows a loss never comes to
where it is awake, and what it does to the answer is not seen. A client of a federation can plant such a unit. The
gradient of its input is there, and this climbs that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions, share
from calfat_plugin.evaluators.gradient import margin
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.attacks import attack_mode, gradient_ascent, input_gradient
from calfat_plugin.maths.precision import float32_as
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel, per_example

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial

STEPS = 6  # along a unit's input, a quarter of eps each: through the whole ball; then as many along the margin
TRIED = 32  # units, of which
KEPT = 3  # those that break most of
IMAGES = 16  # images are tried on all
_ASLEEP = 0.02  # slope of an activation function, so also the usual leaky ReLU: next to no gradient passes
#: Functions that switch values off, by their names in ``torch`` and ``torch.nn.functional``, without underscores.
_SWITCHES = frozenset((
    "relu", "relu6", "leaky_relu", "prelu", "rrelu", "threshold", "clamp", "clamp_min", "clamp_max", "clip", "hardtanh",
    "hardsigmoid", "hardswish", "hardshrink", "softshrink", "softplus", "softsign", "sigmoid", "tanh", "elu", "selu",
    "celu", "gelu", "silu", "mish", "logsigmoid", "log_sigmoid", "maximum", "minimum", "max", "min", "where",
))  # fmt: skip


class Site(NamedTuple):
    """A tensor that an activation function is given: which one in a forward pass, and its values for an image."""

    number: int  # from 0
    size: int


class Unit(NamedTuple):
    """A value, of those for an image, that a function is given; ``sign``: it wakes if it grows (1), or falls (-1)."""

    site: Site
    place: int
    sign: float


#: Called with where it is, the input (N, ...), the function of that input, and what it gave.
See = Callable[[Site, Tensor, Callable[[Tensor], Tensor], Tensor], None]


class Switches(TorchFunctionMode):
    """Within it ``see`` is shown what activation functions are given, be they modules, functions or methods.

    Inputs of another length than ``rows`` are not shown.
    """

    def __init__(self, rows: int, see: See) -> None:
        super().__init__()
        self._rows, self._see, self._seen = rows, see, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``; this mode is off meanwhile."""
        named = kwargs or {}
        if getattr(func, "__name__", "").strip("_") not in _SWITCHES:
            return func(*args, **named)
        # Copies, since the function may work in place.
        inputs = {at: each.clone() for at, each in enumerate(args) if isinstance(each, Tensor)}
        out = func(*args, **named)
        for at, z in inputs.items():

            def again(value: Tensor, at: int = at) -> Tensor:
                given: Tensor = func(*args[:at], value, *args[at + 1 :], **named)
                return given

            if isinstance(out, Tensor) and out.shape == z.shape and z.is_floating_point():
                if z.shape[:1] == (self._rows,):
                    self._see(Site(self._seen, z[0].numel()), z, again, out)
                self._seen += 1
        return out


def dead_units(trial: Trial, x: Tensor) -> tuple[list[Unit], float | None]:
    """Units that no image on trial wakes, at most ``TRIED``, what may change the answers most first; and their share of
    all units, None where no activation function is seen (TorchScript).

    To first order a unit changes logits by at most their slope in its output times how far its input moves within the
    ball, which is at most a constant times how far it moves from ``x``, some of the images, to random points of it.
    Units are ordered by the product, which does not depend on the scale of the unit.
    """
    awake: dict[Site, Tensor] = {}
    units: list[tuple[float, Unit]] = []
    noise = generator(trial.seed, "trust/dead units")

    def note_awake(site: Site, z: Tensor, again: Callable[[Tensor], Tensor], out: Tensor) -> None:
        point = z.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(again(point.clone()).sum(), point)
        found = (slope.reshape(len(z), -1).abs() > _ASLEEP).any(dim=0)
        awake[site] = found | awake.get(site, found)

    def note_effect(site: Site, z: Tensor, again: Callable[[Tensor], Tensor], out: Tensor) -> None:
        if not (out.requires_grad and z.requires_grad and site in awake):
            return
        with torch.no_grad():
            far = 2 * z.abs() + 1
            up, down = ((again(z + sign * far) - out).abs().reshape(len(z), -1).amax(dim=0) for sign in (1, -1))
            clean, moved = z.reshape(2, len(x), -1)
            reach = (moved - clean).square().mean(dim=0).sqrt()

        def rank(grad: Tensor) -> None:
            effect = grad.reshape(len(z), -1).abs().amax(dim=0)
            score = (effect * reach * ~awake[site]).nan_to_num(0.0)
            best = score.topk(min(TRIED, len(score)))
            for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value > 0:
                    units.append((value, Unit(site, place, 1.0 if up[place] >= down[place] else -1.0)))

        out.register_hook(rank)

    with attack_mode(trial.model), float32_as("fp32", trial.device):
        with torch.no_grad():
            for images, _, _ in batches(trial.data, trial.batch_size, trial.device):
                with Switches(len(images), note_awake):
                    trial.model(images)
        points = torch.cat([x, trial.threat.random_start(x, noise)]).requires_grad_()
        with torch.enable_grad(), Switches(len(points), note_effect):
            logits = trial.model(points)
        # Signs that add up to 0: what moves all logits alike changes no answer.
        signs = torch.empty(logits.shape).bernoulli_(0.5, generator=noise).to(logits)
        input_gradient((logits * (signs - signs.mean(dim=1, keepdim=True))).sum(), points)
    seen = torch.cat([each.cpu() for each in awake.values()]) if awake else None
    units.sort(key=lambda each: -each[0])
    return [unit for _, unit in units[:TRIED]], None if seen is None else share(~seen)


def woken(model: nn.Module, threat: ThreatModel, unit: Unit, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """For each image the first point on the way that is wrong, else the last; and whether the model is right there.

    The way leads along the unit's input for ``STEPS`` steps, from the image to where it is as far awake as the ball
    allows, and from there as many along the margin, which the unit's own gradient is now part of.
    """
    found, right, step = x.clone(), torch.ones_like(y, dtype=torch.bool), 0
    held: Tensor | None = None

    def hold(site: Site, z: Tensor, again: Callable[[Tensor], Tensor], out: Tensor) -> None:
        nonlocal held
        if site == unit.site:
            held = unit.sign * z.reshape(len(z), -1)[:, unit.place]

    def watched(x_adv: Tensor) -> Tensor:
        nonlocal found, right, held
        held = None  # where the model takes another way for these images
        with Switches(len(x_adv), hold):
            logits: Tensor = model(x_adv)
        found = x_adv.detach().where(per_example(right, x), found)
        right = right & (logits.argmax(dim=1) == y)
        return logits

    def climbed(logits: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return held.sum() if step <= STEPS and held is not None else -margin(logits, y).sum()

    with attack_mode(model):
        last = gradient_ascent(
            watched, x, climbed, threat=threat, steps=2 * STEPS, step_size=float(threat.eps) / 4, start=x
        )
        with torch.no_grad():
            watched(last)
    return found, right


class Waking(BudgetedAttack):
    """Wakes one unit after the other; what is broken is not attacked again."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(BudgetOptions())
        self._units = units

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {"attack": "dead units", "units": len(self._units), "steps": 2 * STEPS, "batch_size": task.batch_size}

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: torch.Generator) -> Tensor:
        found, left = x.clone(), torch.arange(len(y), device=y.device)
        for unit in self._units:
            if len(left) == 0:
                break
            still_right = []
            for part in left.split(min(task.rows_at_once, len(left))):
                found[part], right = woken(task.model, self.threat(task), unit, x[part], y[part])
                still_right.append(part[right])
            left = torch.cat(still_right)
        return found


def worst_units(trial: Trial) -> tuple[list[Unit], float | None]:
    """At most ``KEPT`` units that break images which withstood every attack so far, and as :func:`dead_units`."""
    left = trial.robust.nonzero().squeeze(1)
    order = torch.randperm(len(left), generator=generator(trial.seed, "trust/dead units", extra=1))
    some = left[order[:IMAGES]].sort().values
    few = trial.data.subset(some.numpy()).to(trial.device)
    x = pixels(few.x)
    units, dead = dead_units(trial, x)
    broken = {}
    with float32_as("fp32", trial.device):
        for unit in units:
            _, right = woken(trial.model, trial.threat, unit, x, few.y)
            broken[unit] = int((~right).sum())
    return sorted((unit for unit in units if broken[unit]), key=lambda unit: -broken[unit])[:KEPT], dead
