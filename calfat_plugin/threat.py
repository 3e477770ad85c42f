"""The threat model: what an adversary may do to an image, in exact units.

One object carries norm, eps, step size, number of steps and pixel range, and owns every operation that depends on them:
starts, steps, projection, the final check. Training and evaluation use the same one. Only tensors' own methods are
used: recipes are checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from calfat_plugin.errors import BudgetError, OptionError, one_line
from calfat_plugin.exact import QUARTER, StepSize, exact_text, parse_number
from calfat_plugin.options import Tag, describe_options, no_option, option, tagged

if TYPE_CHECKING:
    from torch import Generator, Tensor

Norm = Literal["linf", "l2", "l1"]
PIXELS = "fraction of the pixel range"  #: unit of lengths
#: In pixel ranges: the longest changes of images of 10^8 values; squares of what is far longer are no floats.
_LARGEST = {"l2": 10_000, "l1": 10**8}
_DUAL = {"linf": 1.0, "l2": 2.0}  # order of the norm that measures slopes
_ONE_IN = 100  # SLIDE (Tramer and Boneh 2019) moves the pixels above the 99th percentile of the gradient
_TINY = 1e-30  # keeps 0/0 out of a norm's reciprocal; far below any length that matters


class Bounds(NamedTuple):
    """The pixel range, both ends allowed."""

    low: float = 0.0
    high: float = 1.0


UNIT_RANGE = Bounds()


def lacks_eps(norm: str) -> str:
    """What is said of a norm without an eps that was meant for it."""
    return f"{norm} needs an eps beside it; the same eps is another budget in each norm."


@dataclass(frozen=True)
class ThreatModel:
    """``calfat.threat``: the budget of training and of evaluation.

    ``eps`` and ``step_size`` may be given as int, float, text or Fraction; they are kept as exact fractions, so that a
    result file says 8/255 and not 0.03137254901960784. Both are fractions of the pixel range, never 8. A step that is
    given as a multiple of eps (``eps/4``) follows eps, also in copies by ``dataclasses.replace``.

    Attributes:
        norm: ``linf`` (largest change of a pixel value), ``l2`` (Euclidean length of the change of an image) or ``l1``
            (sum of the changes of an image's values).
        eps: radius of the ball, >= 0. For ``linf`` at most the width of ``bounds``.
        step_size: length of one ascent step in ``norm``, > 0 (0 only as a multiple of eps 0), same unit.
        steps: ascent steps, >= 1.
        bounds: pixel range. Clean images must lie inside it.
        factors: (N,) for a batch of N examples (``calfat.threat.by_class``): the ball of each has so many times eps,
            and each step is as many times as long; None: all have eps.

    Raises:
        OptionError: a value is of the wrong type, out of range or in the wrong unit.
    """

    norm: Norm = tagged(
        Tag.MEASURED,
        option("linf", help="norm of the ball; another one needs its own eps beside it", positional=True),
    )
    eps: Fraction = tagged(
        Tag.MEASURED,
        option(
            Fraction(8, 255),
            low=0,
            help="radius of the ball; 0, which is natural training, warns",
            unit=PIXELS,
            positional=True,
        ),
    )
    step_size: Fraction = option(
        QUARTER,
        low=0,
        open_low=True,
        help="length of a step, in training and of evaluators that set none; a multiple of eps follows eps",
        unit=PIXELS,
        positional=True,
    )
    steps: int = option(10, low=1, help="training steps K", positional=True)
    bounds: Bounds = no_option(UNIT_RANGE)
    factors: Any = no_option(None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", _checked_bounds(self.bounds))
        for info in describe_options(ThreatModel):
            value = getattr(self, info.name)
            try:
                if type(value) is info.type:  # parsed already: by whoever read the recipe, or in the original of a copy
                    info.check(value, value)
                else:
                    object.__setattr__(self, info.name, info.parse(value))
            except OptionError as error:
                raise OptionError(f"{info.name}: {error}") from None
        object.__setattr__(self, "step_size", StepSize(self.step_size, self.eps))  # 0 only as a multiple of eps 0
        for name, number, example in (("eps", self.eps, "8/255"), ("step_size", self.step_size, "eps/4 or 2/255")):
            if number > self._longest():
                expected = f"a fraction of the pixel range, such as {example}"
                if self.norm != "linf":
                    expected = f"longer than any image, at most {_LARGEST[self.norm]} pixel ranges"
                raise OptionError(f"{name} is {expected}; got {exact_text(number)}", (name,))

    def _longest(self) -> Fraction:
        """The longest that a change may be called, in ``norm``."""
        return Fraction(self.bounds.high - self.bounds.low) * _LARGEST.get(self.norm, 1)

    def scaled(self, factor: float) -> ThreatModel:
        """The same with a ball of ``factor`` times the radius, at most of the longest change; its step is eps/4."""
        return replace(self, eps=min(parse_number(factor) * self.eps, self._longest()), step_size=QUARTER)

    def _radius(self, x: Tensor) -> float | Tensor:
        """eps, or that of each example, (N,)."""
        eps = float(self.eps)
        if self.factors is None:
            return eps
        radius: Tensor = (eps * self.factors).to(x.device, x.dtype)
        return radius

    def step_problem(self) -> str:
        """Why an attack of these steps searches the ball badly, and what to do; empty where it need not."""
        reach, eps, step = self.steps * self.step_size, exact_text(self.eps), exact_text(self.step_size)
        if self.eps and self.step_size > self.eps:
            return f"step_size {step} is more than eps {eps}. Take one that follows eps, such as eps/4."
        if reach < self.eps:
            enough = StepSize(f"eps/{min(self.steps, 4)}").text
            return (
                f"steps x step_size, {self.steps} x {step} = {exact_text(reach)}, is less than eps {eps}, so no image "
                f"gets to the edge of the ball. Take a step_size that follows eps, such as {enough}, or more steps."
            )
        return ""

    # Starts. Noise is drawn on the generator's device and in row-major order, so that a CPU
    # generator gives the same start on every device and for every memory layout of x.

    def random_start(self, x: Tensor, generator: Generator) -> Tensor:
        """Start uniformly inside the ball, then clip to the pixel range.

        ``linf``: every value moves by U(-eps, eps). ``l2``: a uniform direction times a radius that makes the point
        uniform in the ball's volume. ``l1``: uniform in the ball's volume, too.

        Args:
            x: (N, ...) float, inside ``bounds``.
            generator: source of the noise.

        Returns:
            Same shape and dtype as x, inside the budget.
        """
        eps = float(self.eps)
        if self.norm == "linf":
            noise = _empty_on(x, generator).uniform_(-eps, eps, generator=generator)
        elif self.norm == "l1":
            noise = eps * random_l1_point(_empty_on(x, generator).flatten(1), generator).view(x.shape)
        else:
            direction = _empty_on(x, generator).normal_(generator=generator)
            radius = direction.new_empty(len(x)).uniform_(generator=generator)
            dimensions = math.prod(x.shape[1:]) or 1
            radius = eps * radius.pow(1.0 / dimensions)
            noise = unit_length(direction) * per_example(radius, x)
        noise = noise.to(x.device)
        if self.factors is not None:
            noise = noise * per_example(self.factors.to(x.device, x.dtype), x)
        return self.project(x + noise, x)

    def gaussian_start(self, x: Tensor, generator: Generator, std: float) -> Tensor:
        """Start at x plus ``std`` times a standard normal, **not** projected (methods.md 2: TRADES, MART, CalFAT).

        The first gradient is taken at this point; the projection after the first step brings it into the budget.

        Args:
            x: (N, ...) float.
            generator: source of the noise.
            std: standard deviation, in units of the pixel range.
        """
        noise = _empty_on(x, generator).normal_(generator=generator).mul_(std)
        return x + noise.to(x.device)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Nearest point to ``x_adv`` in the ball around ``x``, then in the pixel range: (N, ...) in and out.

        Clipping to the range cannot leave the ball again, because x itself lies inside the range. In ``l1``, where
        clipping afterwards would leave much of the budget unused, it is the nearest point in both.
        """
        return self.projection(x)(x_adv.clone())

    def projection(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """``project`` for many points around one ``x``: a function of (N, ...) that moves it in place and returns it.

        What follows from x is computed here, once.
        """
        eps = self._radius(x)
        if self.norm == "linf":
            far = eps
            if not isinstance(eps, float):
                far = per_example(eps, x)
            # Both ends inside the range: one clip to them is the same as a clip to the ball and one to the range.
            lowest, highest = (x - far).clamp_(*self.bounds), (x + far).clamp_(*self.bounds)
            return lambda x_adv: x_adv.clamp_(lowest, highest)

        if self.norm == "l1":
            down, up = x - self.bounds.low, self.bounds.high - x
            rooms = down.flatten(1), up.flatten(1)
            far = eps
            if not isinstance(eps, float):
                far = eps[:, None]

            def onto_l1(x_adv: Tensor) -> Tensor:
                change = x_adv - x
                allowed = nearest_l1_change(change.flatten(1), *rooms, far).view(x.shape)
                # Without the rounding of x + allowed: a change that is allowed as it is leaves x_adv as it was, and at
                # the end of the range the next step sees that the value cannot move.
                nearest = x_adv.where(allowed == change, x + allowed).clamp_(*self.bounds)
                nearest.masked_fill_(allowed == up, self.bounds.high).masked_fill_(allowed == -down, self.bounds.low)
                return x_adv.copy_(nearest)

            return onto_l1

        def onto_l2(x_adv: Tensor) -> Tensor:
            change = x_adv - x
            length = change.flatten(1).norm(dim=1)
            # Inside the ball x_adv stays as it was, without the rounding of x + (x_adv - x).
            shrink = eps / length.clamp_min(_TINY)
            inside = x_adv.where(per_example(length <= eps, x), x + change * per_example(shrink, x))
            return x_adv.copy_(inside.clamp_(*self.bounds))

        return onto_l2

    def ascend(self, x_adv: Tensor, grad: Tensor, step_size: float | Tensor) -> Tensor:
        """Step of length ``step_size`` in ``norm`` along ``steepest``; in ``l1`` past values that cannot move.

        From ``x_adv`` along ``grad``, both (N, ...). A zero gradient moves nothing (sign(0) = 0). The length is one
        for all, or (N,), one an example; where examples have an eps of their own, it is one of ``eps``, and follows.
        """
        if self.norm == "l1":
            low, high = self.bounds
            stuck = (x_adv <= low) & (grad < 0) | (x_adv >= high) & (grad > 0)
            grad = grad.masked_fill(stuck, 0.0)
        if self.factors is not None:
            step_size = (step_size * self.factors.to(x_adv.device)).to(x_adv.dtype)
        if isinstance(step_size, (int, float)):
            return x_adv.add(self.steepest(grad), alpha=step_size)
        return x_adv.addcmul(self.steepest(grad), per_example(step_size, x_adv))

    def steepest(self, grad: Tensor) -> Tensor:
        """The direction of length 1 in ``norm`` that climbs fastest: sign(grad), or grad made unit length.

        In ``l1`` it is spread over the largest hundredth of the values (``sparse_signs``).

        Args:
            grad: (N, ...) of the attack's loss by the images.
        """
        if self.norm == "l1":
            return sparse_signs(grad.flatten(1)).view(grad.shape)
        if self.norm == "linf":
            return grad.sign()
        return unit_length(grad)

    def slope(self, grad: Tensor) -> Tensor:
        """How much a step of length 1 along ``steepest`` climbs, (N,).

        It is the dual norm of ``grad``, L1 or L2; in ``l1``, where no single value moves alone, the mean size of the
        largest hundredth.

        Args:
            grad: (N, ...) of the attack's loss by the images.
        """
        if self.norm == "l1":
            climbed: Tensor = (self.steepest(grad) * grad).flatten(1).sum(dim=1)
            return climbed
        length: Tensor = grad.flatten(1).norm(p=_DUAL[self.norm], dim=1)
        return length

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Distance of ``x_adv`` from ``x`` in ``norm``, for every example: (N, ...) in, (N,) out, at least float32."""
        change = (x_adv - x).flatten(1)
        if change.element_size() < 4:
            change = change.float()
        if self.norm == "linf":
            if change.shape[1] == 0:  # of no values there is no largest one
                return change.new_zeros(len(change))
            return change.abs().amax(dim=1)
        order = 2
        if self.norm == "l1":
            order = 1
        length: Tensor = change.norm(p=order, dim=1)
        return length

    def check(self, x_adv: Tensor, x: Tensor, *, who: str, tol: float = 1e-6) -> None:
        """Refuse adversarial examples that left the budget; a cheating attack is caught by name.

        Args:
            x_adv: (N, ...), what the attack returned.
            x: (N, ...), the clean images.
            who: the attack, as the user knows it.
            tol: allowed excess for rounding, in units of the pixel range (for eps above 1: of eps; in ``l1``, where the
                rounding of all D values adds up, of sqrt(D) if that is more).

        Raises:
            BudgetError: another shape, a non-finite value, beyond eps, or outside the pixel range.
                The text names ``who``, the worst example, and by how much.
        """
        if x_adv.shape != x.shape:
            shapes = f"{tuple(x_adv.shape)} for images of shape {tuple(x.shape)}"
            raise BudgetError(f"{who}: returned adversarial examples of shape {shapes}")
        if x.numel() == 0:
            return
        broken = x_adv.isfinite().logical_not().flatten(1).any(dim=1)
        if broken.any():
            raise BudgetError(
                f"{who}: {int(broken.sum())} of {len(x)} adversarial examples hold nan or inf; "
                f"the first is example {int(broken.int().argmax())}"
            )
        ball = f"{self.norm} ball of eps {exact_text(self.eps)}"
        if self.factors is not None:
            ball += " times the factor of its class"
        unit = max(1.0, float(self.eps))
        if self.norm == "l1":
            unit = max(unit, math.sqrt(x[0].numel()))
        _refuse_excess(self.distance(x_adv, x) - self._radius(x), tol * unit, who, ball)
        low, high = self.bounds
        flat = x_adv.flatten(1)
        outside = (low - flat).maximum(flat - high).amax(dim=1)
        _refuse_excess(outside, tol, who, f"pixel range [{low:g}, {high:g}]")


def _refuse_excess(excess: Tensor, tol: float, who: str, limit: str) -> None:
    worst = int(excess.argmax())
    if float(excess[worst]) > tol:
        raise BudgetError(
            f"{who}: {int((excess > tol).sum())} of {len(excess)} adversarial examples left the "
            f"{limit}; the worst is example {worst}, {float(excess[worst]):.3g} outside. "
            "An attack must end with threat.project(x_adv, x)."
        )


def _checked_bounds(value: object) -> Bounds:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        try:
            bounds = Bounds(*(float(parse_number(end)) for end in value))
        except ValueError as error:
            raise OptionError(f"bounds must be two numbers such as [0, 1]: {error}") from error
        if bounds.low < bounds.high:
            return bounds
    raise OptionError(f"bounds must be two numbers, the lower one first, such as [0, 1]; got {one_line(value)}")


def _empty_on(x: Tensor, generator: Generator) -> Tensor:
    return x.new_empty(x.shape, device=generator.device)


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """(N,) to (N, 1, ..., 1), so that it multiplies a batch."""
    return values.view(-1, *[1] * (like.dim() - 1))


def unit_length(direction: Tensor, order: int = 2) -> Tensor:
    """Make every example of (N, ...) 1 long in L1 or L2 (``order``); zero stays zero."""
    flat = direction.flatten(1)
    # Divided by the largest entry first: squares of tiny gradients would underflow and freeze the example.
    flat = flat / flat.abs().amax(dim=1, keepdim=True).clamp_min(_TINY)
    unit: Tensor = flat / flat.norm(p=order, dim=1, keepdim=True).clamp_min(_TINY)
    return unit.view_as(direction)


# --- the L1 ball ------------------------------------------------------------------------------------------------------
#
# Points spread evenly in it, the steps that climb in it, and its point within a box that is nearest to another. All
# tensors are flat, (N, D).


def random_l1_point(empty: Tensor, generator: Generator) -> Tensor:
    """Uniform in the ball of radius 1.

    Exponential sizes, divided by their sum and one more, are uniform below the simplex; signs fill the other orthants.

    Args:
        empty: (N, D) float, on the generator's device; overwritten.
        generator: source of the noise.
    """
    sizes = empty.new_empty((len(empty), empty.shape[1] + 1)).exponential_(generator=generator)
    shares = sizes[:, :-1] / sizes.sum(dim=1, keepdim=True)
    return shares * empty.uniform_(-1, 1, generator=generator).sign()


def sparse_signs(grad: Tensor) -> Tensor:
    """SLIDE's step of length 1: the signs of the largest hundredth of ``grad``, at least of one, in equal parts.

    The one coordinate with the largest slope would climb fastest, but the range of a pixel soon stops it. Ties all
    move; a zero gradient moves nothing.
    """
    size = grad.abs()
    least = size.topk((grad.shape[1] - 1) // _ONE_IN + 1, dim=1).values[:, -1:]
    signs = grad.sign().where(size >= least, 0.0)
    return signs / signs.abs().sum(dim=1, keepdim=True).clamp_min(1.0)


def nearest_l1_change(change: Tensor, down: Tensor, up: Tensor, eps: float | Tensor) -> Tensor:
    """The nearest change that is in the ball and in a box around 0 at once, as in APGD-L1 (Croce and Hein 2021).

    It is ``min((|change| - t)+, room)`` with the signs of ``change`` and the smallest t >= 0 that makes it at most
    ``eps`` long. That length falls with t, linearly between knots: where a value leaves its bound, and where it
    reaches 0. (A projection on the ball and then on the box is not the nearest, and shorter than eps.)

    Args:
        change: (N, D).
        down: (N, D) >= 0, how far each value may fall.
        up: (N, D) >= 0, how far each value may rise.
        eps: radius of the ball, >= 0; or (N, 1), one an example.
    """
    size, count = change.abs(), change.shape[1]
    room = up.where(change > 0, down)
    knots = size.new_empty((len(size), 2 * count))
    knots[:, :count], knots[:, count:] = size, (size - room).clamp_min(0.0)
    knots, order = knots.sort(dim=1, descending=True)
    knots = knots.double()  # sums of thousands of values that differ by little
    joins = 1.0 - 2.0 * (order >= count).double()  # below its first knot a value grows, below its second no more
    # The length at t, from here on: offset - growing t.
    growing, offset = joins.cumsum(dim=1), (joins * knots).cumsum(dim=1)
    within = (offset - growing * knots <= eps).sum(dim=1, keepdim=True)  # knots at which it is at most eps long; >= 1
    before, after = within - 1, within.clamp_max(2 * count - 1)
    t = (offset.gather(1, before) - eps) / growing.gather(1, before).clamp_min(1.0)
    t = t.clamp(knots.gather(1, after), knots.gather(1, before)).where(within < 2 * count, 0.0)
    return (size - t).clamp_min(0.0).to(size.dtype).minimum(room) * change.sign()
