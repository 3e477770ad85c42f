"""What code of plugins, and of torch, may change while it works.

The global random generators are put at a derived state, and back afterwards. A plugin that changes its own attributes
is reported, and one that changes the tensors it is given is refused.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calfat_plugin.errors import PluginError, listed

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


_ABSENT = object()  # the value of an attribute that was not there

# --- global random generators -----------------------------------------------------------------------------------------


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global generators back as they were, whatever happens to them inside."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices: list[int] = []
    if torch.cuda.is_available():
        devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def seeded_global_rng(seed: int) -> Iterator[None]:
    """Put the global generators at a derived state for a while, then back to what they were.

    Nothing of ours draws from them. PyTorch's dropout does, and other people's plugins may: without this, what a
    client draws would depend on who trained before it in this process, and a resumed run would end elsewhere.
    """
    with generators_kept():
        set_global_rng(seed)
        yield


def set_global_rng(seed: int) -> None:
    """Put the global generators at a derived state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    # Not torch.manual_seed: for kinds of devices that are not in use it queues a call with a traceback each time,
    # which takes milliseconds and is never freed.
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


# --- attributes and tensors -------------------------------------------------------------------------------------------


@contextmanager
def stateless(plugin: object, who: str, reported: set[str]) -> Iterator[None]:
    """Warn if a plugin's attributes change inside: other clients see the change, and a resumed run does not.

    Each plugin is reported once: its name, ``who``, is then in ``reported``.
    """
    before = _attributes(plugin)
    yield
    after = _attributes(plugin)
    changed = []
    for name, (value, size) in after.items():
        value_before, size_before = before.get(name, (_ABSENT, 0))
        if value is not value_before or size != size_before:
            changed.append(name)
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
