"""RoBal: a cosine classifier, class-aware margins and a prior in the classification loss (Wu et al., CVPR 2021)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import Citation, ModifierEntry, Preset
from calfat_plugin.interfaces import ClientLoss, LossModifier
from calfat_plugin.modifiers import margins
from calfat_plugin.modifiers.priors import calibrated_logits, log_frequencies
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class RoBalOptions:
    """The constants of RoBal; the defaults are its CIFAR-10 RoBal-R.

    Its regulariser, a divergence on unscaled cosines, is there where the method has a divergence (FedTRADES), with the
    method's own weight; no second one is added.
    """

    scale: float = option(10.0, low=0, open_low=True, help="s, factor of the cosines in the classification loss")
    m0: float = option(0.1, low=0, help="margin of the client's rarest class")
    tau_b: float = option(1.5, low=0, help="factor of the log prior")
    tau_m: float = option(0.3, low=0, help="growth of the margin with the class count")
    gamma: float = option(1 / 32, low=0, help="added to the norm of each class's weight in the cosine")
    delta: float = option(1e-6, low=0, open_low=True, help="floor added to class frequencies, for missing classes")
    calibrate_inner: bool = option(False, help="let the attack climb scaled cosines with the prior, too")


class RoBalLoss(ClientLoss):
    """CE(s (cos - m_y at the true class) + tau_b log pi, y); attacks and divergences see the bare cosines."""

    def __init__(self, options: RoBalOptions, class_counts: Tensor) -> None:
        self.options = options
        self.robal = margins.RoBal(scale=options.scale, m0=options.m0, tau_b=options.tau_b, tau_m=options.tau_m)
        self.margins = self.robal.margins(class_counts)  # (C,)
        self.log_prior = log_frequencies(class_counts, delta=options.delta)  # (C,)

    def attack_logits(self, logits: Tensor) -> Tensor:
        if not self.options.calibrate_inner:
            return logits
        return calibrated_logits(self.options.scale * logits, self.log_prior, prior_weight=self.options.tau_b)

    def margin_logits(self, logits: Tensor) -> Tensor:
        return self.options.scale * logits

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(self.robal.logits(logits, y, self.margins, self.log_prior), y)


class RoBal(LossModifier):
    """Replaces the last layer by a cosine classifier, and the classification loss by RoBal's."""

    def __init__(self, options: RoBalOptions) -> None:
        self.options = options

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from calfat_plugin.modifiers.cosine import with_cosine_classifier

        return with_cosine_classifier(model, self.options.gamma)

    def bind(self, class_counts: Tensor) -> ClientLoss:
        return RoBalLoss(self.options, class_counts)


def _preset(help: str, constants: margins.RoBal) -> Preset:
    values: dict[str, Any] = dataclasses.asdict(constants)
    del values["kl_weight"]  # the method's own, see RoBalOptions
    return Preset(help, values)


ENTRY = ModifierEntry(
    "robal",
    build=RoBal,
    config=RoBalOptions,
    summary="cosine classifier, margins that grow with the class count, and the client's log class prior",
    formula="CE(s (cos_k - 1[k = y] m_y) + tau_b log pi_k, y), m_y = m0 + (tau_m / s) log(n_y / n_min)",
    citation=Citation(
        "Wu et al., Adversarial Robustness under Long-Tailed Distribution, CVPR 2021",
        """@inproceedings{wu2021adversarial,
  title     = {Adversarial Robustness under Long-Tailed Distribution},
  author    = {Wu, Tong and Liu, Ziwei and Huang, Qingqiu and Wang, Yu and Lin, Dahua},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2021}
}""",
    ),
    presets={
        "cifar10-r": _preset("RoBal-R as for CIFAR-10, the default", margins.ROBAL_R_CIFAR10),
        "cifar10-n": _preset("RoBal-N as for CIFAR-10, without its test-time term", margins.ROBAL_N_CIFAR10),
        "cifar100-r": _preset("RoBal-R as for CIFAR-100, without its test-time term", margins.ROBAL_R_CIFAR100),
        "cifar100-n": _preset("RoBal-N as for CIFAR-100, without its test-time term", margins.ROBAL_N_CIFAR100),
    },
)
