"""Checks of a plugin's class by its names: a misspelt hook, and a class that overrides nothing."""

from __future__ import annotations

import inspect
from difflib import SequenceMatcher
from functools import cache
from typing import TYPE_CHECKING, Any

from calfat_plugin.errors import PluginError, listed

if TYPE_CHECKING:
    from calfat_plugin.entries import Entry

_OURS = "calfat_plugin."
_INTERFACES = "calfat_plugin.interfaces"
_MADE_BY_PYTHON = ("__", "_abc_")  # how names begin that Python puts into every class
_MOST_DIFFERENT_LETTERS = 2  # of a name and the hook that it means: send and sent have one each
_FEWEST_SAME_LETTERS = 3  # fewer say nothing: fit and fin


def check_class(plugin: object, entry: Entry | None = None) -> None:
    """Refuse a plugin whose class misspells a hook, or overrides nothing and so does what its base class does.

    ``plugin`` is a class or an object. Functions, and classes that derive from none of this package's interfaces, pass.
    Options and presets of the entry's own count as a change of a built-in class.
    """
    cls = plugin if isinstance(plugin, type) else type(plugin)
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
    if _changes(plugin_classes, base, has_own_options):
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
    annotated = {name for ours in our_classes for name in inspect.get_annotations(ours)}
    defined = {name for cls in plugin_classes for name in vars(cls)}
    for cls in plugin_classes:
        if not issubclass(cls, base):
            continue
        for name, value in vars(cls).items():
            if name.startswith("_") or name in hooks or name in annotated:
                continue
            for hook in sorted(hooks - defined):
                if _is_typing_error(name, hook):
                    return (
                        f"its class {cls.__name__} has '{name}' ({_place_of(value, cls)}), which is no part of "
                        f"{base.__name__}. Did you mean '{hook}'? If it is a helper, begin its name with an underscore."
                    )
    return ""


def _is_typing_error(name: str, hook: str) -> bool:
    """Whether a name is so near to that of a hook that it probably means it."""
    blocks = SequenceMatcher(None, name.lower(), hook).get_matching_blocks()
    same = sum(block.size for block in blocks)
    different = len(name) + len(hook) - 2 * same
    return same >= _FEWEST_SAME_LETTERS and different <= _MOST_DIFFERENT_LETTERS


def _place_of(value: Any, cls: type) -> str:
    """Where a method or property is written, for a message."""
    function = getattr(value, "fget", None) or getattr(value, "func", value)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # a constant
        return f"in {cls.__module__}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _changes(plugin_classes: tuple[type, ...], base: type, has_own_options: bool) -> bool:
    """Whether a plugin's classes do anything else than their base class of this package."""
    for cls in plugin_classes:
        if any(hasattr(base, name) and not name.startswith(_MADE_BY_PYTHON) for name in vars(cls)):
            return True
    if base.__module__.startswith(_INTERFACES):  # an interface does not read options
        return False
    return has_own_options or any("__init__" in vars(cls) for cls in plugin_classes)
