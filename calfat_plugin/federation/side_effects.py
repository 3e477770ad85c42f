"""Checks of what plugins change while they work: their own attributes, and the tensors that they are given."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from calfat_plugin.errors import PluginError, listed

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


@contextmanager
def stateless(plugin: object, who: str, reported: set[str]) -> Iterator[None]:
    """Warn if a plugin's attributes change inside: other clients see the change, and a resumed run does not.

    Each plugin is reported once: its name, ``who``, is then in ``reported``.
    """
    before = _attributes(plugin)
    yield
    after = _attributes(plugin)
    changed = [name for name, (value, size) in after.items() if _differs(before.get(name), value, size)]
    if changed and who not in reported:
        reported.add(who)
        log.warning(
            "%s changes its attributes while it works (%s). All clients share them, a run with workers has several "
            "copies, and a resumed run begins without: keep it in what the interface hands back.",
            who,
            listed(changed),
        )


def _attributes(plugin: object) -> dict[str, tuple[Any, int]]:
    """Name of each attribute to its value, and to a number that changes when the value is changed in place."""
    attributes = {}
    for name, value in getattr(plugin, "__dict__", {}).items():
        if isinstance(getattr(type(plugin), name, None), cached_property):
            continue  # computed once from the other attributes, so it is no state
        if isinstance(value, list | dict | set):
            attributes[name] = (value, len(value))
        else:
            attributes[name] = (value, getattr(value, "_version", 0))  # a tensor counts its changes in _version
    return attributes


def _differs(before: tuple[Any, int] | None, value: Any, size: int) -> bool:
    if before is None:
        return True
    value_before, size_before = before
    return value is not value_before or size != size_before


@contextmanager
def untouched(tensors_of: Mapping[str, Mapping[str, Tensor]], what: str) -> Iterator[None]:
    """Hold a plugin to leaving tensors as they are; ``tensors_of``: whose tensors, by name.

    Torch counts what it writes to any of them. What numpy writes is only seen in the first mapping, which is copied.
    """
    versions = {}
    for owner, tensors in tensors_of.items():
        for name, tensor in tensors.items():
            versions[owner, name] = (tensor, tensor._version)
    first_owner = next(iter(tensors_of), "")
    copies = {name: tensor.clone() for name, tensor in tensors_of.get(first_owner, {}).items()}
    yield
    for (owner, name), (tensor, version) in versions.items():
        unchanged = tensors_of[owner].get(name) is tensor and tensor._version == version
        if unchanged and owner == first_owner:
            unchanged = copies[name].equal(tensor)
        if not unchanged:
            raise PluginError(f"{what} changed '{name}' of {owner} in place. Work on a copy: tensor.clone().")
