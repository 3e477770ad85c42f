"""Every error a user can meet, and the helper that words the nearest right spelling.

All of them derive from ``CalfatError``; the commands print their text without a traceback and exit with status 2.
Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CalfatError(Exception):
    """Base of all errors that the user can fix. The text states what was found, where, and what to do."""


class OptionError(CalfatError):
    """A value of a recipe or an option is unknown, of the wrong type, out of range or in the wrong unit.

    Args:
        text: what was found and what was wanted.
        at: keys that lead from the options to the value that is wrong, where it is one.
    """

    def __init__(self, text: str, at: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.at = at


class RecipeError(CalfatError):
    """A recipe cannot be read or does not make sense; the text begins with file, line and key path."""


class PluginError(CalfatError):
    """Plugins clash, break the contract, or do not offer what a recipe names."""

    named = False  # True: the text says whose plugin it is


class DataError(CalfatError):
    """A data set is missing, corrupt, or too small for what was asked of it."""


class BudgetError(CalfatError):
    """Adversarial examples left the eps ball or the pixel range."""


class ModelError(CalfatError):
    """A model cannot be used as asked: training mode, wrong shape, non-finite weights."""


class UpdateError(CalfatError):
    """A client's update is non-finite or does not fit the global model."""


class RunError(CalfatError):
    """A run directory cannot be created, found, read or resumed."""


class HostError(CalfatError):
    """The host (FedML or Flower) is missing, of an untested version, or cannot do what a recipe asks."""


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.61) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest of ``known``, or an empty text; ``cutoff``: how near, up to 1.

    Case is ignored, so ``FedAvg`` finds ``fedavg``. Where none is near, an abbreviation of just one of them finds it:
    ``aa`` finds ``autoattack``. The word itself, which was wrong, is no hint.
    """
    by_lower = {name.lower(): name for name in known if name != word}
    word = word.lower()
    near = difflib.get_close_matches(word, by_lower, n=1, cutoff=cutoff)
    if not near and len(word) > 1:
        for name in by_lower:
            rest = iter(name)  # "in" goes on where it has found the letter before
            if name[:1] == word[0] and all(letter in rest for letter in word):
                near.append(name)
    if len(near) != 1:
        return ""
    return f" Did you mean '{by_lower[near[0]]}'?"


def one_line(value: object) -> str:
    """A value for a message: how Python writes it, on one short line; of a tensor or an array its shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        kind = "a tensor" if hasattr(value, "requires_grad") else "an array"
        return f"{kind} of shape {tuple(shape)}"
    return short(" ".join(repr(value).split()))


def short(text: str, most: int = 60) -> str:
    """So many characters of a text at most, for a message."""
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


#: In the error of a round without any update to go on from, such as where every client's training diverged.
NO_UPDATE = "not one client delivered a usable update"


def listed(names: Iterable[str]) -> str:
    """Join names for a message: sorted, comma-separated; ``none`` when empty."""
    return ", ".join(sorted(names)) or "none"
