"""Networks that tests attack: weights in ``stored_models.npz``, so that no test depends on how a training ends.

From the root, ``python tests/stored_models.py`` trains them again, prints how good they are, and replaces the file. Its
last bits depend on the processor that trains; tests must pass with weights that differ a little (``--weight-noise``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.published import load_digits
from calfat_plugin.models.building import seeded
from calfat_plugin.models.networks import CNNSmall

FILE = Path(__file__).with_suffix(".npz")
NOISE = 1e-4  # of --weight-noise, relative; rounding differs by some 1e-7
USED = 10  # channels of cnn_small's 32, twice as many of its last 64: a small file, and robust enough


def small() -> nn.Module:
    return CNNSmall(in_channels=1, image_size=(8, 8), num_classes=10)


def colour() -> nn.Module:
    """For CIFAR's shape."""
    convolution = nn.Conv2d(3, 8, 5, stride=2, padding=2)
    return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 10))


#: Name to an untrained network of that shape.
SHAPES: dict[str, Callable[[], nn.Module]] = {"robust": small, "plain": small, "colour": colour}


def stored_model(name: str, noise: int | None = None) -> nn.Module:
    """The network in evaluation mode; with ``noise``, a seed, its weights are multiplied by 1 + ``NOISE`` * N(0, 1)."""
    model = SHAPES[name]()
    generator = None if noise is None else torch.Generator().manual_seed(noise)
    with np.load(FILE) as file, torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(torch.from_numpy(file[f"{name}/{key}"]))
            if generator is not None:
                tensor.mul_(1 + NOISE * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def painted(data: ImageData) -> ImageData:
    """Digits in the shape of CIFAR: (3, 32, 32), ink and paper of random colours."""
    generator = torch.Generator().manual_seed(0)
    large = nn.functional.interpolate(data.x, size=(32, 32), mode="bilinear", align_corners=False)
    ink, paper = 0.4 * torch.rand(2, len(data), 3, 1, 1, generator=generator)
    return ImageData(large * ink + (1 - large) * (1 - paper), data.y)


def main() -> None:
    """Train all, and replace the file."""
    digits = load_digits()
    grey, coloured = (digits.train, digits.test), (painted(digits.train), painted(digits.test))
    arrays = {}
    for name, (train, test), eps, epochs, learning_rate in (
        ("robust", grey, 0.1, 40, 0.1),
        ("plain", grey, 0.0, 6, 0.1),
        ("colour", coloured, 8 / 255, 30, 0.05),
    ):
        model = seeded(SHAPES[name], 0)
        if isinstance(model, CNNSmall):
            drop_unused_channels(model)
        train_robustly(model, train, eps=eps, epochs=epochs, learning_rate=learning_rate)
        x_adv = fgsm(model, test.x, test.y, 0.1 if train is digits.train else 8 / 255)
        shares = [float((model(x).argmax(dim=1) == test.y).float().mean()) for x in (test.x, x_adv)]
        print(f"{name}: {shares[0]:.3f} of the test images, {shares[1]:.3f} under FGSM")
        # Half precision is enough, and zeros of unused channels take no room.
        arrays |= {f"{name}/{key}": tensor.half().numpy() for key, tensor in model.state_dict().items()}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


def fgsm(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    clean = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(clean), y), clean)
    return (x + eps * grad.sign()).clamp(0, 1)


def train_robustly(model: nn.Module, data: ImageData, *, eps: float, epochs: int, learning_rate: float) -> None:
    """FGSM adversarial training, so that some examples withstand an attack and others do not.

    The attack grows from nothing to ``eps`` over the first half of the epochs, and gradients longer than 1 are
    shortened to 1, so no step ruins the network.
    """
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    for epoch in range(epochs):
        radius = eps * min(1.0, 2 * epoch / epochs)
        for where in torch.randperm(len(data), generator=generator).split(64):
            x, y = data.x[where], data.y[where]
            x_adv = fgsm(model, x, y, radius)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x_adv), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def drop_unused_channels(model: nn.Module) -> None:
    """Zeros for all but ``USED`` channels of cnn_small. They stay in training, since no gradient gets there."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        for layer in convolutions:
            layer.weight[USED * len(layer.weight) // 32 :] = 0
            layer.bias[USED * len(layer.weight) // 32 :] = 0
        for layer in (*convolutions[1:], model.classifier):
            layer.weight[:, USED * layer.weight.shape[1] // 32 :] = 0


if __name__ == "__main__":
    main()
