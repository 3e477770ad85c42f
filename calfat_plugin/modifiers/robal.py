"""RoBal: a cosine classifier, class-aware margins and a prior in the classification loss (Wu et al., CVPR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import ModifierEntry, Preset, paper
from calfat_plugin.errors import ModelError, OptionError
from calfat_plugin.interfaces import ClientLoss, LossModifier
from calfat_plugin.maths.losses import wide
from calfat_plugin.modifiers.counts import floor_option, log_frequencies, rarest_present, subtract_at_label
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.recipe.schema import Recipe


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
    delta: float | None = floor_option()
    calibrate_inner: bool = option(False, help="let the attack climb scaled cosines with the prior, too")


class RoBalLoss(ClientLoss):
    """CE(s (cos - m_y at the true class) + tau_b log pi, y); attacks and divergences see the bare cosines."""

    def __init__(self, options: RoBalOptions, class_counts: Tensor) -> None:
        self.options = options
        counts = class_counts.double()
        rarest = rarest_present(class_counts)
        growth = (counts.clamp_min(rarest) / rarest).log()  # a missing class gets m0
        self.margins = (options.m0 + options.tau_m / options.scale * growth).float()  # (C,)
        self.log_prior = log_frequencies(class_counts, delta=options.delta)  # (C,)

    def attack_logits(self, logits: Tensor) -> Tensor:
        if not self.options.calibrate_inner:
            return logits
        return self.margin_logits(logits) + self.options.tau_b * self.log_prior

    def margin_logits(self, logits: Tensor) -> Tensor:
        return self.options.scale * wide(logits)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        scaled = self.options.scale * subtract_at_label(logits, y, self.margins)
        return super().cross_entropy(scaled + self.options.tau_b * self.log_prior, y)


class RoBal(LossModifier):
    """Replaces the last layer by a cosine classifier, and the classification loss by RoBal's."""

    options: RoBalOptions

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from torch import nn

        linear = getattr(model, "classifier", None)
        if not isinstance(linear, nn.Linear):
            layer = "nothing"
            if linear is not None:
                layer = type(linear).__name__
            raise ModelError(
                f"model {type(model).__name__}: RoBal replaces the last layer, an nn.Linear under the name "
                f"'classifier'; found {layer}. Derive from models.ImageClassifier."
            )
        model.classifier = cosine_classifier(linear, self.options.gamma)
        return model

    def bind(self, class_counts: Tensor) -> ClientLoss:
        return RoBalLoss(self.options, class_counts)


def cosine_logits(features: Tensor, weight: Tensor, gamma: float) -> Tensor:
    """RoBal's classifier: cos_k = <w_k, h> / ((||w_k|| + gamma) ||h||), no bias, scale 1; 0 for an all-zero h."""
    directions = weight / (weight.norm(dim=1, keepdim=True) + gamma)
    unit_features = features / features.norm(dim=1, keepdim=True).clamp_min(1e-12)
    cosines: Tensor = unit_features @ directions.T
    return cosines


def cosine_classifier(linear: nn.Linear, gamma: float) -> nn.Module:
    """A layer of :func:`cosine_logits` with the weight of ``linear``; its initial distribution is RoBal's own."""
    from torch import nn  # here, and so the class: listing modifiers must not import torch

    class CosineClassifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(linear.weight.detach().clone())

        def forward(self, features: Tensor) -> Tensor:
            return cosine_logits(features, self.weight, gamma)

    return CosineClassifier()


def _check(options: RoBalOptions, recipe: Recipe) -> None:
    """The cosine classifier, which has gamma in it, is part of the one model that all clients train."""
    of_all = [recipe.modifier.options]
    of_all += [group.recipe.modifier.options for group in recipe.clients]
    gammas = {other.gamma for other in of_all if isinstance(other, RoBalOptions)}
    other_gammas = gammas - {options.gamma}
    if other_gammas:
        raise OptionError(
            f"gamma: got {options.gamma:g} beside {min(other_gammas):g} for other clients; expected the same for all, "
            "who train one model."
        )


def _preset(help: str, **constants: float) -> Preset:
    cifar10_r = {"scale": 10.0, "m0": 0.1, "tau_b": 1.5, "tau_m": 0.3, "gamma": 1 / 32}
    return Preset(help, {**cifar10_r, **constants})


ENTRY = ModifierEntry(
    "robal",
    build=RoBal,
    config=RoBalOptions,
    reshapes=True,
    check=_check,
    summary="cosine classifier, margins that grow with the class count, and the client's log class prior",
    formula="CE(s (cos_k - 1[k = y] m_y) + tau_b log pi_k, y), m_y = m0 + (tau_m / s) log(n_y / n_min)",
    citation=paper("wu2021adversarial"),
    presets={
        "cifar10-r": _preset("RoBal-R as for CIFAR-10, the default"),
        "cifar10-n": _preset("RoBal-N as for CIFAR-10, without its test-time term", tau_b=1.2, tau_m=0.0),
        "cifar100-r": _preset(
            "RoBal-R as for CIFAR-100, without its test-time term", m0=0.3, tau_b=0.0, tau_m=0.0, gamma=1 / 16
        ),
        "cifar100-n": _preset("RoBal-N as for CIFAR-100, without its test-time term", m0=0.2, tau_b=0.0, tau_m=0.0),
    },
)
