"""A plugin as it is built: its ``build`` is called, and its class and a partition's split are checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from calfat_plugin import returned
from calfat_plugin.errors import PluginError, listed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from calfat_plugin.entries import Entry

T = TypeVar("T")

_OURS = "calfat_plugin."
_INTERFACES = "calfat_plugin.interfaces"
_MADE_BY_PYTHON = ("__", "_abc_")  # how names begin that Python puts into every class
_MOST_DIFFERENT_LETTERS = 2  # of a name and the hook that it means: send and sent have one each
_FEWEST_SAME_LETTERS = 3  # fewer say nothing: fit and fin


# --- calling build ----------------------------------------------------------------------------------------------------


def build_plugin(
    build: Callable[..., Any], expected: Callable[..., T], /, *arguments: Any, names: str = "options", **options: Any
) -> T:
    """Call ``build``, and return what it makes if that is an instance of the class ``expected``.

    ``names`` says in messages what ``arguments`` are.
    """
    call = ", ".join([names, *options])
    try:
        signature = inspect.signature(build)
    except ValueError:  # written in C: it has no signature
        signature = None
    if signature is not None:
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            header = f"{getattr(build, '__name__', build)}{signature}"
            text = f"its build, {header}, cannot be called as build({call}): {error}."
            if inspect.isclass(build):
                text += f" Give the class __init__(self, {call})."
            raise PluginError(text) from None
    try:
        plugin = build(*arguments, **options)
    except TypeError as error:
        if "abstract class" not in str(error):
            raise
        raise PluginError(f"its build makes no object: {error}.") from None  # check_class names a class's own hooks
    return returned.instance(plugin, expected, f"build({call}) returned")


# --- what a partition makes -------------------------------------------------------------------------------------------


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


# --- the class of a plugin --------------------------------------------------------------------------------------------


def check_class(plugin: object, entry: Entry | None = None) -> None:
    """Refuse a plugin whose class misspells a hook, or overrides nothing and so does what its base class does.

    ``plugin`` is a class or an object. Functions, and classes that derive from none of this package's interfaces, pass.
    Options and presets of the entry's own count as a change of a built-in class.
    """
    cls: type = type(plugin)
    if isinstance(plugin, type):
        cls = plugin
    has_own_options = False
    if entry is not None:
        has_own_options = bool(entry.presets) or not entry.config.__module__.startswith(_OURS)
    problem = _problem_of(cls, has_own_options)
    if problem:
        raise PluginError(problem)


@cache
def _problem_of(cls: type, has_own_options: bool) -> str:
    """What is wrong with a class, in words; an empty text where nothing is."""
    our_classes = [base for base in cls.__mro__ if base.__module__.startswith(_OURS)]
    if not any(base.__module__.startswith(_INTERFACES) for base in our_classes):
        return ""
    base = our_classes[0]
    plugin_classes = cls.__mro__[: cls.__mro__.index(base)]
    problem = _misspelt_hook(plugin_classes, our_classes)
    if problem:
        return problem
    abstract = getattr(cls, "__abstractmethods__", ())
    if abstract:
        return f"its class {cls.__name__} does not define {listed(abstract)}, which every {base.__name__} needs."
    if not plugin_classes or not set(our_classes) <= set(base.__mro__):  # a built-in; or two built-ins combined
        return ""
    for plugin_class in plugin_classes:
        if any(hasattr(base, name) and not name.startswith(_MADE_BY_PYTHON) for name in vars(plugin_class)):
            return ""
    reads_options = not base.__module__.startswith(_INTERFACES)
    has_init = any("__init__" in vars(plugin_class) for plugin_class in plugin_classes)
    if reads_options and (has_own_options or has_init):
        return ""
    return (
        f"its class {cls.__name__} (of {cls.__module__}) overrides nothing of {base.__name__}, and so does exactly "
        f"what {base.__name__} does. It can override: {listed(_hooks(base))}."
    )


def _hooks(base: type) -> set[str]:
    """The public names of a class of this package: its methods, properties and constants."""
    return {name for name in dir(base) if not name.startswith("_")}


def _misspelt_hook(plugin_classes: tuple[type, ...], our_classes: list[type]) -> str:
    """The problem with the first public name that is near a hook which the plugin does not define.

    A plugin that defines the hook itself may have helpers with similar names, such as ``train_losses`` beside
    ``train_loss``. A mixin, which does not derive from this package's classes, is not searched: its names have another
    purpose.
    """
    base = our_classes[0]
    hooks = _hooks(base)
    annotated: set[str] = set()
    for cls in our_classes:
        annotated.update(inspect.get_annotations(cls))
    defined: set[str] = set()
    for cls in plugin_classes:
        defined.update(vars(cls))
    for cls in plugin_classes:
        if not issubclass(cls, base):
            continue
        for name, value in vars(cls).items():
            if name.startswith("_") or name in hooks or name in annotated:
                continue
            for hook in sorted(hooks - defined):
                blocks = SequenceMatcher(None, name.lower(), hook).get_matching_blocks()
                same_letters = sum(block.size for block in blocks)
                different_letters = len(name) + len(hook) - 2 * same_letters
                if same_letters >= _FEWEST_SAME_LETTERS and different_letters <= _MOST_DIFFERENT_LETTERS:
                    return (
                        f"its class {cls.__name__} has '{name}' ({_place_of(value, cls)}), which is no part of "
                        f"{base.__name__}. Did you mean '{hook}'? If it is a helper, begin its name with an underscore."
                    )
    return ""


def _place_of(value: Any, cls: type) -> str:
    """Where a method or property is written, for a message."""
    function = getattr(value, "fget", None) or getattr(value, "func", value)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # a constant
        return f"in {cls.__module__}"
    return f"{code.co_filename}:{code.co_firstlineno}"
