"""A registry that does not depend on what is installed, and data, a model and tasks that cost nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import NO_AUGMENTATION, Dataset, ImageData
from calfat_plugin.errors import CalfatError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.interfaces import LocalTask, TrainSettings
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.models.base import ImageClassifier
from calfat_plugin.recipe.document import Document
from calfat_plugin.registry import Registry
from calfat_plugin.threat import ThreatModel

CPU = torch.device("cpu")
NUM_CLASSES = 4
SIDE = 4
SETTINGS = TrainSettings(epochs=1, batch_size=4, learning_rate=0.1, momentum=0.9, weight_decay=1e-3, num_rounds=10)
THREAT: dict[str, Any] = {"eps": "0.1", "step_size": "0.04", "steps": 3}
_BALANCED = 322  # seed of the weights of ``balanced_model``
_SIDE = 8  # of its images: on smaller ones some attacks have nothing to try
THREATS: tuple[dict[str, Any], ...] = (  # one in each norm
    THREAT,
    {"norm": "l2", "eps": "0.3", "step_size": "0.12", "steps": 3},
    {"norm": "l1", "eps": "1", "step_size": "0.4", "steps": 3},
)


def require(condition: bool, what: str) -> None:
    """Hold a plugin to the contract, also where Python runs without assertions (``-O``)."""
    if not condition:
        raise AssertionError(what)


def builtin_registry(*plugins: Any) -> Registry:
    """The built-in plugins and ``plugins``, modules or objects with hooks, whatever else is installed.

    Raises:
        PluginError: one of them breaks the contract of hooks.
    """
    return Registry.load(entry_points=False, plugins=plugins)


class TinyModel(ImageClassifier):
    """A convolution and a linear layer; weights from ``seed``.

    Args:
        seed: of the initial weights; the global generator is not used.
        channels: of the convolution.
        side: of the images, (N, 1, side, side).
        classes: logits an image has.
        norm: whether batch normalisation follows the convolution.
    """

    @fresh_torch_state()
    def __init__(
        self, seed: int = 0, channels: int = 3, side: int = SIDE, classes: int = NUM_CLASSES, norm: bool = False
    ) -> None:
        layers: list[nn.Module] = [nn.Conv2d(1, channels, 3)]
        if norm:
            layers.append(nn.BatchNorm2d(channels))
        body = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
        super().__init__(body, nn.Linear(channels * (side - 2) ** 2, classes))
        stream = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=stream) * 0.5)


def build_tiny_model(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """``TinyModel`` as a recipe names it; weights from the global generator, as of every model."""
    model = TinyModel(side=image_size[0], classes=num_classes)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.reset_parameters()
    return model


@fresh_torch_state()
def tiny_images(seed: int = 0, count: int = 10, classes: int = NUM_CLASSES, side: int = SIDE) -> ImageData:
    """Random grey images with random labels: (count, 1, side, side) float32 in [0, 1], (count,) int64.

    Args:
        seed: of both.
        count: how many images.
        classes: labels are below it.
        side: of the images, in pixels.
    """
    stream = torch.Generator().manual_seed(seed + 1_000_003)
    images = torch.rand(count, 1, side, side, generator=stream)
    return ImageData(images, torch.randint(classes, (count,), generator=stream))


@fresh_torch_state()
def tiny_dataset() -> Dataset:
    """Thirty training and twelve test images of ``tiny_images``."""
    names = tuple(f"class {number}" for number in range(NUM_CLASSES))
    return Dataset("tiny", tiny_images(0, 30), tiny_images(1, 12), NUM_CLASSES, names)


def balanced_model() -> TinyModel:
    """A model with batch normalisation.

    It gives each class to two or more of the ``balanced_images``, and is certain of none.
    """
    return TinyModel(_BALANCED, side=_SIDE, norm=True)


def balanced_images() -> ImageData:
    """A dozen images for ``balanced_model``, with random labels."""
    return tiny_images(1, 12, side=_SIDE)


def answered(model: nn.Module) -> ImageData:
    """``balanced_images`` on the model's device, labelled by it in evaluation mode: so it is right everywhere."""
    images = balanced_images().to(next(model.parameters()).device)
    with torch.no_grad():
        return ImageData(images.x, model.eval()(images.x).argmax(dim=1))


@fresh_torch_state()
def tiny_task(model: nn.Module | None = None, data: ImageData | None = None, **others: Any) -> LocalTask:
    """One client's work in round 1.

    Args:
        model: default: a ``TinyModel``.
        data: default: ``tiny_images``.
        others: further fields of ``LocalTask``; None means what it would be without. Model and images go to its
            ``device``.
    """
    if model is None:
        model = TinyModel()
    if data is None:
        data = tiny_images()
    fields: dict[str, Any] = {
        "class_counts": torch.bincount(data.y, minlength=NUM_CLASSES),
        "threat": ThreatModel(**THREAT),
        "settings": SETTINGS,
        "augment": NO_AUGMENTATION,
        "device": CPU,
        "seed": 0,
        "round": 1,
        "client": 0,
    }
    fields |= {name: value for name, value in others.items() if value is not None}
    return LocalTask(model=model.to(fields["device"]), data=data.to(fields["device"]), **fields)


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether ``first`` and ``second`` have the same names and the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def tiny_experiment(registry: Registry | None, **sections: Any) -> Experiment:
    """A recipe of three clients and four rounds on tiny images, resolved.

    ``sections`` are values of its keys under ``calfat:``, and of sections of the host, such as ``train_args``.
    """
    train = {"client_num_in_total": 3, "comm_round": 4, "batch_size": 4, "learning_rate": 0.1}
    data: dict[str, Any] = {
        "data_args": {"dataset": "digits"},  # its images are never read: tiny ones stand in for them
        "model_args": {"model": f"{__name__}:build_tiny_model"},
        "train_args": train,
        "calfat": {"threat": dict(THREAT), "evaluators": ["natural"], "monitor": {"evaluators": ["natural"]}},
    }
    for name, value in sections.items():
        if name.endswith("_args"):
            data[name] |= value
        else:
            data["calfat"][name] = value
    if registry is None:
        registry = Registry.load()
    return assemble(Document("the check's recipe", data), registry)


def in_each_norm(registry: Registry | None, inner: Any = None, **sections: Any) -> Iterator[Experiment]:
    """``tiny_experiment`` with a budget in linf, l2 and l1 in turn, without those that a plugin's entry refuses."""
    for threat in THREATS:
        try:
            experiment = tiny_experiment(registry, threat={**threat, "inner": inner}, **sections)
        except CalfatError:
            continue
        yield experiment


def numpy_state() -> tuple[list[int], int]:
    """Where numpy's global generator is."""
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tolist(), state["pos"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch, and put the number back afterwards.

    A check passes a handful of tiny images through a tiny model, again and again. Several threads wait for one another
    at each step, on a busy machine for minutes; one thread needs seconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def unchanged(what: str, *tensors: Tensor) -> Iterator[None]:
    """Hold a plugin to leaving these tensors as they are."""
    before = [tensor.clone() for tensor in tensors]
    yield
    require(all(map(torch.equal, before, tensors)), f"{what} must not be changed in place.")
