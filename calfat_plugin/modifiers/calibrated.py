"""Calibration by the client's own class prior: the losses of CalFAT for any method (Chen et al. 2022, section 4)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from calfat_plugin.entries import Citation, ModifierEntry, Preset
from calfat_plugin.interfaces import ClientLoss, LossModifier
from calfat_plugin.modifiers.priors import PAPER, RELEASE, Calibration
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor

CALFAT_PAPER = Citation(
    "Chen et al., CalFAT: Calibrated Federated Adversarial Training with Label Skewness, NeurIPS 2022",
    """@inproceedings{chen2022calfat,
  title     = {{CalFAT}: Calibrated Federated Adversarial Training with Label Skewness},
  author    = {Chen, Chen and Liu, Yuchen and Ma, Xingjun and Lyu, Lingjuan},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {35},
  year      = {2022},
  note      = {arXiv:2205.14926}
}""",
)


@dataclass(frozen=True)
class CalibrationOptions:
    """The constants of the calibrated losses. ``null`` takes the value that ``parameterisation`` says."""

    parameterisation: Literal["paper", "release"] = option(
        "paper", help="paper: frequencies, k = s = 1; release: counts, k = 0.1, s = 10 as in the authors' code"
    )
    prior: Literal["frequencies", "counts"] | None = option(
        None, help="prior nu: class frequencies + delta, or raw counts with a missing class counted once"
    )
    prior_weight: float | None = option(None, low=0, help="k, factor of log nu")
    scale: float | None = option(
        None, low=0, open_low=True, help="s, factor of the outer logits; scales the effective learning rate"
    )
    delta: float | None = option(
        None, low=0, open_low=True, help="floor added to class frequencies; the paper never gives it"
    )

    def __post_init__(self) -> None:
        base = RELEASE if self.parameterisation == "release" else PAPER
        for name in ("prior", "prior_weight", "scale", "delta"):
            if getattr(self, name) is None:  # filled in here, so that the recipe as run shows every constant
                object.__setattr__(self, name, getattr(base, name))

    @property
    def calibration(self) -> Calibration:
        """The constants as the maths takes them."""
        base = RELEASE if self.parameterisation == "release" else PAPER
        return dataclasses.replace(
            base, **{name: getattr(self, name) for name in ("prior", "prior_weight", "scale", "delta")}
        )


class CalibratedLoss(ClientLoss):
    """C_out in classification and probability terms, C_in in attacks and divergences (CalFAT eq. 5-6)."""

    def __init__(self, calibration: Calibration, class_counts: Tensor, *, calibrate_attack: bool = True) -> None:
        self.calibration = calibration
        self.calibrate_attack = calibrate_attack
        self.log_prior = calibration.log_prior(class_counts)  # (C,)

    def attack_logits(self, logits: Tensor) -> Tensor:
        return self.calibration.inner(logits, self.log_prior) if self.calibrate_attack else logits

    def kl_logits(self, logits: Tensor) -> Tensor:
        return self.calibration.inner(logits, self.log_prior)

    def margin_logits(self, logits: Tensor) -> Tensor:
        return self.calibration.outer(logits, self.log_prior)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(self.calibration.outer(logits, self.log_prior), y)


@dataclass(frozen=True)
class CalibratedOptions(CalibrationOptions):
    """Options of the modifier."""

    calibrate_inner: bool = option(True, help="calibrate the logits that the attack climbs, too")


class Calibrated(LossModifier):
    """Adds k log nu_i to the logits of client i, in training only."""

    def __init__(self, options: CalibratedOptions) -> None:
        self.options = options

    def bind(self, class_counts: Tensor) -> ClientLoss:
        return CalibratedLoss(self.options.calibration, class_counts, calibrate_attack=self.options.calibrate_inner)


ENTRY = ModifierEntry(
    "calibrated",
    build=Calibrated,
    config=CalibratedOptions,
    summary="add the client's log class prior to the logits in training",
    formula="CE(s (z + k log nu), y); divergences and attacks on z + k log nu",
    citation=CALFAT_PAPER,
    presets={
        "paper": Preset("constants as the paper words them", {"parameterisation": "paper"}),
        "release": Preset("constants of the authors' code", {"parameterisation": "release"}),
    },
)
