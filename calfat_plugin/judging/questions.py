"""What checks ask the model themselves, beside their attacks.

Does it give the same answers again? Is its gradient the slope of its logits? And a surrogate, a second network with
gradients of its own, learns what the model answers around the images.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.data import ImageData, pixels
from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS
from calfat_plugin.evaluators.base import share, subset
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.judging.findings import BATCHED, CHANGED, GUESS, NATURAL, REMEMBERED, REPEATED
from calfat_plugin.judging.trial import Trial, differ
from calfat_plugin.maths.attacks import attack_mode, gradient_ascent, input_gradient
from calfat_plugin.maths.passes import float32_as
from calfat_plugin.seeds import derive_seed, generator

if TYPE_CHECKING:
    from calfat_plugin.threat import ThreatModel

DRAWS = 3  # how often the clean images are shown
_EXACT = 1e-5  # of the largest logit: rounding of a few additions
_SLOPES = 64  # images at which slopes are measured
_DIRECTIONS = 8
_LENGTHS = (1e-1, 1e-2, 1e-3)  # of eps, over which a slope is measured; the one that agrees best counts
_OFF = 0.5  # the gradient explains less than three quarters of how the logits change: it is another function's

# --- the surrogate ---
EPOCHS = 10
MORE = 1000  # images beside those on trial
_BATCH = 64
_STEPS = 3  # of the attack in its training
_WIDTH = 16
_SMALLEST = 8  # pixels a side before the last layers
_LEARNING_RATE = 2e-3


def repeated_answers(trial: Trial) -> dict[str, float]:
    """How the model answers about the same images again, in other batches, and near them: facts by name."""
    task = trial.task
    answers = []
    for draw in range(DRAWS):
        with seeded_global_rng(derive_seed(task.seed, "trust/answers", extra=draw)):
            answers.append(torch.cat(list(trial.logits())))
    changed = torch.stack([differ(answers[0], again) for again in answers[1:]]).any(dim=0)
    examples_of_class = task.data.y.cpu().bincount(minlength=task.num_classes)
    facts = {
        NATURAL: share(trial.correct),
        GUESS: int(examples_of_class.max()) / len(trial.correct),
        CHANGED: share(changed),
    }
    if changed.any():
        return facts
    noise = generator(task.seed, "trust/answers")
    batched = []
    remembered = []
    repeated = []
    images = batches(task.data, task.batch_size, task.device)
    for (x, _, _), clean in zip(images, answers[0].split(task.batch_size), strict=True):
        batched.append(differ(clean, trial.asked_anew(x, "clean images")))
        points = task.threat.random_start(x, noise)
        logits = trial.asked(points, "random points of the ball")
        remembered.append(differ(logits, trial.asked_anew(points, "random points of the ball")))
        repeated.append((logits - clean).abs().amax(dim=1) <= _EXACT * float(clean.abs().amax()))
    facts[BATCHED] = share(torch.cat(batched))
    facts[REPEATED] = share(torch.cat(repeated))
    facts[REMEMBERED] = share(torch.cat(remembered))
    if facts[BATCHED] > ZERO_GRADIENTS:
        # The copy is asked in other batches, so it says nothing more of a model whose answers depend on these.
        facts[REMEMBERED] = 0.0
    return facts


def slopes(trial: Trial) -> tuple[float, float]:
    """Two shares of the images: the gradient is not the slope of the logits; the logits are two numbers alone."""
    task = trial.task
    threat = task.threat
    noise = generator(task.seed, "trust/slopes")
    x = pixels(subset(task.data, _SLOPES).x.to(task.device))
    # All values of an image may move so far at once and stay within the first of _LENGTHS times the ball.
    longest = _LENGTHS[0] * float(threat.eps)
    if threat.norm == "l2":
        longest /= math.sqrt(x[0].numel())
    elif threat.norm == "l1":
        longest /= x[0].numel()
    low, high = threat.bounds
    points = threat.random_start(x, noise).clamp(low + longest, high - longest)
    logits = trial.asked(points, "random points of the ball")
    unrelated = share(_slope_errors(trial, points, logits, longest, noise) > _OFF)
    values = logits.sort(dim=1).values
    spread = values[:, -1:] - values[:, :1]
    rises = (values[:, 1:] - values[:, :-1]) > _EXACT * spread
    has_two_levels = rises.sum(dim=1) <= 1
    return unrelated, share(has_two_levels & (task.num_classes > 2))


def _slope_errors(trial: Trial, points: Tensor, logits: Tensor, longest: float, noise: torch.Generator) -> Tensor:
    """(N,) which share of how the margin moves the gradient does not explain, at the length of step where it is least.

    Args:
        points: (N, C, H, W) at which the model is asked, so far within the pixel range as the longest step is.
        logits: (N, C) of them.
        longest: step of each pixel.
        noise: of the directions.
    """
    task = trial.task
    first, second = logits.topk(2, dim=1).indices.unbind(1)
    leaf = points.clone().requires_grad_()
    with attack_mode(task.model), torch.enable_grad(), float32_as("fp32", task.device):
        slope = input_gradient(_margin(task.model(leaf), first, second).sum(), leaf).cpu().double()
    errors = torch.full((len(points),), torch.inf, dtype=torch.float64)
    for length in _LENGTHS:
        step = length / _LENGTHS[0] * longest
        wrong = torch.zeros(len(points), dtype=torch.float64)
        moved = torch.zeros(len(points), dtype=torch.float64)
        for _ in range(_DIRECTIONS):
            direction = torch.empty(points.shape).bernoulli_(0.5, generator=noise).mul_(2).sub_(1)
            way = step * direction.to(points.device)
            ahead = _margin(trial.asked(points + way, "points near them"), first, second)
            behind = _margin(trial.asked(points - way, "points near them"), first, second)
            expected = 2 * step * (slope * direction.double()).flatten(1).sum(dim=1)
            wrong += (ahead - behind - expected) ** 2
            moved += (ahead - behind) ** 2
        error = (wrong / moved.clamp_min(1e-300)).sqrt()
        error[wrong == 0] = 0.0  # nothing moves and nothing should: no error
        errors = torch.minimum(errors, error)
    return errors


def _margin(logits: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """(N,) float64, of (N, C) logits that at ``first`` above that at ``second``."""
    above = logits.gather(1, first.to(logits.device)[:, None]).squeeze(1).double()
    below = logits.gather(1, second.to(logits.device)[:, None]).squeeze(1).double()
    return above - below


def network(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Plain convolutions that halve the image until it is small, and two dense layers."""
    layers: list[nn.Module] = [nn.Conv2d(in_channels, _WIDTH, 3, padding=1), nn.ReLU()]
    side = min(image_size)
    while side > _SMALLEST:
        layers += [nn.Conv2d(_WIDTH, _WIDTH, 3, stride=2, padding=1), nn.ReLU()]
        side = (side + 1) // 2
    layers += [nn.Conv2d(_WIDTH, 2 * _WIDTH, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()]
    with torch.no_grad():
        size = nn.Sequential(*layers)(torch.zeros(1, in_channels, *image_size)).shape[1]
    return nn.Sequential(*layers, nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, num_classes))


def trained_surrogate(trial: Trial) -> nn.Module:
    """A network trained on the model's own labels: of the images, and of adversarial examples against itself.

    Labels alone are asked for, so neither one-hot answers nor logits that lie about margins mislead it; and since they
    are asked for around the very images on trial, what it learns there is the model's own decision.
    """
    task = trial.task
    images = pixels(task.data.x).cpu()
    if trial.more is not None:
        images = torch.cat([images, pixels(subset(trial.more, MORE).x).cpu()])
    with seeded_global_rng(derive_seed(task.seed, "trust/surrogate")):
        model = network(images.shape[1], (images.shape[2], images.shape[3]), task.num_classes).to(task.device)
    order = generator(task.seed, "trust/surrogate/order")
    noise = generator(task.seed, "trust/surrogate/start")
    answered = ImageData(images, labels_of(trial, images))
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y, _ in batches(answered, _BATCH, task.device, generator=order):
            x_adv = crafted(task.threat, model, x, y, noise)
            y_adv = labels_of(trial, x_adv).to(y.device)
            with torch.enable_grad():
                loss = functional.cross_entropy(model(torch.cat([x, x_adv])), torch.cat([y, y_adv]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def crafted(threat: ThreatModel, model: nn.Module, x: Tensor, y: Tensor, noise: torch.Generator) -> Tensor:
    """A few steps of PGD against the network that is trained."""
    with attack_mode(model):
        return gradient_ascent(
            model,
            x,
            lambda logits: functional.cross_entropy(logits, y, reduction="sum"),
            threat=threat,
            steps=_STEPS,
            step_size=float(threat.eps) / 2,
            start=threat.random_start(x, noise),
        )


def labels_of(trial: Trial, x: Tensor) -> Tensor:
    """(N,) int64 on the CPU: the classes that the model on trial says."""
    labels = []
    for part in x.split(trial.task.batch_size):
        logits = trial.asked(part.to(trial.task.device), "images near those on trial")
        labels.append(logits.argmax(dim=1))
    return torch.cat(labels)
