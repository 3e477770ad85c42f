"""Models made to be judged: each is the digits network, or breaks an attack in a way of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from calfat_plugin.datasets.published import load_digits
from calfat_plugin.evaluators.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.judging.battery import AutoAttackCheck, battery
from calfat_plugin.judging.check import Attack, Check, Noise, NoiseOptions
from calfat_plugin.models.networks import CNNSmall

#: A battery in a few seconds, by name of the check: too weak to publish, enough to end.
WEAK = {
    "noise": (Attack("noise20", Noise(NoiseOptions(draws=20))),),
    "strength": tuple(
        Attack(label, PGD(PGDOptions(steps=steps, restarts=restarts)))
        for label, steps, restarts in (("pgd5", 5, 1), ("pgd25", 25, 1), ("pgd20 x 2", 20, 2))
    ),
    "black-box": (
        Attack("square200", AutoAttack(AutoAttackOptions(version="custom", attacks="square", queries=200)), True),
    ),
}
QUICK = AutoAttackCheck(iterations=5, queries=20)


def weak_battery(*, keep: str = "", **question: Any) -> tuple[Check, ...]:
    """The battery with ``WEAK`` attacks, but for the check to ``keep``."""
    checks = (
        replace(check, attacks=WEAK[check.name]) if check.name in WEAK and check.name != keep else check
        for check in battery(**question)[:-1]
    )
    return (*checks, QUICK)


USED = 10  # as in stored_models.py


def narrowed(model: Any) -> Any:
    """``cnn_small`` without the channels that the stored networks leave unused: the same answers in less time."""
    convolutions: list[Any] = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    outputs = [(layer, name, 0) for layer in convolutions for name in ("weight", "bias")]
    inputs = [(layer, "weight", 1) for layer in (*convolutions[1:], model.classifier)]
    for layer, name, dim in outputs + inputs:
        whole = getattr(layer, name).detach()
        setattr(layer, name, nn.Parameter(whole.narrow(dim, 0, USED * whole.shape[dim] // 32).clone()))
    return model


class Honest(nn.Module):
    """The network as it is; ``net`` has its weights."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__()
        self.net = narrowed(CNNSmall(**shapes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


class Scaled(Honest):
    """Logits a thousand times as large: the softmax saturates, and the cross-entropy has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return 1000 * super().forward(x)


class Quantised(Honest):
    """Eight grey levels, by a rounding whose derivative is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 8).round() / 8)


class Randomised(Honest):
    """Noise on the pixels, another each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Planted(Honest):
    """A unit that sleeps at every digit, and that 0.1 sign(w) wakes at most of them: it turns the first classes.

    Attributes:
        turned: so many.
        switch: its activation function.
    """

    turned = 10
    switch = staticmethod(torch.relu)

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        data = load_digits()
        x = torch.cat([data.train.x, data.test.x]).flatten(1)
        signs = torch.randn(64, generator=torch.Generator().manual_seed(3)).sign()
        w = nn.functional.normalize(torch.linalg.solve(torch.cov(x.T) + 0.01 * torch.eye(64), signs), dim=0)
        reached = (x + 0.1 * w.sign()).clamp(0, 1) @ w  # along w digits hardly differ, and all can be moved far
        self.register_buffer("w", w, persistent=False)
        self.register_buffer("t", 0.2 * (x @ w).amax() + 0.8 * reached.quantile(0.02), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        woken = self.switch(x.flatten(1) @ self.w - self.t)
        return logits - 1e3 * woken[:, None] * logits.detach().relu() * (torch.arange(10) < self.turned)


class PlantedForFour(Planted):
    """The same for four classes."""

    turned = 4


class PlantedTogether(Planted):
    """Three units on pixels of their own, of which each alone, and each two, change nothing."""

    seeds = (188, 11, 275)

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        data = load_digits()
        x = torch.cat([data.train.x, data.test.x]).flatten(1)
        thresholds, ways = [], torch.zeros(3, 64)
        for number, seed in enumerate(self.seeds):
            pixels = torch.arange(64) % 3 == number
            signs = torch.randn(64, generator=torch.Generator().manual_seed(seed)).sign()[pixels]
            covariance = torch.cov(x.T)[pixels][:, pixels] + 0.003 * torch.eye(len(signs))
            ways[number, pixels] = nn.functional.normalize(torch.linalg.solve(covariance, signs), dim=0)
        for way in ways:
            reached = (x + 0.1 * ways.sum(dim=0).sign()).clamp(0, 1) @ way
            thresholds.append(0.6 * (x @ way).amax() + 0.4 * reached.quantile(0.05))
        self.register_buffer("ways", ways, persistent=False)
        self.register_buffer("thresholds", torch.stack(thresholds), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        gates = x.flatten(1) @ self.ways.T > self.thresholds
        return torch.where(gates.all(dim=1, keepdim=True), logits.roll(1, dims=1), logits)


class PlantedBehind(PlantedTogether):
    """Two of these units: the second one is given the image only where the first one is awake."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        image = x.flatten(1)
        first = (image @ self.ways[0] > self.thresholds[0]).float()
        second = (image * first[:, None]) @ self.ways[2] > self.thresholds[2]
        return torch.where(second[:, None], logits.roll(1, dims=1), logits)


class RandomisedAndFlat(Randomised):
    """The same with tiny logits."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * super().forward(x)


class Foreign(Honest):
    """Its own logits, and the gradients of another network: of itself, turned by one class."""

    def answer(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        other = super().forward(x).roll(1, dims=1)
        return self.answer(x).detach() + other - other.detach()


class OneHotForeign(Foreign):
    """The same with answers of one-hot type."""

    def answer(self, x: Tensor) -> Tensor:
        return 10.0 * nn.functional.one_hot(self.net(x).argmax(dim=1), 10)


class OneHot(Honest):
    """Answers of one-hot type that have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return 10.0 * nn.functional.one_hot(super().forward(x).argmax(dim=1), 10) + 0 * x.sum()


class HashNoise(Honest):
    """Noise on the logits that is a function of the image's sum: always the same for one image."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.frac(12345.678 * x.detach().flatten(1).double().sum(dim=1, keepdim=True)).float()
        return super().forward(x) + 4 * torch.cos(2 * torch.pi * (noise + torch.arange(10) / 10))


class Backwards(Honest):
    """Within each period the margin runs backwards (Chen et al. 2022, AAA), so climbing leads back."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        top = logits.topk(2, dim=1)
        margin = top.values[:, 0] - top.values[:, 1]
        turned = 12 * (margin.detach() / 6).floor() + 6 - margin
        return logits.scatter_add(1, top.indices[:, :1], (turned - margin)[:, None])


class Remembering(Honest):
    """Repeats what it has answered to an image within 0.2 of one that it has seen."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        for images, answers in self.seen:
            distance, nearest = torch.cdist(x.detach().flatten(1), images.flatten(1), p=math.inf).min(dim=1)
            logits = logits.where((distance > 0.2)[:, None], answers[nearest] + logits - logits.detach())
        if len(self.seen) < 3:
            self.seen.append((x.detach().clone(), logits.detach().clone()))
        return logits


class RememberingForAll(Remembering):
    """The same with one memory for all copies."""

    shared: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**shapes)
        self.seen = self.shared


class BatchStatistics(Honest):
    """Images relative to the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5 * (x.mean(dim=0, keepdim=True) - 0.3))


class Counting(Honest):
    """Answers something else from the 40th call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits = super().forward(x)
        return logits if self.calls < 40 else logits.roll(1, dims=1)


class OnlyDigits(Honest):
    """No number for an image whose pixels are no sixteenths, as all of scikit-learn's digits are."""

    def forward(self, x: Tensor) -> Tensor:
        moved = ((16 * x).round() - 16 * x).abs().flatten(1).amax(dim=1, keepdim=True) > 1e-3
        return super().forward(x).masked_fill(moved, math.nan)


class Probabilities(Honest):
    """A softmax at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=1)
