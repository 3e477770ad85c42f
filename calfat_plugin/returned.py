"""What plugins do wrong, worded for the plugin's author: checks of the values that they return, and their exceptions.

Checks look at types, shapes, names, and numbers that are on the CPU. No check looks at the values of a tensor that may
be on a GPU, because each look makes the program wait for it.

``what`` says which call returned the value, in the words that begin the message: ``combine returned``. What is wrong is
a ``PluginError``; ``attribute_errors_to`` puts the name of the plugin in front of it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.data import check_pixels
from calfat_plugin.errors import DataError, PluginError, did_you_mean, listed, one_line
from calfat_plugin.peer_text import printable

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_ROUNDING = 1e-6  # of a sum of shares
_SHOWN_CHARACTERS = 60  # of a value in a message


def described(value: object) -> str:
    """A value in a message: ``a tensor of shape (8, 3)``, ``a dict``, ``nothing (None)``."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(getattr(value, "shape", None), tuple):
        return one_line(value)
    name = _with_article(type(value).__name__)
    if isinstance(value, int | float | str):
        text = f" ({value!r})"
        return name + text[:_SHOWN_CHARACTERS]
    return name


def _with_article(name: str) -> str:
    if name[0].lower() in "aeiou":
        return f"an {name}"
    return f"a {name}"


# --- objects and mappings ---------------------------------------------------------------------------------------------


def instance(value: Any, expected: Callable[..., T], what: str, hint: str = "") -> T:
    """Return ``value`` if it is an instance of the class ``expected``; ``hint`` ends the message otherwise."""
    assert isinstance(expected, type)  # a Callable for the type checker, which refuses abstract classes as type[T]
    if not isinstance(value, expected):
        text = f"{what} {described(value)}; expected {_with_article(expected.__name__)}."
        if hint:
            text = f"{text} {hint}"
        raise PluginError(text)
    return cast("T", value)


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """Return ``value`` if it is a mapping."""
    if not isinstance(value, Mapping):
        raise PluginError(f"{what} {described(value)}; expected a mapping.")
    return value


# --- tensors ----------------------------------------------------------------------------------------------------------


def loss(value: Any, what: str) -> Tensor:
    """Return ``value`` if it can be minimised or climbed: one number, a tensor of shape ()."""
    from torch import Tensor

    if not isinstance(value, Tensor) or value.shape != ():
        raise PluginError(f"{what} {described(value)}; expected one number, a tensor of shape ().")
    return value


def like(value: Any, template: Tensor, what: str) -> Tensor:
    """Return ``value`` if it is a tensor with the shape, dtype and device of ``template``."""
    from torch import Tensor

    if not isinstance(value, Tensor) or value.shape != template.shape:
        raise PluginError(f"{what} {described(value)}; expected a tensor of shape {tuple(template.shape)}.")
    if value.dtype != template.dtype:
        raise PluginError(f"{what} a tensor of dtype {value.dtype}; expected {template.dtype}.")
    if value.device != template.device:
        raise PluginError(f"{what} a tensor of device {value.device}; expected {template.device}.")
    return value


def rows(value: Any, count: int, what: str) -> Tensor:
    """Return ``value`` if it says which of ``count`` rows: a tensor of shape (count,) and type bool, on any device."""
    import torch

    expected = f"expected a tensor of shape ({count},) and type torch.bool"
    if not isinstance(value, torch.Tensor):
        raise PluginError(f"{what} {described(value)}; {expected}.")
    if value.shape != (count,) or value.dtype != torch.bool:
        raise PluginError(f"{what} {described(value)} and type {value.dtype}; {expected}.")
    return value


def tensors(value: Any, what: str, *, on: str = "") -> Mapping[str, Tensor]:
    """Return ``value`` if it is a flat mapping from text to tensor.

    ``on`` is the type of device that all tensors must be on, such as ``cpu``; empty: any.
    """
    from torch import Tensor

    by_name = mapping(value, what)
    for name, tensor in by_name.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise PluginError(f"{what} {described(tensor)} under {name!r}; expected tensors, each under a text.")
        if on and tensor.device.type != on:
            raise PluginError(f"{what} a tensor on {tensor.device} under '{name}'; expected it on the {on}.")
    return by_name


def examples(value: Any, original: ImageData, num_classes: int, what: str) -> ImageData:
    """Return ``value`` if it is images and labels to train on in the place of ``original``.

    The one check that looks at values on a GPU: it runs once a round, for clients that attack.
    """
    data = instance(value, ImageData, what)
    if not len(data) or data.x.shape[1:] != original.x.shape[1:]:
        raise PluginError(f"{what} images {tuple(data.x.shape)}; expected one or more like {tuple(original.x.shape)}.")
    device = original.x.device
    if data.x.device != device or data.y.device != device:
        raise PluginError(f"{what} images on {data.x.device}, labels on {data.y.device}; expected {device}.")
    try:
        check_pixels(data)
    except DataError as error:
        raise PluginError(f"{what} images whose {error}") from None
    low = int(data.y.min())
    high = int(data.y.max())
    if low < 0 or high >= num_classes:
        raise PluginError(f"{what} labels from {low} to {high}; expected 0 to {num_classes - 1}.")
    return data


# --- names and numbers ------------------------------------------------------------------------------------------------


def names(value: Any, known: Collection[str], what: str) -> frozenset[str]:
    """Return ``value`` as a set if it holds some of these names of a model's tensors."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise PluginError(f"{what} {described(value)}; expected names of the model's tensors.")
    for name in value:
        if not isinstance(name, str) or name not in known:
            raise PluginError(f"{what} {name!r}, which is no tensor of the model.{did_you_mean(str(name), known)}")
    return frozenset(value)


def shares(value: Any, clients: Collection[int], what: str) -> dict[int, float]:
    """Return ``value`` as floats if it gives these clients shares that sum to 1; it may also be empty."""
    by_client = mapping(value, what)
    for client, share in by_client.items():
        is_share = isinstance(share, int | float) and math.isfinite(share) and share >= 0
        if not is_share or client not in clients:
            raise PluginError(
                f"{what} {described(share)} for client {client!r}; expected shares, from 0 to 1, of clients of the "
                "round."
            )
    total = math.fsum(by_client.values())
    if by_client and abs(total - 1) > _ROUNDING:
        raise PluginError(f"{what} shares that sum to {total:.6g}; expected 1. Divide each by their sum.")
    return {client: float(share) for client, share in by_client.items()}


def metrics(value: Any, declared: Mapping[str, str], what: str, also: Collection[str] = ()) -> dict[str, float]:
    """Return ``value`` as floats if its names are declared by the plugin's entry.

    ``also`` are the names of numbers that the package itself adds.
    """
    by_name = mapping(value, what)
    for name, number in by_name.items():
        if name not in declared and name not in also:
            raise PluginError(
                f"{what} {name!r}, which its entry does not declare. Declared: {listed(declared)}. Add it to the "
                f"entry: metrics={{{name!r}: 'what it is'}}."
            )
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise PluginError(f"{what} {described(number)} under '{name}'; expected a number.")
    return {name: float(number) for name, number in by_name.items()}


# --- exceptions -------------------------------------------------------------------------------------------------------

_WRONG_DEVICE = (
    "Make tensors where those that came in are: torch.zeros(..., device=batch.y.device), or x.new_zeros(...)."
)
#: Part of an error of torch to what the plugin's author should do. Many plugins make these mistakes.
_ADVICE_BY_TORCH_ERROR = {
    "backward through the graph a second time": "A forward pass can be stepped on once: give `step` a `batch.again()`, "
    "add up losses before one backward(), and detach what is kept from one batch to the next.",
    "modified by an inplace operation": "A step needs the tensors of its forward pass as they were: write x = x + 1 "
    "in place of x += 1, and take a further step on `batch.again()`.",
    "same device": _WRONG_DEVICE,
    "not on the expected device": _WRONG_DEVICE,
    "device type for generator": _WRONG_DEVICE,
}
_NOT_A_PLUGINS = (f"{__package__}.", "torch.", "contextlib")  # how the names of modules begin


@contextmanager
def attribute_errors_to(who: str, options: type) -> Iterator[None]:
    """Let errors of a plugin that are raised inside begin with its kind, name and distribution, ``who``.

    A ``PluginError`` that names a plugin already keeps that name. Three other exceptions are mistakes of a plugin, too,
    and become a ``PluginError``: it reads an option that its class of ``options`` lacks, it ends the process, or torch
    refuses what it asked for. Any other exception keeps its type and its traceback.
    """
    try:
        yield
    except PluginError as error:
        if not error.named:
            error.args = (f"{who}: {error}",)
            error.named = True
        raise
    except SystemExit as error:
        code = ""
        if error.code is not None:
            code = printable(" ".join(str(error.code).split()))
        text = f"its code ends the process, sys.exit({code}). Raise an error of calfat_plugin.errors instead."
        raise _named_error(who, text) from error
    except AttributeError as error:
        if type(error.obj) is not options:
            raise
        text = (
            f"its code reads the option '{error.name}', which its entry does not declare: the config is "
            f"{options.__name__}. Add the option to that class, or give the entry the class that has it (config=...)."
        )
        raise _named_error(who, text) from error
    except RuntimeError as error:
        text = _refused_by_torch(error)
        if not text:
            raise
        raise _named_error(who, text) from error


def _named_error(who: str, text: str) -> PluginError:
    error = PluginError(f"{who}: {text}")
    error.named = True
    return error


def _refused_by_torch(error: RuntimeError) -> str:
    """The problem with the plugin's line and advice, if it is a known one; an empty text otherwise."""
    advice = next((advice for words, advice in _ADVICE_BY_TORCH_ERROR.items() if words in str(error)), "")
    if not advice:  # the traceback says more than this text could
        return ""
    where = "its gradient"  # of an error inside backward() no frame is the plugin's
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(_NOT_A_PLUGINS):
            where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    first_sentence = str(error).split(". ")[0]
    text = printable(" ".join(first_sentence.split())).rstrip(".")
    return f"{where}: {text}. {advice}"
