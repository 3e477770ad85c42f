"""Groups of clients (``calfat.clients``): what a recipe may say about one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calfat_plugin.errors import OptionError
from calfat_plugin.options import describe, option
from calfat_plugin.recipe.document import KeyPath

CLIENTS: KeyPath = ("calfat", "clients")
TRAINED = ("epochs", "local_steps", "batch_size", "learning_rate")  #: of a group's options: keys of ``train_args``
BESIDE: Mapping[str, tuple[str, str]] = {
    "ids": ("client ids such as 3, 2-4 or [0, 1, 5-7]", "chooses these clients"),
    "trainer": ("one of the local trainers", "as calfat.trainer, with its loss modifier"),
    "threat": (
        "a section",
        "keys of calfat.threat that differ; the others are the run's, but another norm needs an eps",
    ),
    "attacker": ("one of the attackers", "what its clients send instead of what they trained; in simulations only"),
}  #: keys of a group that are no options: what they hold, and what for
OTHERS = "others"  #: what results call the clients of no group
GROUPED = ("loss", "update_norm", "update_cosine")  #: of what ``rounds.csv`` has each group's mean
CHOOSING = ("ids", "share", "smallest", "largest")

_IDS = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")  # no longer than numbers that Python reads


@dataclass(frozen=True)
class GroupOptions:
    """``calfat.clients[]``: clients that differ from the others, chosen by one of ``ids``, ``share``, ``smallest`` and
    ``largest``. The first group that chooses a client has it."""

    name: str | None = option(None, help="what results call the group; null: group1, group2 and so on")
    share: float | None = option(
        None, low=0, open_low=True, high=1, help="chooses this share of all clients, drawn from those of no group above"
    )
    seed: int | None = option(None, low=0, help="of the draw; null: the run's seed")
    smallest: int | None = option(
        None, low=1, help="chooses so many clients with the fewest training examples, of those of no group above"
    )
    largest: int | None = option(None, low=1, help="likewise, with the most training examples")
    epochs: int | None = option(None, low=1, help="as train_args.epochs")
    local_steps: int | None = option(None, low=1, help="as train_args.local_steps")
    batch_size: int | None = option(None, low=1, help="as train_args.batch_size")
    learning_rate: float | None = option(None, low=0, open_low=True, help="as train_args.learning_rate")


def parsed_ids(raw: Any, num_clients: int) -> tuple[int, ...]:
    """Client ids as a recipe writes them: ``3``, ``2-4`` or a list of these; ascending.

    Args:
        raw: what the recipe has.
        num_clients: of the run; ids are below it.
    """
    found: set[int] = set()
    for item in raw if isinstance(raw, list) else [raw]:
        first, last = _ends(item)
        if last >= num_clients:  # before the range is made, which may be of any length
            raise OptionError(
                f"there is no client {max(first, num_clients)}; the {num_clients} clients of "
                f"train_args.client_num_in_total are 0 to {num_clients - 1}."
            )
        ids = range(first, last + 1)
        if twice := found.intersection(ids):
            raise OptionError(f"client {min(twice)} is listed twice.")
        found.update(ids)
    if not found:
        raise OptionError("got an empty list, expected client ids such as 3, 2-4 or [0, 1, 5-7].")
    return tuple(sorted(found))


def _ends(item: Any) -> tuple[int, int]:
    """First and last id of ``3`` or ``2-4``."""
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return item, item
    written = _IDS.fullmatch(item) if isinstance(item, str) else None
    if written is None or int(written[1]) > int(written[2] or written[1]):
        raise OptionError(f"got {describe(item)}, expected client ids such as 3, 2-4 or [0, 1, 5-7].")
    return int(written[1]), int(written[2] or written[1])


def choosing_key(given: Mapping[str, Any]) -> str:
    """The one key of a group that says who is in it."""
    chosen = [name for name in CHOOSING if given.get(name) is not None]
    if len(chosen) != 1:
        found = f"{' and '.join(chosen)} say" if chosen else "nothing says"
        raise OptionError(f"{found} who is in the group; expected one of {', '.join(CHOOSING)}.")
    return chosen[0]
