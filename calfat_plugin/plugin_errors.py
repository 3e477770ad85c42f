"""Errors that plugins cause, worded for the plugin's author: they name the plugin, and say what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from calfat_plugin.errors import PluginError
from calfat_plugin.peer_text import printable

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
    except (AttributeError, SystemExit, RuntimeError) as error:
        if isinstance(error, SystemExit):
            problem = _ended_process(error)
        elif isinstance(error, AttributeError):
            problem = _missing_option(error, options)
        else:
            problem = _refused_by_torch(error)
        if not problem:
            raise
        named_error = PluginError(f"{who}: {problem}")
        named_error.named = True
        raise named_error from error


def _ended_process(error: SystemExit) -> str:
    code = ""
    if error.code is not None:
        code = printable(" ".join(str(error.code).split()))
    return f"its code ends the process, sys.exit({code}). Raise an error of calfat_plugin.errors instead."


def _missing_option(error: AttributeError, options: type) -> str:
    """The problem if the attribute is an option; an empty text otherwise."""
    if type(error.obj) is not options:
        return ""
    return (
        f"its code reads the option '{error.name}', which its entry does not declare: the config is "
        f"{options.__name__}. Add the option to that class, or give the entry the class that has it (config=...)."
    )


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
