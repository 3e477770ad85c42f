"""What plugins return, checked where it comes back; :func:`attribute_errors_to` adds whose plugin it was.

A check looks at types and shapes alone, so that none of them waits for a GPU. What is something else is a
:class:`PluginError`, which begins with ``what``, as :func:`instance` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from calfat_plugin.errors import PluginError, did_you_mean, listed, one_line
from calfat_plugin.peer_text import printable

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_ROUNDING = 1e-6  # of a sum of shares


@contextmanager
def attribute_errors_to(who: str, options: type) -> Iterator[None]:
    """Let errors about a plugin begin with its name; one that has a name keeps it.

    An option that the code reads and the entry does not declare is the plugin's mistake, too, and no bug of ours; so is
    an attempt to end the process.

    Args:
        who: kind, name and distribution of the plugin.
        options: its entry's ``config``.

    Raises:
        PluginError: named.
    """
    try:
        yield
    except PluginError as error:
        if not error.named:
            error.args, error.named = (f"{who}: {error}",), True
        raise
    except (AttributeError, SystemExit) as error:
        if isinstance(error, SystemExit):
            code = "" if error.code is None else printable(" ".join(str(error.code).split()))
            found = f"its code ends the process, sys.exit({code}). Raise an error of calfat_plugin.errors instead."
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
    """``value`` as a ``wanted``.

    Args:
        value: what came back.
        wanted: the class it should be of.
        what: which call, as a message begins: ``combine returned``.
        hint: what to do, a sentence.

    Raises:
        PluginError: it is something else.
    """
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


def rows(value: Any, count: int, what: str) -> Tensor:
    """Which of ``count`` rows: a tensor of shape (count,) and type bool, on whichever device."""
    import torch

    if not isinstance(value, torch.Tensor) or value.shape != (count,) or value.dtype != torch.bool:
        kind = f" and type {value.dtype}" if isinstance(value, torch.Tensor) else ""
        wanted = f"a tensor of shape ({count},) and type torch.bool"
        raise PluginError(f"{what} {described(value)}{kind}; expected {wanted}.")
    return value


def tensors(value: Any, what: str) -> Mapping[str, Tensor]:
    """A flat mapping from text to tensor."""
    from torch import Tensor

    checked = mapping(value, what)
    for name, tensor in checked.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise PluginError(f"{what} {described(tensor)} under {name!r}; expected tensors, each under a text.")
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
    """Hold a plugin to leaving tensors as they are.

    What it writes by torch shows in any of them, and what it writes by numpy in the first mapping.

    Args:
        given: whose they are to tensors by name.
        what: which call.

    Raises:
        PluginError: one is another one, or has other values.
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
    """Numbers under names that the entry declares.

    Args:
        value: what came back.
        declared: the entry's ``metrics``.
        what: as in :func:`instance`.
        also: names that no entry can declare, which the package's own code gives.

    Raises:
        PluginError: something else, or a name that is not declared.
    """
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
