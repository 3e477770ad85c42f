"""Common corruptions of small images, at five severities each.

Noise, blur, brightness and contrast have the strengths of CIFAR-10-C (Hendrycks and Dietterich 2019). Rotation and
translation go as far as Engstrom et al. (2019) do. What is random (noise, directions, places) is drawn once for the
severities of an image, so that a higher one is the same change, but more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from calfat_plugin.compat import make_torchvision_importable

if TYPE_CHECKING:
    from torch import Generator, Tensor

_GREY = 0.5  # of what occludes: neither the paper of digits nor their ink
_WIDEST_BLUR = 7  # pixels of the kernel: three standard deviations of the strongest blur to each side


class Corruption(NamedTuple):
    """A kind: what draws for (N, C, H, W) images and makes them of a strength, and those of severities 1 to 5."""

    prepare: Callable[[Tensor, Generator], Callable[[float], Tensor]]
    strengths: tuple[float, float, float, float, float]


def severities(kind: str, x: Tensor, noise: Generator) -> Iterator[Tensor]:
    """The images, (N, C, H, W) float in [0, 1], at severities 1 to 5 of a kind in ``CORRUPTIONS``."""
    corruption = CORRUPTIONS[kind]
    at = corruption.prepare(x, noise)
    yield from (at(strength).clamp(0.0, 1.0) for strength in corruption.strengths)


def _noise(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    drawn = x.new_empty(x.shape, device=noise.device).normal_(generator=noise).to(x.device)
    return lambda std: x + std * drawn


def _blur(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    kernel = [min(_WIDEST_BLUR, 2 * side - 1) for side in (x.shape[3], x.shape[2])]  # as far as an edge can be mirrored
    blurred = partial(_torchvision().gaussian_blur, x, kernel)
    return lambda std: blurred([std, std])


def _brightness(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    choice = _choice(2, x, noise)
    return lambda amount: _one_of((x + amount, x - amount), choice)


def _contrast(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    mean = x.mean(dim=(2, 3), keepdim=True)
    return lambda share: mean + share * (x - mean)


def _rotation(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    choice = _choice(2, x, noise)
    return lambda degrees: _one_of((_moved(x, angle=degrees), _moved(x, angle=-degrees)), choice)


def _translation(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    choice, (height, width) = _choice(4, x, noise), x.shape[2:]

    def at(share: float) -> Tensor:
        down, right = share * height, share * width
        ways = ((right, 0.0), (-right, 0.0), (0.0, down), (0.0, -down))
        return _one_of([_moved(x, translate=way) for way in ways], choice)

    return at


def _occlusion(x: Tensor, noise: Generator) -> Callable[[float], Tensor]:
    import torch

    place = torch.rand(2, len(x), generator=noise, device=noise.device).to(x.device)

    def within(length: int, side: int, place: Tensor) -> Tensor:
        """(N, length) bool: which lines of the image the square is on."""
        first = (place * (length - side + 1)).floor()[:, None]
        lines = torch.arange(length, device=x.device)
        return (lines >= first) & (lines < first + side)

    def at(share: float) -> Tensor:
        height, width = x.shape[2:]
        side = max(1, round(share * min(height, width)))
        rows, columns = within(height, side, place[0]), within(width, side, place[1])
        return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], _GREY)

    return at


def _moved(x: Tensor, *, angle: float = 0.0, translate: Sequence[float] = (0.0, 0.0)) -> Tensor:
    """Turned by degrees about its centre, moved by pixels to the right and down; what comes in is black."""
    from torchvision.transforms import InterpolationMode

    bilinear = InterpolationMode.BILINEAR
    moved: Tensor = _torchvision().affine(x, angle, list(translate), 1.0, [0.0, 0.0], interpolation=bilinear)
    return moved


def _choice(count: int, x: Tensor, noise: Generator) -> Tensor:
    """(N,) whole numbers below ``count``."""
    import torch

    return torch.randint(count, (len(x),), generator=noise, device=noise.device).to(x.device)


def _one_of(versions: Sequence[Tensor], choice: Tensor) -> Tensor:
    """Of each example, the version that was drawn for it."""
    import torch

    return torch.stack(tuple(versions))[choice, torch.arange(len(choice), device=choice.device)]


def _torchvision() -> Any:
    make_torchvision_importable()
    from torchvision.transforms.v2 import functional

    return functional


CORRUPTIONS: Mapping[str, Corruption] = {
    "noise": Corruption(_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),  # standard deviation of Gaussian noise
    "blur": Corruption(_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),  # standard deviation of a Gaussian kernel, in pixels
    "brightness": Corruption(_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),  # added to all values, or taken from them
    "contrast": Corruption(_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),  # share of the distance from the mean that is left
    "rotation": Corruption(_rotation, (6, 12, 18, 24, 30)),  # degrees, to either side
    "translation": Corruption(_translation, (0.02, 0.04, 0.06, 0.08, 0.1)),  # share of the side, in four directions
    "occlusion": Corruption(_occlusion, (0.125, 0.1875, 0.25, 0.3125, 0.375)),  # share of the side, of a grey square
}
