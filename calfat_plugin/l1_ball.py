"""The L1 ball: points spread evenly in it, the steps that climb in it, and the nearest point of it within a box.

All tensors are flat, (N, D). Only tensors' own methods are used: recipes are checked without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor

_ONE_IN = 100  # SLIDE (Tramer and Boneh 2019) moves the pixels above the 99th percentile of the gradient


def random_point(empty: Tensor, generator: Generator) -> Tensor:
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


def nearest_change(change: Tensor, down: Tensor, up: Tensor, eps: float | Tensor) -> Tensor:
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
