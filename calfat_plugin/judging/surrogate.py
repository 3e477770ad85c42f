"""A second network that learns what the model on trial answers around the images, and has gradients of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.data import ImageData, pixels
from calfat_plugin.evaluators.base import subset
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.maths.attacks import attack_mode, gradient_ascent
from calfat_plugin.seeds import derive_seed, generator

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial
    from calfat_plugin.threat import ThreatModel

EPOCHS = 10
MORE = 1000  # images beside those on trial
_BATCH = 64
_STEPS = 3  # of the attack in its training
_WIDTH = 16
_SMALLEST = 8  # pixels a side before the last layers
_LEARNING_RATE = 2e-3


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


def pool(trial: Trial) -> ImageData:
    """What the model is asked about: the images on trial, and some more."""
    x = pixels(trial.task.data.x).cpu()
    y = trial.task.data.y.cpu()
    if trial.more is None:
        return ImageData(x, y)
    more = subset(trial.more, MORE)
    return ImageData(torch.cat([x, pixels(more.x).cpu()]), torch.cat([y, more.y.cpu()]))


def trained_surrogate(trial: Trial) -> nn.Module:
    """A network trained on the model's own labels: of the images, and of adversarial examples against itself.

    Labels alone are asked for, so neither one-hot answers nor logits that lie about margins mislead it; and since they
    are asked for around the very images on trial, what it learns there is the model's own decision.
    """
    task = trial.task
    images = pool(trial).x
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
