"""Every error a user can meet, and helpers for the texts of messages.

All errors derive from ``CalfatError``. The commands print the text of such an error without a traceback and exit with
status 2. Any other exception is a bug of ours and keeps its traceback.
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
        at: the keys from the options down to the wrong value; empty where no single value is wrong.
    """

    def __init__(self, text: str, at: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.at = at


class RecipeError(CalfatError):
    """A recipe cannot be read or does not make sense; the text begins with file, line and key path."""


class PluginError(CalfatError):
    """Plugins clash, break the contract, or do not offer what a recipe names."""

    named = False  # whether the text already names the plugin and its distribution; if not, the caller adds them


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


#: In the text of the error that ends a round in which no client delivered an update that can be used: every client's
#: training diverged, for example. A suite looks for it in the output of a run.
NO_UPDATE = "not one client delivered a usable update"


# Two words of five letters that share three have a similarity of 0.6 (``betta`` and ``delta``). They are not taken for
# one word, so the cutoff is a little higher.
def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.61) -> str:
    """Return ``" Did you mean 'x'?"`` for the name that ``word`` probably means; an empty text if there is none.

    That is the most similar name. If no name is similar, it is the name that ``word`` abbreviates, unless several names
    fit: ``aa`` stands for ``autoattack``. Case is ignored: ``FedAvg`` is similar to ``fedavg``.

    Args:
        word: what the user wrote, which was wrong here. It is not suggested itself, even if ``known`` has it.
        known: the right names.
        cutoff: the least similarity of a suggestion (``difflib``), from 0 to 1, where 1 is the same word.
    """
    name_of = {name.lower(): name for name in known if name != word}
    word = word.lower()
    candidates = difflib.get_close_matches(word, name_of, n=1, cutoff=cutoff)
    if not candidates and len(word) > 1:
        candidates = [name for name in name_of if _abbreviates(word, name)]
    if len(candidates) != 1:
        return ""
    return f" Did you mean '{name_of[candidates[0]]}'?"


def _abbreviates(word: str, name: str) -> bool:
    """Whether ``name`` begins with the first letter of ``word`` and has the others behind it in the same order."""
    if not name.startswith(word[0]):
        return False
    searched = 0  # letters of the name that were searched so far
    for letter in word:
        position = name.find(letter, searched)
        if position < 0:
            return False
        searched = position + 1
    return True


def one_line(value: object) -> str:
    """A value as Python writes it, on one short line, for a message. A tensor or an array is given by its shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):  # the shape of a tensor is a subclass of tuple
        kind = "an array"
        if hasattr(value, "requires_grad"):
            kind = "a tensor"
        return f"{kind} of shape {tuple(shape)}"
    return short(" ".join(repr(value).split()))


def short(text: str, most: int = 60) -> str:
    """The text, cut to ``most`` characters for a message; the last three of a cut text are dots."""
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


def listed(names: Iterable[str]) -> str:
    """The names for a message: sorted, with commas between them; ``none`` if there are no names."""
    return ", ".join(sorted(names)) or "none"
