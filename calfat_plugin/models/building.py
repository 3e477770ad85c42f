"""Build a model from a seed, and from a user's own ``module:factory``; try it before it is used."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from calfat_plugin.errors import ModelError, did_you_mean
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.tied import refuse_overlaps
from calfat_plugin.peer_text import error_text

M = TypeVar("M", bound=nn.Module)


class ImageShape(Protocol):
    """What a model is built for."""

    @property
    def in_channels(self) -> int: ...
    @property
    def image_size(self) -> tuple[int, int]: ...  # (H, W)
    @property
    def num_classes(self) -> int: ...


def seeded(build: Callable[[], M], seed: int, *, weights_follow: bool = False) -> M:
    """Call ``build`` with torch's CPU generator at ``seed``, from which layers draw their weights; put it back after.

    Code that seeds torch by itself is refused, unless weights of a file will replace those that it draws.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build()
        if torch.default_generator.initial_seed() != seed and not weights_follow:
            raise ModelError("its code seeds torch by itself, so no seed of a run decides on its weights; remove that.")
        return model


def built_model(
    factory: Callable[..., object],
    who: str,
    in_channels: int,
    image_size: tuple[int, int],
    num_classes: int,
    **options: Any,
) -> nn.Module:
    """Build a model, and try it on two black images, which leaves it as it was; ``who``: as a message names it."""
    arguments = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes, **options}
    try:
        model = factory(**arguments)
    except TypeError as error:
        raise ModelError(f"{who}: calling it with {', '.join(arguments)} failed: {error}.") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{who}: it returned {type(model).__name__}; expected a torch.nn.Module.")
    shape = (2, in_channels, *image_size)
    images = torch.zeros(shape)
    images_given = images.clone()
    try:
        with torch.no_grad(), attack_mode(model), torch.random.fork_rng(devices=[]):
            logits = model(images_given)
    except Exception as error:  # somebody else's code may fail in any way
        raise ModelError(f"{who}: a forward pass on images of shape {shape} failed ({error_text(error)}).") from error
    expected = (2, num_classes)
    if not _has_shape(logits, expected):
        raise ModelError(f"{who}: images of shape {shape} gave {_shown(logits)}; expected logits of shape {expected}.")
    refuse_changed(images_given, images, who)
    refuse_overlaps(model, who)
    return model


def _has_shape(logits: object, shape: tuple[int, ...]) -> bool:
    return isinstance(logits, torch.Tensor) and tuple(logits.shape) == shape


def _shown(logits: object) -> str:
    """What a network gave, for a message."""
    if isinstance(logits, torch.Tensor):
        return str(tuple(logits.shape))
    return f"a {type(logits).__name__}"


def refuse_changed(images_given: torch.Tensor, images: torch.Tensor, who: str) -> None:
    """Refuse a network that wrote into its input: an attack would begin at other images than the clean ones.

    Args:
        images_given: a fresh copy of ``images``, which was the input.
        images: what the input was before.
        who: as a message names the network.
    """
    if images_given._version or not torch.equal(images_given, images):  # .data and numpy write without a new version
        raise ModelError(
            f"{who} changes its input in place, so an attack would begin at other images than it was given. Let it "
            "work on a copy: x = x - mean in place of x -= mean, x.clamp in place of x.clamp_, and a first layer that "
            "is not inplace=True."
        )


def refuse_other_training_mode(model: nn.Module, who: str, images: ImageShape) -> None:
    """Try, on a copy, whether a network also gives logits while it trains: some give auxiliary ones beside them."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"{who}: it returned a TorchScript module, which takes no hooks and so cannot be trained here. Return the "
            "torch.nn.Module that it was made of; `calfat.evaluate`, `attack` and `trust` take TorchScript."
        )
    try:
        trial = copy.deepcopy(model).train()
    except Exception:  # not every network can be copied; its first mini-batch then says what is wrong
        return
    shape = (2, images.in_channels, *images.image_size)
    black = torch.zeros(shape)
    black_given = black.clone()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = trial(black_given)
    except Exception as error:  # somebody else's code may fail in any way
        raise ModelError(
            f"{who}: a forward pass in training mode on images of shape {shape} failed ({type(error).__name__}: "
            f"{error}); in evaluation mode it does not."
        ) from error
    expected = (2, images.num_classes)
    if not _has_shape(logits, expected):
        raise ModelError(
            f"{who}: in training mode, images of shape {shape} gave {_shown(logits)}; expected logits of shape "
            f"{expected}, as in evaluation mode. Return the logits alone, or build it without auxiliary outputs "
            "(torchvision: aux_logits=False)."
        )
    refuse_changed(black_given, black, f"{who}: in training mode, it")


def factory_at(path: str) -> Callable[..., object]:
    """Import what ``package.module:factory`` names."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ModelError(f"model {path}: expected package.module:factory.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # somebody else's module may fail to import in any way
        raise ModelError(
            f"model {path}: module {module_name} cannot be imported "
            f"({error_text(error)}). Is it installed, or on PYTHONPATH?"
        ) from error
    factory: Callable[..., object] | None = getattr(module, name, None)
    if not callable(factory):
        callables = [other for other, value in vars(module).items() if callable(value)]
        raise ModelError(f"model {path}: {module_name} has no callable '{name}'.{did_you_mean(name, callables)}")
    return factory
