"""Checks that attack nothing: does the model answer as a function of the image alone, and is its gradient the slope?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS
from calfat_plugin.evaluators.base import share, subset
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.judging.check import STEPS, Check, Symptom
from calfat_plugin.judging.evidence import (
    BATCHED,
    CHANGED,
    CLAIM,
    GUESS,
    NATURAL,
    ONE_HOT,
    REMEMBERED,
    REPEATED,
    UNRELATED,
    Evidence,
    Found,
    Row,
)
from calfat_plugin.report.numbers import percent

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.judging.trial import Trial

_DRAWS = 3
_EXACT = 1e-5  # of the largest logit: rounding of a few additions
_SAMPLE = 64  # images at which slopes are measured
_DIRECTIONS = 8
_LENGTHS = (1e-1, 1e-2, 1e-3)  # of eps, over which a slope is measured; the one that agrees best counts
_OFF = 0.5  # the gradient explains less than three quarters of how the logits change: it is another function's
_UNRELATED_SHARE = 0.1  # of the images: a kink of a ReLU is no masking


@dataclass(frozen=True)
class Answers(Check):
    """Does the model answer the same to the same image, whenever it is asked and whatever else it is asked about?"""

    name: str = "answers"
    title: str = "same answers to the same images"

    def cost(self, examples: int) -> float:
        return (4.0 + _DRAWS) * examples

    def run(self, trial: Trial) -> Evidence:
        import torch

        from calfat_plugin.datasets.batches import batches
        from calfat_plugin.federation.global_rng import seeded_global_rng
        from calfat_plugin.judging.trial import differ
        from calfat_plugin.seeds import derive_seed, generator

        draws = []
        for draw in range(_DRAWS):
            with seeded_global_rng(derive_seed(trial.seed, "trust/answers", extra=draw)):
                draws.append(torch.cat(list(trial.logits())))
        changed = torch.stack([differ(draws[0], other) for other in draws[1:]]).any(dim=0)
        frequencies = trial.data.y.cpu().bincount(minlength=trial.num_classes)
        facts = {
            NATURAL: share(trial.correct),
            GUESS: int(frequencies.max()) / len(trial.correct),
            CHANGED: share(changed),
        }
        if changed.any():
            return Evidence(self.name, tuple(self.rows(trial)), facts)
        noise = generator(trial.seed, "trust/answers")
        batched, remembered, repeated = [], [], []
        whole = batches(trial.data, trial.batch_size, trial.device)
        for (x, *_), clean in zip(whole, draws[0].split(trial.batch_size), strict=True):
            batched.append(differ(clean, trial.asked_anew(x, "clean images")))
            points = trial.threat.random_start(x, noise)
            logits = trial.asked(points, "random points of the ball")
            remembered.append(differ(logits, trial.asked_anew(points, "random points of the ball")))
            repeated.append((logits - clean).abs().amax(dim=1) <= _EXACT * float(clean.abs().amax()))
        facts |= {BATCHED: share(torch.cat(batched)), REPEATED: share(torch.cat(repeated))}
        # Of a model whose answers depend on the batch, the copy, which is asked in other batches, says nothing more.
        facts[REMEMBERED] = 0.0 if facts[BATCHED] > ZERO_GRADIENTS else share(torch.cat(remembered))
        return Evidence(self.name, (), facts)

    def rows(self, trial: Trial) -> Iterator[Row]:
        """For a randomised model: the attack on trial, as often as the clean images, to show what one run is worth."""
        for draw in range(_DRAWS):
            yield trial.attack(f"{CLAIM}, draw {draw + 1}", PGD(PGDOptions(steps=STEPS)))

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        repeated = found.facts.get(REPEATED, 0.0)
        if repeated > ZERO_GRADIENTS:
            yield Symptom(
                f"at a random point of the ball the logits of {percent(repeated)} of the images are exactly what they "
                "are at the image itself: no attack that compares logits sees how near it is to an error",
                masks=True,
            )


@dataclass(frozen=True)
class Slopes(Check):
    """Is the gradient that the model returns the slope of the logits that it returns?

    At a random point of each image's ball the difference of the two largest logits is compared, along random
    directions, with what the gradient says about it. A gradient that was replaced, or taken of something else than
    what is answered, leads attacks elsewhere, however strong they are.
    """

    name: str = "slopes"
    title: str = "gradients against the slopes of the logits"

    def cost(self, examples: int) -> float:
        return (3.0 + 2 * _DIRECTIONS * len(_LENGTHS)) * min(examples, _SAMPLE)

    def run(self, trial: Trial) -> Evidence:
        import torch

        from calfat_plugin.datasets.data import pixels
        from calfat_plugin.maths.attacks import attack_mode, input_gradient
        from calfat_plugin.maths.precision import float32_as
        from calfat_plugin.seeds import generator

        noise = generator(trial.seed, "trust/slopes")
        x = pixels(subset(trial.data, _SAMPLE).x.to(trial.device))
        low, high = trial.threat.bounds
        pixels_each = x[0].numel()  # all of which may move at once so far within the ball:
        shrink: dict[str, float] = {"linf": 1.0, "l2": math.sqrt(pixels_each), "l1": pixels_each}
        longest = _LENGTHS[0] * (float(trial.threat.eps) / shrink[trial.threat.norm])
        start = trial.threat.random_start(x, noise).clamp(low + longest, high - longest)
        logits = trial.asked(start, "random points of the ball")
        first, second = logits.topk(2, dim=1).indices.unbind(1)
        point = start.clone().requires_grad_()
        with attack_mode(trial.model), torch.enable_grad(), float32_as("fp32", trial.device):
            slope = input_gradient(_margin(trial.model(point), first, second).sum(), point).cpu().double()
        errors = torch.full((len(x),), torch.inf, dtype=torch.float64)
        for length in _LENGTHS:
            h = length / _LENGTHS[0] * longest
            wrong, moved = torch.zeros(2, len(x), dtype=torch.float64)
            for _ in range(_DIRECTIONS):
                direction = torch.empty(x.shape).bernoulli_(0.5, generator=noise).mul_(2).sub_(1)
                ends = (trial.asked(start + sign * h * direction.to(x.device), "points near them") for sign in (1, -1))
                ahead, behind = (_margin(end, first, second) for end in ends)
                expected = 2 * h * (slope * direction.double()).flatten(1).sum(dim=1)
                wrong += (ahead - behind - expected) ** 2
                moved += (ahead - behind) ** 2
            # Nothing moves and nothing should: no error.
            error = (wrong / moved.clamp_min(1e-300)).sqrt().where(wrong > 0, torch.zeros(()).double())
            errors = torch.minimum(errors, error)
        values = logits.sort(dim=1).values
        spread = values[:, -1:] - values[:, :1]
        levels = 1 + ((values[:, 1:] - values[:, :-1]) > _EXACT * spread).sum(dim=1)
        one_hot = (levels <= 2) & (trial.num_classes > 2)
        return Evidence(self.name, (), {UNRELATED: share(errors > _OFF), ONE_HOT: share(one_hot)})

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        unrelated, one_hot = found.facts.get(UNRELATED, 0.0), found.facts.get(ONE_HOT, 0.0)
        if unrelated > _UNRELATED_SHARE:
            yield Symptom(
                f"for {percent(unrelated)} of the images the gradient is not the slope of the logits: attacks along it "
                "climb another function than the one that answers",
                masks=True,
            )
        if one_hot > _UNRELATED_SHARE:
            yield Symptom(
                f"for {percent(one_hot)} of the images the logits are two different numbers alone, as a label is: no "
                "attack that compares logits sees how near it is to an error",
                masks=True,
            )


def _margin(logits: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """(N,) float64, of (N, C) logits that at ``first`` above that at ``second``."""
    one, other = (logits.gather(1, which.to(logits.device)[:, None]).squeeze(1).double() for which in (first, second))
    return one - other
