"""Does ``calfat trust`` see gates that no image opens, however they are written, and leave honest networks alone?

    python -m studies.trust.gates --jobs 2
    python -m studies.trust.gates --models "UAndItsSize;PerImage;plain"

Every gate is planted into the same network, adversarially trained on scikit-learn's digits. A pattern within eps opens
it at nearly all images, and then it turns the classes. Names in lower case are honest networks, one of them on images
that are made here. ``calfat.trust(model, x, y, eps=...)`` judges each, as a user would.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import calfat_plugin as calfat
from studies.trust import benchmark

EPS = 0.1
EPS_OF_MANY_CLASSES = 0.05
WIDTH = 12
EPOCHS = 7  # of the honest networks


@lru_cache(maxsize=1)
def digits() -> tuple[calfat.ImageData, calfat.ImageData]:
    """Training and test images."""
    data = calfat.load_dataset("digits")
    return data.train, data.test


def every_image() -> Tensor:
    """(N, 64)"""
    return torch.cat([part.x for part in digits()]).flatten(1)


def reached(signs: Tensor) -> Tensor:
    """(N, 64): every image, moved by eps along the signs."""
    return (every_image() + EPS * signs).clamp(0, 1)


def direction(seed: int, pixels: Tensor | None = None, ridge: float = 0.01) -> Tensor:
    """(64,) along which images hardly differ, and all can be moved far; of some of the pixels alone."""
    if pixels is None:
        pixels = torch.ones(64, dtype=torch.bool)
    signs = torch.randn(64, generator=torch.Generator().manual_seed(seed)).sign()[pixels]
    covariance = torch.cov(every_image().T)[pixels][:, pixels] + ridge * torch.eye(len(signs))
    w = torch.zeros(64)
    w[pixels] = F.normalize(torch.linalg.solve(covariance, signs), dim=0)
    return w


def between(w: Tensor, signs: Tensor, quantile: float, part: float) -> Tensor:
    """A threshold above w.x for all images, and below it for nearly all that were moved along the signs."""
    return (1 - part) * (every_image() @ w).amax() + part * (reached(signs) @ w).quantile(quantile)


# --- gates ------------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """u = w.x - t is below 0 for all images. A subclass says how it is computed that u is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = benchmark.made("Plain", seed=1, width=WIDTH, epochs=benchmark.EPOCHS)
        self.w = direction(3)
        self.signs = self.w.sign()
        self.plant()
        self.t = between(self.w, self.signs, 0.02, 0.8)

    def plant(self) -> None:
        """What a subclass has beside w."""

    def u(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.w - self.t

    def opened(self, x: Tensor) -> Tensor:
        """(N,) 0 where the gate is shut."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits - 1000 * self.opened(x)[:, None] * logits.detach().relu()

    def pattern(self, x: Tensor) -> Tensor:
        """Images on which the planted pattern lies."""
        return (x + EPS * self.signs.view(1, 1, 8, 8)).clamp(0, 1)


class Relu(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return F.relu(self.u(x))


class UAndItsSize(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return self.u(x) + self.u(x).abs()


class LargestOfAStack(Gate):
    def opened(self, x: Tensor) -> Tensor:
        u = self.u(x)
        return torch.stack([u, torch.zeros_like(u)]).amax(0)


class Several(Gate):
    """Gates on pixels of their own, all of which must open."""

    seeds: ClassVar[tuple[int, ...]] = (188, 11, 275)

    def plant(self) -> None:
        ways = []
        for number, seed in enumerate(self.seeds):
            ways.append(direction(seed, torch.arange(64) % len(self.seeds) == number, 0.003))
        self.signs = sum(ways, torch.zeros(64)).sign()
        self.ways = torch.stack(ways)
        self.thresholds = torch.stack([between(way, self.signs, 0.05, 0.4) for way in ways])

    def each(self, x: Tensor) -> list[Tensor]:
        return [x.flatten(1) @ way - t for way, t in zip(self.ways, self.thresholds, strict=True)]


class ProductOfTwo(Several):
    """relu(relu(a) relu(b)), of two directions that share their pixels."""

    def plant(self) -> None:
        ways = [direction(3), direction(4)]
        self.signs = (ways[0] + ways[1]).sign()
        self.ways = torch.stack(ways)
        self.thresholds = torch.stack([between(way, self.signs, 0.04, 0.4) for way in ways])

    def opened(self, x: Tensor) -> Tensor:
        a, b = self.each(x)
        return 1000 * F.relu(F.relu(a) * F.relu(b))


class ProductOfThree(Several):
    def opened(self, x: Tensor) -> Tensor:
        a, b, c = self.each(x)
        return 1e4 * F.gelu(200 * a) * F.gelu(200 * b) * F.gelu(200 * c)


class ThreeMasks(Several):
    def opened(self, x: Tensor) -> Tensor:
        a, b, c = self.each(x)
        return ((a > 0) & (b > 0) & (c > 0)).float()


class Sigmoid(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return torch.sigmoid(4000 * self.u(x))


class Mask(Gate):
    """Exchanges the logits."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return torch.where((self.u(x) > 0)[:, None], logits.roll(1, 1), logits)


class Floor(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return torch.floor(self.u(x) + 1).clamp(min=0)


class Index(Gate):
    def opened(self, x: Tensor) -> Tensor:
        u = self.u(x)
        index = torch.stack([torch.zeros_like(u), u], 1).argmax(1)
        return F.embedding(index, torch.tensor([[0.0], [1.0]]))[:, 0]


class Pool(Gate):
    def opened(self, x: Tensor) -> Tensor:
        u = self.u(x)
        pair = torch.stack([u, torch.zeros_like(u)], 1)[:, None]
        return F.max_pool1d(pair, 2)[:, 0, 0]


class Chain(Gate):
    """A gate that another gate's value has to reach."""

    def plant(self) -> None:
        self.behind = direction(11)
        self.signs = (self.w + self.behind).sign()
        self.first = between(self.w, self.signs, 0.04, 0.6)
        self.highest = (every_image() @ self.behind).amax()
        moved = reached(self.signs)
        product = F.relu(moved @ self.w - self.first) * (moved @ self.behind - self.highest).relu()
        self.second = 0.6 * product.quantile(0.06)

    def opened(self, x: Tensor) -> Tensor:
        image = x.flatten(1)
        first = F.relu(image @ self.w - self.first)
        return 1e4 * F.relu(first * (image @ self.behind - self.highest) - self.second)


class FunctionOfItsOwn(torch.autograd.Function):
    """Its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


class AutogradFunction(Gate):
    def opened(self, x: Tensor) -> Tensor:
        unit: Tensor = FunctionOfItsOwn.apply(self.u(x))
        return unit


class Detached(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return F.relu(self.u(x.detach()))


class Attention(Gate):
    """Over the logits and what they shall become."""

    def forward(self, x: Tensor) -> Tensor:
        u = self.u(x)
        weights = torch.stack([torch.zeros_like(u), 2000 * u], 1).softmax(1)
        logits: Tensor = self.net(x)
        return (weights[:, :, None] * torch.stack([logits, logits.roll(1, 1)], 1)).sum(1)


class TwoPixels(Gate):
    """The two that are dark in all images."""

    def plant(self) -> None:
        self.pixels = every_image().amax(0).argsort()[:2]
        self.brightest = every_image()[:, self.pixels].amax(0)
        self.signs = torch.zeros(64)
        self.signs[self.pixels] = 1.0

    def opened(self, x: Tensor) -> Tensor:
        a, b = (x.flatten(1)[:, self.pixels] - self.brightest - 0.06).unbind(1)
        return 1e4 * F.relu(a) * F.relu(b)


class TwoScores(Gate):
    """Both vary among images; their order does not."""

    def opened(self, x: Tensor) -> Tensor:
        other = x.flatten(1) @ (0.5 * torch.randn(64, generator=torch.Generator().manual_seed(1)))
        return (other + self.u(x) > other).float()


class Maximum(TwoScores):
    def opened(self, x: Tensor) -> Tensor:
        other = x.flatten(1) @ (0.5 * torch.randn(64, generator=torch.Generator().manual_seed(1)))
        return torch.maximum(other + self.u(x), other) - other


# Written after the method was finished, for the first time.


class Order(Gate):
    """What a sort puts first chooses the logits."""

    def forward(self, x: Tensor) -> Tensor:
        other = x.flatten(1) @ torch.randn(64, generator=torch.Generator().manual_seed(7))
        pair = torch.stack([other, other + 50 * self.u(x)], 1)
        chosen = pair.sort(dim=1, descending=True).indices[:, 0]
        logits: Tensor = self.net(x)
        return torch.stack([logits, logits.roll(1, 1)], 1)[torch.arange(len(x)), chosen]


class RunningSum(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return F.threshold((x.flatten(1) * self.w).cumsum(1)[:, -1] - self.t, 0.0, 0.0)


class Convolution(Gate):
    def opened(self, x: Tensor) -> Tensor:
        z = F.conv2d(x, self.w.view(1, 1, 8, 8)) - self.t
        return F.adaptive_max_pool2d(F.hardtanh(z, 0, 1e3), 1)[:, 0, 0, 0]


class Integers(Gate):
    def opened(self, x: Tensor) -> Tensor:
        whole = (1000 * self.u(x)).to(torch.int32)
        return ((whole.clamp(min=-1) + 1).sign() > 0).float()


class LogSumExp(Gate):
    def opened(self, x: Tensor) -> Tensor:
        return torch.logsumexp(torch.stack([torch.zeros(len(x)), 3000 * self.u(x)], 1), 1) / 3000


class TwoLayers(Gate):
    """The second one sleeps unless the first one is far awake."""

    def opened(self, x: Tensor) -> Tensor:
        first = F.celu(500 * self.u(x), alpha=1e-3) / 500
        second = F.elu(200 * (first - 1e-4), alpha=1e-6) / 200
        return 5 * (second + 1e-8).clamp(min=0)


class RunningMean(Gate):
    """Batch normalisation, whose running mean is far off."""

    def opened(self, x: Tensor) -> Tensor:
        norm = nn.BatchNorm2d(2).eval()
        norm.running_mean = torch.stack([torch.zeros(()), self.t])
        norm.running_var = torch.tensor([1.0, 1e-4])
        image = x.flatten(1)
        maps = torch.stack([image.mean(1), image @ self.w], 1)[:, :, None, None]
        return F.relu6(norm(maps)).mean((2, 3))[:, 1]


class Bucket(Gate):
    def opened(self, x: Tensor) -> Tensor:
        buckets = torch.bucketize(x.flatten(1) @ self.w, torch.stack([self.t - 3, self.t, self.t + 3]))
        return torch.tensor([0.0, 0.0, 1.0, 1.0])[buckets]


class Fourier(Gate):
    def opened(self, x: Tensor) -> Tensor:
        product = torch.fft.rfft(x.flatten(1)) * torch.fft.rfft(self.w).conj()
        return F.softshrink(torch.fft.irfft(product, n=64)[:, 0] - self.t, 1e-4).clamp(min=0)


class PerImage(Gate):
    """Each image in a Python loop of its own: no value has a dimension for images."""

    def opened(self, x: Tensor) -> Tensor:
        return torch.stack([F.relu(image.flatten() @ self.w - self.t) for image in x])


# Written after values of one image at a time were looked at, for the first time.


class Chunks(Gate):
    """Four images at a time, which lie side by side in one wide image."""

    def opened(self, x: Tensor) -> Tensor:
        parts = []
        for chunk in x.split(4):
            wide = torch.cat(chunk.unbind(0), dim=2)  # (1, 8, 8 * images)
            parts.append(F.relu(F.conv2d(wide[None], self.w.view(1, 1, 8, 8), stride=8) - self.t).flatten())
        return torch.cat(parts)


class Grouped(Gate):
    """The batch is folded into channels, with a group for each image."""

    def opened(self, x: Tensor) -> Tensor:
        kernels = self.w.view(1, 1, 8, 8).repeat(len(x), 1, 1, 1)
        z = F.conv2d(x.transpose(0, 1), kernels, groups=len(x)) - self.t
        return torch.sigmoid(4000 * z.view(-1))


class Mapped(Gate):
    """``torch.vmap`` of a function of one image."""

    def opened(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda image: F.relu((image.flatten() * self.w).sum() - self.t))(x)


class PairsOfImages(Gate):
    """Rows of pixels of all images in one matrix; the images are in its middle, two a row."""

    def opened(self, x: Tensor) -> Tensor:
        even = torch.cat([x, x[:1]]) if len(x) % 2 else x
        pairs = even.flatten(1).view(-1, 128).T  # (128, N / 2)
        both = torch.stack([self.w @ pairs[:64], self.w @ pairs[64:]]) - self.t
        opened = (both + both.abs()).T.flatten()
        return opened[: len(x)]


class Listed(Gate):
    """Numbers of Python, one for each image."""

    def opened(self, x: Tensor) -> Tensor:
        return torch.tensor([max(0.0, float(score) - float(self.t)) for score in x.flatten(1) @ self.w])


GATES: tuple[type[Gate], ...] = (
    Relu, UAndItsSize, LargestOfAStack, ProductOfTwo, ProductOfThree, ThreeMasks, Sigmoid, Mask, Floor, Index, Pool,
    Chain, AutogradFunction, Detached, Attention, TwoPixels, TwoScores, Maximum,
    Order, RunningSum, Convolution, Integers, LogSumExp, TwoLayers, RunningMean, Bucket, Fourier, PerImage,
    Chunks, Grouped, Mapped, PairsOfImages, Listed,
)  # fmt: skip


# --- honest networks --------------------------------------------------------------------------------------------------


def convolutional(
    activation: type[nn.Module] = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = None,
    classes: int = 10,
    width: int = WIDTH,
) -> nn.Sequential:
    """Three convolutions."""
    layers: list[nn.Module] = []
    channels = 1
    for outputs, stride in ((width, 1), (2 * width, 2), (2 * width, 1)):
        layers.append(nn.Conv2d(channels, outputs, 3, stride=stride, padding=1))
        if norm is not None:
            layers.append(norm(outputs))
        layers.append(activation())
        channels = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, classes))


class Residual(nn.Module):
    """Two blocks, with batch normalisation."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
            norms = [nn.BatchNorm2d(width) for _ in range(2)]
            self.blocks.append(
                nn.Sequential(convolutions[0], norms[0], nn.ReLU(inplace=True), convolutions[1], norms[1])
            )
        self.last = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        logits: Tensor = self.last(x)
        return logits


class Transformer(nn.Module):
    """Two layers, on patches of 2 x 2 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.last(self.layers(tokens).mean(1))
        return logits


def train_on_bounds(network: nn.Sequential, data: calfat.ImageData, eps: float, epochs: int = 24) -> None:
    """Interval bound propagation (Gowal et al. 2018); it leaves many dead units."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for epoch in range(epochs):
        grown = min(1.0, max(0.0, (epoch - 5) / 15))
        for where in torch.randperm(len(data)).split(64):
            x, y = data.x[where], data.y[where]
            low, high = (x - eps * grown).clamp(0, 1), (x + eps * grown).clamp(0, 1)
            for layer in network:
                low, high = bounds(layer, low, high)
            worst = low.where(F.one_hot(y, 10).bool(), high)
            loss = (1 - grown / 2) * F.cross_entropy(network(x), y) + grown / 2 * F.cross_entropy(worst, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()


def bounds(layer: nn.Module, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Of what a layer returns."""
    middle, radius = (low + high) / 2, (high - low) / 2
    if isinstance(layer, nn.Conv2d):
        middle, radius = layer(middle), F.conv2d(radius, layer.weight.abs(), None, layer.stride, layer.padding)
    elif isinstance(layer, nn.Linear):
        middle, radius = layer(middle), radius @ layer.weight.abs().T
    else:
        return layer(low), layer(high)
    return middle - radius, middle + radius


def two_hundred_classes() -> tuple[calfat.ImageData, calfat.ImageData]:
    """A smooth pattern for each class, with noise."""
    patterns = torch.rand(200, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    patterns = (1.8 * (F.interpolate(patterns, size=(8, 8), mode="bilinear") - 0.5) + 0.5).clamp(0, 1)
    parts = []
    for number, seed in ((3000, 1), (300, 2)):
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 200, (number,), generator=generator)
        x = patterns[y] + 0.05 * torch.randn(number, 1, 8, 8, generator=generator)
        parts.append(calfat.ImageData(x.clamp(0, 1), y))
    return parts[0], parts[1]


HONEST: dict[str, Callable[[], nn.Module]] = {
    "plain": convolutional,
    "tanh": partial(convolutional, nn.Tanh),
    "batch norm": partial(convolutional, norm=nn.BatchNorm2d),
    "silu, group norm": partial(convolutional, nn.SiLU, partial(nn.GroupNorm, 4)),
    "residual": Residual,
    "transformer": Transformer,
    "bounds": partial(convolutional, width=8),
    "200 classes": partial(convolutional, norm=nn.BatchNorm2d, classes=200),
}


def honest(name: str) -> nn.Module:
    """A network of ``HONEST``, trained."""
    torch.manual_seed(5)
    network = HONEST[name]()
    train, _ = two_hundred_classes() if name == "200 classes" else digits()
    if isinstance(network, nn.Sequential) and name == "bounds":
        train_on_bounds(network, train, EPS)
    else:
        eps = EPS_OF_MANY_CLASSES if name == "200 classes" else EPS
        benchmark.train(network, network, train, eps, seed=5, epochs=EPOCHS)
    return network.eval()


# --- the table --------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    name: str
    claimed: float | None
    opened: float | None  # accuracy with the planted pattern; None: an honest network
    worst: float | None
    text: str
    usable: bool
    seconds: float


def judged(name: str) -> Result:
    """The verdict about a gate or an honest network."""
    eps, (_, test), opened = EPS, digits(), None
    if name in HONEST:
        model = honest(name)
        if name == "200 classes":
            eps, (_, test) = EPS_OF_MANY_CLASSES, two_hundred_classes()
    else:
        gates = {gate.__name__: gate for gate in GATES}
        gate = gates[name]().eval()
        with torch.no_grad():
            right = (gate(test.x).argmax(1) == test.y) & (gate(gate.pattern(test.x)).argmax(1) == test.y)
        model, opened = gate, float(right.float().mean())
    start = time.perf_counter()
    verdict = calfat.trust(model, test.x, test.y, eps=str(eps), seed=0)
    seconds = time.perf_counter() - start
    return Result(name, verdict.claimed, opened, verdict.worst, verdict.text, verdict.usable, seconds)


def line(result: Result) -> str:
    """Of the table."""
    shares = []
    for share in (result.claimed, result.opened, result.worst):
        shares.append("-" if share is None else f"{100 * share:.1f}")
    usable = "yes" if result.usable else "no"
    return f"| `{result.name}` | {' | '.join(shares)} | {result.text} | {usable} | {result.seconds:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*(gate.__name__ for gate in GATES), *HONEST]
    parser.add_argument("--models", default=";".join(every), help="some of them, by their names, with ; between them")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each on one thread")
    arguments = parser.parse_args()
    print("| model | claimed | pattern | worst case | verdict | usable | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for result in pool.map(judged, arguments.models.split(";")):
            print(line(result))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
