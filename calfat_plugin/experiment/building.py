"""Calls of a plugin's ``build``, and the check of a partition, which is all that its ``build`` makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from calfat_plugin import returned
from calfat_plugin.errors import PluginError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


def build_plugin(
    build: Callable[..., Any], expected: Callable[..., T], /, *arguments: Any, names: str = "options", **options: Any
) -> T:
    """Call ``build``, and return what it makes if that is an instance of the class ``expected``.

    ``names`` says in messages what ``arguments`` are.
    """
    call = ", ".join([names, *options])
    _check_signature(build, call, arguments, options)
    try:
        plugin = build(*arguments, **options)
    except TypeError as error:
        if "abstract class" not in str(error):
            raise
        raise PluginError(f"its build makes no object: {error}.") from None  # plugin_class names a class's own hooks
    return returned.instance(plugin, expected, f"build({call}) returned")


def _check_signature(build: Callable[..., Any], call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(build)
    except ValueError:  # written in C: it has no signature
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        hint = ""
        if inspect.isclass(build):
            hint = f" Give the class __init__(self, {call})."
        raise PluginError(
            f"its build, {getattr(build, '__name__', build)}{signature}, cannot be called as build({call}): {error}."
            f"{hint}"
        ) from None


def checked_split(
    shards: Any, num_examples: int, num_clients: int, *, may_leave_out: bool
) -> list[npt.NDArray[np.int64]]:
    """The clients' positions in the training set, if they are a partition of it."""
    import numpy as np

    arrays = _index_arrays(shards, num_examples)
    if len(arrays) != num_clients:
        raise PluginError(f"it returned {len(arrays)} index arrays for {num_clients} clients; expected one a client.")
    counts = np.bincount(np.concatenate(arrays), minlength=num_examples)
    repeated = np.flatnonzero(counts > 1)
    if repeated.size:
        example = repeated[0]
        holders = []
        for client, array in enumerate(arrays):
            holders += [str(client)] * int((array == example).sum())  # a client may have it twice
        raise PluginError(
            f"it gave {repeated.size} of {num_examples} training examples out more than once, such as example "
            f"{example} to clients {' and '.join(holders[:2])}; expected each with one client."
        )
    unused = np.flatnonzero(counts == 0)
    if unused.size and not may_leave_out:
        raise PluginError(
            f"it gave {unused.size} of {num_examples} training examples to no client, such as example {unused[0]}. If "
            "that is meant, give its PartitionEntry may_leave_out=True."
        )
    return arrays


def _index_arrays(shards: Any, num_examples: int) -> list[npt.NDArray[np.int64]]:
    """Each client's array of positions from 0 to ``num_examples - 1``."""
    import numpy as np

    if not isinstance(shards, Iterable) or isinstance(shards, Mapping):
        raise PluginError(f"it returned {returned.described(shards)}; expected a list of one index array a client.")
    expected = "expected (examples,) positions in the training set, whole numbers"
    arrays = []
    for client, shard in enumerate(shards):
        try:
            array = np.asarray(shard)
        except (TypeError, ValueError):  # a tensor on a GPU, lists of different lengths
            text = f"it gave client {client} {returned.described(shard)} that is no array; {expected}."
            raise PluginError(text) from None
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PluginError(
                f"it gave client {client} an array of shape {array.shape} and type {array.dtype}; {expected}."
            )
        if array.size and not (array.min() >= 0 and array.max() < num_examples):
            raise PluginError(
                f"it gave client {client} positions from {array.min()} to {array.max()}; expected 0 to "
                f"{num_examples - 1}, as there are {num_examples} training examples."
            )
        arrays.append(array.astype(np.int64))
    return arrays
