"""Checks of plugins and of what they return, where it comes back; :func:`attribute_errors_to` adds whose plugin it was.

A check looks at types and shapes, and at values that are on the CPU, so that none of them waits for a GPU. What is
something else is a :class:`PluginError`, which begins with ``what``, as :func:`instance` has it.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.data import check_pixels
from calfat_plugin.errors import DataError, PluginError, did_you_mean, listed, one_line
from calfat_plugin.peer_text import printable

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.entries import Entry

log = logging.getLogger(__name__)

T = TypeVar("T")
_ROUNDING = 1e-6  # of a sum of shares

_OURS, _INTERFACES = f"{__package__}.", f"{__package__}.interfaces"
_NO_CHANGE = ("__", "_abc_")  # how names begin that Python puts into every class
_TYPING_ERROR = 0.75  # how near names are of which one was meant: send and sent; not values and evaluate
#: What torch says of mistakes that many plugins make, and what to do.
_TORCH = {
    "backward through the graph a second time": "A forward pass can be stepped on once: give `step` a `batch.again()`, "
    "add up losses before one backward(), and detach what is kept from one batch to the next.",
    "modified by an inplace operation": "A step needs the tensors of its forward pass as they were: write x = x + 1 "
    "in place of x += 1, and take a further step on `batch.again()`.",
    **dict.fromkeys(
        ("same device", "not on the expected device", "device type for generator"),
        "Make tensors where those that came in are: torch.zeros(..., device=batch.y.device), or x.new_zeros(...).",
    ),
}


@contextmanager
def attribute_errors_to(who: str, options: type) -> Iterator[None]:
    """Let errors about a plugin begin with its kind, name and distribution; one that has a name keeps it.

    An option that the code reads and the entry does not declare is the plugin's mistake, too, and no bug of ours; so
    are an attempt to end the process and what torch refuses on behalf of the plugin's code (:data:`_TORCH`).
    """
    try:
        yield
    except PluginError as error:
        if not error.named:
            error.args, error.named = (f"{who}: {error}",), True
        raise
    except (AttributeError, SystemExit, RuntimeError) as error:
        if isinstance(error, SystemExit):
            code = "" if error.code is None else printable(" ".join(str(error.code).split()))
            found = f"its code ends the process, sys.exit({code}). Raise an error of calfat_plugin.errors instead."
        elif isinstance(error, RuntimeError):
            advice = next((advice for words, advice in _TORCH.items() if words in str(error)), "")
            where = [
                f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
                for frame, line in traceback.walk_tb(error.__traceback__)
                if not str(frame.f_globals.get("__name__")).startswith((_OURS, "torch.", "contextlib"))
            ]
            if not advice:  # of anything else the traceback says more
                raise
            said = printable(" ".join(str(error).split(". ")[0].split())).rstrip(".")
            found = f"{where[-1] if where else 'its gradient'}: {said}. {advice}"
        elif type(error.obj) is options:
            found = (
                f"its code reads the option '{error.name}', which its entry does not declare: the config is "
                f"{options.__name__}. Add the option to that class, or give the entry the class that has it "
                "(config=...)."
            )
        else:
            raise
        named = PluginError(f"{who}: {found}")
        named.named = True
        raise named from error


@contextmanager
def stateless(plugin: object, who: str, reported: set[str]) -> Iterator[None]:
    """Warn once of a plugin whose attributes change inside: other clients see them, and a resumed run does not."""
    before = _attributes(plugin)
    yield
    after = _attributes(plugin)
    changed = [
        name
        for name, (value, size) in after.items()
        if name not in before or before[name][0] is not value or before[name][1] != size
    ]
    if changed and who not in reported:
        reported.add(who)
        log.warning(
            "%s changes its attributes while it works (%s). All clients share them, a run with workers has several "
            "copies, and a resumed run begins without: keep it in what the interface hands back.",
            who,
            listed(changed),
        )


def _attributes(plugin: object) -> dict[str, tuple[Any, int]]:
    """Name to what an attribute is, and how much is in it; what a property computes once is no state."""
    return {
        name: (value, len(value) if isinstance(value, list | dict | set) else getattr(value, "_version", 0))
        for name, value in getattr(plugin, "__dict__", {}).items()
        if not isinstance(getattr(type(plugin), name, None), cached_property)
    }


def overrides(made: object, entry: Entry | None = None) -> None:
    """Refuse a class of a plugin that misspells what it means to override, or overrides nothing.

    Functions, and objects of other classes than the contract's, are let through; an entry's own options and presets
    change a built-in class, too.
    """
    configured = entry is not None and bool(entry.presets or not entry.config.__module__.startswith(_OURS))
    if problem := _misses(made if isinstance(made, type) else type(made), configured):
        raise PluginError(problem)


@cache
def _misses(cls: type, configured: bool) -> str:
    """What is wrong with the names of a plugin's class, in words; an empty text where nothing is."""
    ours = [each for each in cls.__mro__ if each.__module__.startswith(_OURS)]
    if not any(each.__module__.startswith(_INTERFACES) for each in ours):
        return ""
    base, contract = ours[0], {name for name in dir(ours[0]) if not name.startswith("_")}
    own = cls.__mro__[: cls.__mro__.index(base)]
    for each in own:
        declared = {*contract, *(name for known in ours for name in inspect.get_annotations(known))}
        for name, value in vars(each).items():
            if name.startswith("_") or name in declared:
                continue
            hint = did_you_mean(name, contract, cutoff=_TYPING_ERROR)
            if hint and name not in _mentioned(each, value):
                code = _code(value)
                where = f"{code.co_filename}:{code.co_firstlineno}" if code else f"in {each.__module__}"
                return (
                    f"its class {each.__name__} has '{name}' ({where}), which is no part of {base.__name__} and "
                    f"which nothing calls.{hint} If it is a helper, begin its name with an underscore."
                )
    if left := getattr(cls, "__abstractmethods__", ()):
        return f"its class {cls.__name__} does not define {listed(left)}, which every {base.__name__} needs."
    reads_options = not base.__module__.startswith(_INTERFACES)
    changed = {name for each in own for name in vars(each) if hasattr(base, name) and not name.startswith(_NO_CHANGE)}
    by_options = reads_options and (configured or any("__init__" in vars(each) for each in own))
    if changed or by_options or not own or not set(ours) <= set(base.__mro__):
        return ""
    return (
        f"its class {cls.__name__} (of {cls.__module__}) overrides nothing of {base.__name__}, and so does exactly "
        f"what {base.__name__} does. It can override: {listed(contract)}."
    )


def _mentioned(cls: type, apart_from: object) -> set[str]:
    """Every name that the code of a class and of its module mentions, but for one function's."""
    module = sys.modules.get(cls.__module__)
    around = vars(module) if module else {}
    classes = [each for each in around.values() if isinstance(each, type) and each.__module__ == cls.__module__]
    within = [vars(cls), around, *map(vars, classes)]
    waiting = [_code(value) for names in within for value in names.values() if value is not apart_from]
    found: set[str] = set()
    while waiting:
        if code := waiting.pop():
            found.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))
            waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _code(value: Any) -> CodeType | None:
    """The code of a function, method or property."""
    for wrapper in ("__func__", "fget", "func"):
        value = getattr(value, wrapper, value)
    return getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)


def described(value: object) -> str:
    """What came back, for a message: ``a tensor of shape (8, 3)``, ``a dict``, ``nothing (None)``."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(getattr(value, "shape", None), tuple):
        return one_line(value)
    text = f" ({value!r})" if isinstance(value, int | float | str) else ""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}{text[:60]}"


def instance(value: Any, wanted: Callable[..., T], what: str, hint: str = "") -> T:
    """``value`` as a ``wanted``; ``what``: which call, as a message begins: ``combine returned``."""
    assert isinstance(wanted, type)  # typed as what it makes, so that it may be an abstract class
    if not isinstance(value, wanted):
        article = "an" if wanted.__name__[0].lower() in "aeiou" else "a"
        raise PluginError(f"{what} {described(value)}; expected {article} {wanted.__name__}.{hint and f' {hint}'}")
    return cast("T", value)


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """A mapping."""
    if not isinstance(value, Mapping):
        raise PluginError(f"{what} {described(value)}; expected a mapping.")
    return value


def loss(value: Any, what: str) -> Tensor:
    """A loss that can be minimised or climbed: one number, a tensor of shape ()."""
    from torch import Tensor

    if not isinstance(value, Tensor) or value.shape != ():
        raise PluginError(f"{what} {described(value)}; expected one number, a tensor of shape ().")
    return value


def like(value: Any, wanted: Tensor, what: str) -> Tensor:
    """A tensor of the shape and type of ``wanted``, on its device."""
    from torch import Tensor

    if not isinstance(value, Tensor) or value.shape != wanted.shape:
        raise PluginError(f"{what} {described(value)}; expected a tensor of shape {tuple(wanted.shape)}.")
    for name in ("dtype", "device"):
        if getattr(value, name) != getattr(wanted, name):
            found, expected = getattr(value, name), getattr(wanted, name)
            raise PluginError(f"{what} a tensor of {name} {found}; expected {expected}.")
    return value


def examples(value: Any, given: ImageData, num_classes: int, what: str) -> ImageData:
    """Images and labels to train on in the place of those that were ``given``; looks at their values."""
    found = instance(value, ImageData, what)
    if not len(found) or found.x.shape[1:] != given.x.shape[1:]:
        raise PluginError(f"{what} images {tuple(found.x.shape)}; expected one or more like {tuple(given.x.shape)}.")
    if {found.x.device, found.y.device} != {given.x.device}:
        raise PluginError(f"{what} images on {found.x.device}, labels on {found.y.device}; expected {given.x.device}.")
    try:
        check_pixels(found)
    except DataError as error:
        raise PluginError(f"{what} images whose {error}") from None
    low, high = int(found.y.min()), int(found.y.max())
    if low < 0 or high >= num_classes:
        raise PluginError(f"{what} labels from {low} to {high}; expected 0 to {num_classes - 1}.")
    return found


def rows(value: Any, count: int, what: str) -> Tensor:
    """Which of ``count`` rows: a tensor of shape (count,) and type bool, on whichever device."""
    import torch

    if not isinstance(value, torch.Tensor) or value.shape != (count,) or value.dtype != torch.bool:
        kind = f" and type {value.dtype}" if isinstance(value, torch.Tensor) else ""
        wanted = f"a tensor of shape ({count},) and type torch.bool"
        raise PluginError(f"{what} {described(value)}{kind}; expected {wanted}.")
    return value


def tensors(value: Any, what: str, *, on: str = "") -> Mapping[str, Tensor]:
    """A flat mapping from text to tensor; ``on``: the type of device that all must be on, where one is wanted."""
    from torch import Tensor

    checked = mapping(value, what)
    for name, tensor in checked.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise PluginError(f"{what} {described(tensor)} under {name!r}; expected tensors, each under a text.")
        if on and tensor.device.type != on:
            raise PluginError(f"{what} a tensor on {tensor.device} under '{name}'; expected it on the {on}.")
    return checked


def names(value: Any, known: Collection[str], what: str) -> frozenset[str]:
    """Some of these names of tensors."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise PluginError(f"{what} {described(value)}; expected names of the model's tensors.")
    for name in value:
        if not isinstance(name, str) or name not in known:
            raise PluginError(f"{what} {name!r}, which is no tensor of the model.{did_you_mean(str(name), known)}")
    return frozenset(value)


def shares(value: Any, clients: Collection[int], what: str) -> dict[int, float]:
    """Shares of these clients that sum to 1; or none at all."""
    checked = mapping(value, what)
    for client, share in checked.items():
        right = isinstance(share, int | float) and math.isfinite(share) and share >= 0
        if not right or client not in clients:
            raise PluginError(
                f"{what} {described(share)} for client {client!r}; expected shares, from 0 to 1, of clients of the "
                "round."
            )
    total = math.fsum(checked.values())
    if checked and abs(total - 1) > _ROUNDING:
        raise PluginError(f"{what} shares that sum to {total:.6g}; expected 1. Divide each by their sum.")
    return {client: float(share) for client, share in checked.items()}


@contextmanager
def untouched(given: Mapping[str, Mapping[str, Tensor]], what: str) -> Iterator[None]:
    """Hold a plugin to leaving tensors, by whose they are and their names, as they are.

    What it writes by torch shows in any of them, and what it writes by numpy in the first mapping.
    """
    before = [(whose, name, each, each._version) for whose, own in given.items() for name, each in own.items()]
    first = next(iter(given), "")
    copies = {name: tensor.clone() for name, tensor in given.get(first, {}).items()}
    yield
    for whose, name, tensor, version in before:
        same = given[whose].get(name) is tensor and tensor._version == version
        if not same or (whose == first and not copies[name].equal(tensor)):
            raise PluginError(f"{what} changed '{name}' of {whose} in place. Work on a copy: tensor.clone().")


def metrics(value: Any, declared: Mapping[str, str], what: str, also: Collection[str] = ()) -> dict[str, float]:
    """Numbers under names that the entry declares, or that the package's own code gives (``also``)."""
    checked = mapping(value, what)
    for name, number in checked.items():
        if name not in declared and name not in also:
            raise PluginError(
                f"{what} {name!r}, which its entry does not declare. Declared: {listed(declared)}. Add it to the "
                f"entry: metrics={{{name!r}: 'what it is'}}."
            )
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise PluginError(f"{what} {described(number)} under '{name}'; expected a number.")
    return {name: float(number) for name, number in checked.items()}
