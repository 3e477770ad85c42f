"""Calibration by the client's own class prior: the losses of CalFAT for any method (Chen et al. 2022, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.entries import ModifierEntry, Preset, paper
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.modifiers.counts import LossOfClient, floor_option, log_counts, log_frequencies
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor

CALFAT_PAPER = paper("chen2022calfat")

_CONSTANTS: dict[str, dict[str, Any]] = {
    "paper": {"prior": "frequencies", "prior_weight": 1.0, "scale": 1.0},
    "release": {"prior": "counts", "prior_weight": 0.1, "scale": 10.0},
}


@dataclass(frozen=True)
class CalibrationOptions:
    """The constants of the calibrated losses. ``null`` takes the value that ``parameterisation`` says."""

    parameterisation: Literal["paper", "release"] = option(
        "paper", help="paper: frequencies, k = s = 1; release: counts, k = 0.1, s = 10 as in the authors' code"
    )
    prior: Literal["frequencies", "counts"] | None = option(
        None,
        help="prior nu: class frequencies + delta, or raw counts with a missing class counted once; null: by "
        "parameterisation",
    )
    prior_weight: float | None = option(None, low=0, help="k, factor of log nu; null: by parameterisation")
    scale: float | None = option(
        None,
        low=0,
        open_low=True,
        help="s, factor of the outer logits; scales the effective learning rate; null: by parameterisation",
    )
    delta: float | None = floor_option()

    def __post_init__(self) -> None:
        for name, value in _CONSTANTS[self.parameterisation].items():
            if getattr(self, name) is None:  # filled in here, so that the recipe as run shows every constant
                object.__setattr__(self, name, value)


class CalibratedLoss(ClientLoss):
    """C_out(z) = s (z + k log nu) in classification and probability terms (CalFAT eq. 5-6)."""

    def __init__(
        self, options: Any, class_counts: Tensor, *, calibrate_attack: bool = True, calibrate_outer: bool = True
    ) -> None:
        self.prior_weight: float = options.prior_weight
        self.scale: float = options.scale
        self.calibrate_attack = calibrate_attack
        self.calibrate_outer = calibrate_outer
        if options.prior == "counts":
            self.log_prior = log_counts(class_counts)
        else:
            self.log_prior = log_frequencies(class_counts, delta=options.delta)

    def attack_logits(self, logits: Tensor) -> Tensor:
        if not self.calibrate_attack:
            return logits
        return self.kl_logits(logits)

    def kl_logits(self, logits: Tensor) -> Tensor:
        return logits + self.prior_weight * self.log_prior

    def margin_logits(self, logits: Tensor) -> Tensor:
        calibrated = self.kl_logits(logits)
        if self.scale == 1.0:  # the paper's: a multiplication would only cost time
            return calibrated
        return calibrated * self.scale

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        if self.calibrate_outer:
            logits = self.margin_logits(logits)
        return super().cross_entropy(logits, y)


@dataclass(frozen=True)
class CalibratedOptions(CalibrationOptions):
    """Options of the modifier."""

    calibrate_inner: bool = option(True, help="calibrate the logits that the attack climbs, too")


def idle_delta(options: CalibrationOptions) -> dict[str, str]:
    """A prior of counts has no use for ``delta``."""
    if options.prior != "counts":
        return {}
    return {"delta": "it is added to class frequencies, and this prior is of counts."}


ENTRY = ModifierEntry(
    "calibrated",
    build=partial(
        LossOfClient,
        lambda options, counts: CalibratedLoss(options, counts, calibrate_attack=options.calibrate_inner),
    ),
    config=CalibratedOptions,
    idle=idle_delta,
    summary="add the client's log class prior to the logits in training",
    formula="CE(s (z + k log nu), y); divergences and attacks on z + k log nu",
    citation=CALFAT_PAPER,
    presets={
        "paper": Preset("constants as the paper words them", {"parameterisation": "paper"}),
        "release": Preset("constants of the authors' code", {"parameterisation": "release"}),
    },
)
