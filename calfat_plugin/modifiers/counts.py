"""Loss modifiers that go by how many examples of each class a client has (methods.md 2, 3 and 6).

Each changes the logits in training by priors, margins or factors of the classes; evaluation uses raw logits. They are
computed once from the labels that a client trains on, and never leave the client. Calibration and RoBal, which have
files of their own, use the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import ModifierEntry, paper
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


PLAIN = ModifierEntry(
    "plain",
    build=partial(LossOfClient, lambda options, class_counts: ClientLoss()),
    summary="the method's own losses, unchanged",
    formula="CE(z, y)",
)


# --- priors and margins -----------------------------------------------------------------------------------------------


def floor_option() -> Any:
    """Declare ``delta``, the floor of a prior of class frequencies, which no source gives (methods.md 2).

    There must be one: log 0 turns the cross-entropy of a missing class into inf and a divergence into nan.
    """
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


# --- LogitAdj: the class prior, in the classification loss only (Menon et al., ICLR 2021) -----------------------------


@dataclass(frozen=True)
class LogitAdjOptions:
    """The constants of LogitAdj."""

    tau: float = option(1.0, low=0, help="factor of the log prior; 0 changes nothing")
    delta: float | None = floor_option()
    calibrate_inner: bool = option(False, help="adjust the logits that the attack climbs, too")


class LogitAdjLoss(ClientLoss):
    """CE(z + tau log pi, y); divergences, probabilities and (unless asked for) attacks stay on raw logits."""

    def __init__(self, options: LogitAdjOptions, class_counts: Tensor) -> None:
        self.options = options
        self.log_prior = log_frequencies(class_counts, delta=options.delta)  # (C,)

    def attack_logits(self, logits: Tensor) -> Tensor:
        if not self.options.calibrate_inner:
            return logits
        return self._adjusted(logits)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(self._adjusted(logits), y)

    def _adjusted(self, logits: Tensor) -> Tensor:
        return logits + self.options.tau * self.log_prior


LOGITADJ = ModifierEntry(
    "logitadj",
    build=partial(LossOfClient, LogitAdjLoss),
    config=LogitAdjOptions,
    summary="add the client's log class prior to the logits of the classification loss, not of attack or divergence",
    formula="CE(z + tau log pi, y)",
    citation=paper("menon2021longtail"),
)


# --- FedLC: a margin on every logit that grows as the class gets rarer (Zhang et al., ICML 2022) ----------------------


@dataclass(frozen=True)
class FedLCOptions:
    """The constant of FedLC."""

    tau: float = option(1.0, low=0, help="factor of the margins; 0.5 to 1 are usual")


class FedLCLoss(ClientLoss):
    """CE(z - tau n^(-1/4), y): presses rare classes down, and missing ones out of the softmax."""

    def __init__(self, options: FedLCOptions, class_counts: Tensor) -> None:
        # A missing class counts as 1e-8 examples, a margin of 100 tau, which takes it out of the softmax.
        self.margins = (options.tau * class_counts.double().clamp_min(1e-8).pow(-0.25)).float()  # (C,)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(logits - self.margins, y)


FEDLC = ModifierEntry(
    "fedlc",
    build=partial(LossOfClient, FedLCLoss),
    config=FedLCOptions,
    summary="subtract a margin that grows as a class gets rarer on the client from each logit",
    formula="CE(z_k - tau n_k^(-1/4), y)",
    citation=paper("zhang2022federated"),
)


# --- GEAR: a margin on the true class that is larger for rare classes (Chen et al., FL-AAAI 2022) ---------------------


@dataclass(frozen=True)
class GEAROptions:
    """The constant of GEAR."""

    delta: float = option(0.01, low=0, help="margin of the client's rarest class")


class GEARLoss(ClientLoss):
    """CE on logits whose true class lost delta (n_min / n_y)^(1/4)."""

    def __init__(self, options: GEAROptions, class_counts: Tensor) -> None:
        counts = class_counts.double()
        rarest = rarest_present(class_counts)
        # A missing class, which is never a label, gets delta.
        self.margins = (options.delta * (rarest / counts.clamp_min(rarest)).pow(0.25)).float()  # (C,)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(subtract_at_label(logits, y, self.margins), y)


GEAR = ModifierEntry(
    "gear",
    build=partial(LossOfClient, GEARLoss),
    config=GEAROptions,
    summary="subtract a margin that is larger for the client's rare classes from the true class's logit",
    formula="CE(z_k - 1[k = y] delta (n_min / n_y)^(1/4), y)",
    citation=paper("chen2022gear"),
)


# --- FedRS: a softmax in which missing classes count less (Li and Zhan, KDD 2021) -------------------------------------


@dataclass(frozen=True)
class FedRSOptions:
    """The constants of FedRS."""

    alpha: float = option(0.5, low=0, high=1, help="factor of a missing class's logit; 1 changes nothing")
    absent_below: int = option(3, low=1, help="a class with fewer examples counts as missing", unit="examples")


class FedRSLoss(ClientLoss):
    """CE(a z, y), a = alpha for the client's missing classes and 1 for the others."""

    def __init__(self, options: FedRSOptions, class_counts: Tensor) -> None:
        missing = (class_counts < options.absent_below).float()
        self.factors = 1.0 - (1.0 - options.alpha) * missing  # (C,)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(logits * self.factors, y)


FEDRS = ModifierEntry(
    "fedrs",
    build=partial(LossOfClient, FedRSLoss),
    config=FedRSOptions,
    summary="scale the logits of classes that the client misses",
    formula="CE(a_k z_k, y), a_k = alpha for missing classes, else 1",
    citation=paper("li2021fedrs"),
)


ENTRIES = (PLAIN, LOGITADJ, FEDLC, GEAR, FEDRS)
