"""Common parts of loss modifiers: class priors of a client, and margins (methods.md 2, 3 and 6).

Calibration adds ``prior_weight * log prior`` to the logits in training; evaluation uses raw logits.
A prior is built once from the labels a client trains on, and never leaves the client. It must have
a floor: log 0 turns the CE of a missing class into inf and the KL into nan (methods.md 15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from calfat_plugin.interfaces import ClientLoss, LossModifier
from calfat_plugin.maths.losses import wide
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


class LossOfClient(LossModifier):
    """A modifier that leaves the model as it is, and has a loss for each client: ``loss(options, class_counts)``.

    ``loss`` comes first, so that an entry builds a modifier by ``partial(LossOfClient, loss)``.
    """

    def __init__(self, loss: Callable[[Any, Tensor], ClientLoss], options: Any) -> None:
        self._loss = loss
        self._options = options

    def bind(self, class_counts: Tensor) -> ClientLoss:
        return self._loss(self._options, class_counts)


def floor_option() -> Any:
    """Declare ``delta``, the floor of a prior of class frequencies, which no source gives (methods.md 2)."""
    return option(
        None,
        low=0,
        open_low=True,
        help="floor added to class frequencies, for missing classes; null: 1/n, one example of a client that has n",
    )


def log_frequencies(class_counts: Tensor, *, delta: float | None = None) -> Tensor:
    """log(n^y / n + delta), the prior of preset ``paper``: (C,) counts to (C,) float32.

    ``delta`` > 0 is our choice; None takes one example of the client, 1/n.
    """
    counts = class_counts.double()
    num_examples = counts.sum().clamp_min(1)
    if delta is None:
        # An absent class is then some log n below a class of every example, as in the authors' code. A much smaller
        # floor makes the local loss vanish, and classes that rarely meet at a client are never told apart.
        return ((counts + 1) / num_examples).log().float()
    return (counts / num_examples + delta).log().float()


def log_counts(class_counts: Tensor) -> Tensor:
    """log of the counts, a missing class counted once: the prior of preset ``release``, (C,) to (C,) float32."""
    counts = class_counts.clamp_min(1).float()
    return (counts + 1e-7).log()  # the release's; only a count of 1 feels it (methods.md 2)


def rarest_present(class_counts: Tensor) -> Tensor:
    """Smallest count of the classes that a client has, a float64 scalar; 1 for a client without examples."""
    counts = class_counts.double()
    if not counts.any():
        return counts.new_ones(())
    return counts[counts > 0].min()


def subtract_at_label(logits: Tensor, y: Tensor, margins: Tensor) -> Tensor:
    """z_y - m_y for the true class, the other logits unchanged; a new (N, C), at least float32. margins: (C,)."""
    logits = wide(logits)  # bfloat16 would round a margin away: next to 4 it has steps of 0.016
    shift = logits.new_zeros(logits.shape).scatter(1, y[:, None], margins[y][:, None].to(logits.dtype))
    return logits - shift
