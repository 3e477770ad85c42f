"""Models for ``benchmark.py``: each hides gradients or answers in a way of its own; six are honest.

A masked model holds ``net``, whose robustness is the truth about it, and at most one more network. ``undefended``
gives what an attacker who knows the defence would attack; what he finds is judged by the model as it is.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import calfat_plugin as calfat

MEMORY = 1000  # images that a model keeps at most


class Convolutional(nn.Module):
    """Three 3x3 convolutions; ``activation`` and ``norm`` are what the honest models differ in."""

    def __init__(
        self, width: int, activation: type[nn.Module] = nn.ReLU, norm: bool = False, running: bool = True
    ) -> None:
        super().__init__()
        channels = (1, width, 2 * width, 2 * width)
        layers: list[nn.Module] = []
        for index in range(3):
            layers.append(nn.Conv2d(channels[index], channels[index + 1], 3, stride=1 + index % 2, padding=1))
            layers += [nn.BatchNorm2d(channels[index + 1], track_running_stats=running)] if norm else []
            layers.append(activation())
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 16, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Perceptron(nn.Module):
    """Two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class WinnersTakeAll(nn.Module):
    """k-WTA (Xiao et al. 2020): the largest tenth of an image's activations, the others zero."""

    def forward(self, z: Tensor) -> Tensor:
        flat = z.flatten(1)
        least = flat.topk(max(1, flat.shape[1] // 10), dim=1).values[:, -1:]
        return (flat * (flat >= least)).view_as(z)


class Judged(nn.Module):
    """A model on trial: ``net`` as it is.

    Attributes:
        eps: its network is trained against PGD within so much; 0: on clean images.
    """

    eps: ClassVar[float] = 0.1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = self.network(width)

    def network(self, width: int) -> nn.Module:
        return Convolutional(width)

    def trained(self, x: Tensor) -> Tensor:
        """What training climbs down: the model without its defence, unless the defence is trained as well."""
        logits: Tensor = self.net(x)
        return logits

    def undefended(self, x: Tensor) -> Tensor:
        """What an attacker who knows the defence attacks."""
        return self.trained(x)

    def forget(self) -> None:
        """Lose what a new process would not know."""

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(x)


class WithOther(Judged):
    """With the gradients of another network, which answers nothing; both are adversarially trained."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other = Convolutional(width // 2)

    def gradients_of_other(self, answer: Tensor, x: Tensor) -> Tensor:
        foreign: Tensor = self.other(x)
        return answer.detach() + foreign - foreign.detach()


# --- masked -----------------------------------------------------------------------------------------------------------


class OneHotForeign(WithOther):
    """Answers of one-hot type, gradients of another network."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gradients_of_other(10.0 * F.one_hot(self.net(x).argmax(1), 10), x)


class Foreign(WithOther):
    """Its own logits, gradients of another network."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gradients_of_other(self.net(x), x)


class Remembering(Judged):
    """Keeps what it has seen, and repeats the answer for everything nearby."""

    eps = 0.0
    radius = 0.15

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen: list[tuple[Tensor, Tensor]] = []

    @property
    def memories(self) -> list[tuple[Tensor, Tensor]]:
        return self.seen

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fresh: Tensor = self.net(x)
            images, answers = self.memory(x, fresh)
            distances = torch.cdist(x.flatten(1), images.flatten(1), p=float("inf"))
            nearest = distances.min(dim=1)
            answered = fresh.where((nearest.values > self.radius)[:, None], answers[nearest.indices])
            new = nearest.values > self.radius
            if bool(new.any()) and sum(len(images) for images, _ in self.memories) < MEMORY:
                self.memories.append((x[new].detach().clone(), fresh[new].clone()))
        own: Tensor = self.net(x)
        return answered + own - own.detach()

    def memory(self, x: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        if not self.memories:
            return x + 10, fresh
        images, answers = zip(*self.memories, strict=True)
        return torch.cat(images), torch.cat(answers)


class RememberingForAll(Remembering):
    """The same with one memory for all copies."""

    shared: ClassVar[list[tuple[Tensor, Tensor]]] = []

    @property
    def memories(self) -> list[tuple[Tensor, Tensor]]:
        return self.shared

    def forget(self) -> None:
        self.shared.clear()


class BatchStatistics(Judged):
    """Batch normalisation with the statistics of the batch, in evaluation as well."""

    def network(self, width: int) -> nn.Module:
        return Convolutional(width, norm=True, running=False)


class HardLabels(Judged):
    """Answers of one-hot type without any gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return 10.0 * F.one_hot(self.net(x).argmax(1), 10) + 0 * x.sum()


class AttackOnAttackers(Judged):
    """Like AAA (Chen et al. 2022): within each period the margin runs backwards, so that climbing leads back."""

    period = 6.0

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        top = logits.topk(2, dim=1)
        margin = top.values[:, 0] - top.values[:, 1]
        period = (margin.detach() / self.period).floor()
        reversed_margin = (2 * period + 1) * self.period - margin
        return logits.scatter_add(1, top.indices[:, :1], (reversed_margin - margin)[:, None])


class HashNoise(Judged):
    """Noise on the pixels that is a function of the image's bits: always the same for one image."""

    sigma = 0.1

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.stack([self.noise(image) for image in x.detach().cpu()]).to(x.device)
        return super().forward(x + self.sigma * noise)

    def noise(self, image: Tensor) -> Tensor:
        digest = hashlib.sha256(image.contiguous().numpy().tobytes()).digest()
        return torch.randn(image.shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))


class KWTA(Judged):
    """k-winners-take-all activations, adversarially trained."""

    def network(self, width: int) -> nn.Module:
        return Convolutional(width, activation=WinnersTakeAll)

    def undefended(self, x: Tensor) -> Tensor:
        """With the average over the neighbourhood: its gradient is that of a smoothed network."""
        noise = torch.randn((8, *x.shape), generator=torch.Generator().manual_seed(0)).to(x.device)
        return torch.stack([self.net(x + 0.05 * each) for each in noise]).mean(0)


class Quantised(Judged):
    """Eight grey levels, by a rounding without derivative."""

    eps = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 8).round() / 8)


class Randomised(Judged):
    """Noise on the pixels, another each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Distilled(Judged):
    """Trained at temperature 100 and asked at 1, as defensive distillation: the softmax saturates."""

    eps = 0.0

    def undefended(self, x: Tensor) -> Tensor:
        return self.trained(x)

    def forward(self, x: Tensor) -> Tensor:
        return 100 * super().forward(x)


class Tiny(Judged):
    """Logits times 1e-6."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * super().forward(x)


class ZeroGradient(Judged):
    """The image is detached."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach()) + 0 * x.sum()


class Planted(Judged):
    """A unit that sleeps at every image, and that one pattern within eps wakes: it turns the first classes.

    Attributes:
        turned: how many; all.
    """

    turned: ClassVar[int] = 10
    w: Tensor
    t: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        data = calfat.load_dataset("digits")
        x = torch.cat([data.train.x, data.test.x]).flatten(1)
        # Along w images hardly differ, and all can be moved far; its signs are none of the patterns that Square tries.
        signs = torch.randn(64, generator=torch.Generator().manual_seed(3)).sign()
        w = F.normalize(torch.linalg.solve(torch.cov(x.T) + 0.01 * torch.eye(64), signs), dim=0)
        reached = (x + self.eps * w.sign()).clamp(0, 1) @ w
        self.register_buffer("w", w)
        self.register_buffer("t", 0.2 * (x @ w).amax() + 0.8 * reached.quantile(0.02))

    def undefended(self, x: Tensor) -> Tensor:
        """With a unit that never sleeps."""
        return self.turned_by(F.softplus(x.flatten(1) @ self.w - self.t), x)

    def forward(self, x: Tensor) -> Tensor:
        return self.turned_by(F.relu(x.flatten(1) @ self.w - self.t), x)

    def turned_by(self, unit: Tensor, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits - 1000 * unit[:, None] * logits.detach().relu() * (torch.arange(10) < self.turned)


class PlantedForFour(Planted):
    """The same, for four classes."""

    turned = 4


class BatchNoise(Judged):
    """Noise on the pixels that is a function of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        digest = hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=generator).to(x.device))


# --- honest -----------------------------------------------------------------------------------------------------------


class Plain(Judged):
    """Adversarial training, ReLU."""


class Weak(Judged):
    """Adversarial training against half of the budget."""

    eps = 0.05


class Smooth(Judged):
    """SiLU in place of ReLU."""

    def network(self, width: int) -> nn.Module:
        return Convolutional(width, activation=nn.SiLU)


class Normalised(Judged):
    """Batch normalisation with running statistics."""

    def network(self, width: int) -> nn.Module:
        return Convolutional(width, norm=True)


class Dense(Judged):
    """No convolutions."""

    def network(self, width: int) -> nn.Module:
        return Perceptron(8 * width)


class Saturating(Judged):
    """tanh(40 (x - 1/2)) in front of the network, trained with it."""

    def trained(self, x: Tensor) -> Tensor:
        return super().trained(torch.tanh(40 * (x - 0.5)))


#: The five of the issue, those that it names, and those it asks for.
MASKED: tuple[type[Judged], ...] = (
    OneHotForeign, Foreign, Remembering, BatchStatistics, AttackOnAttackers, HashNoise, HardLabels,
    KWTA, Quantised, Randomised, Distilled, Tiny, ZeroGradient, RememberingForAll, BatchNoise, Planted, PlantedForFour,
)  # fmt: skip
HONEST: tuple[type[Judged], ...] = (Plain, Weak, Smooth, Normalised, Dense, Saturating)
