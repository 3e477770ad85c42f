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
_WANTED = "client ids such as 3, 2-4 or [0, 1, 5-7]"
BESIDE: Mapping[str, tuple[str, str]] = {
    "ids": (_WANTED, "chooses these clients"),
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
    """Client ids as a recipe writes them: ``3``, ``2-4`` or a list of these; ascending."""
    found: set[int] = set()
    for item in raw if isinstance(raw, list) else [raw]:
        if isinstance(item, str) and (written := _IDS.fullmatch(item)):
            first, last = int(written[1]), int(written[2] or written[1])
        else:
            first = last = item if isinstance(item, int) and not isinstance(item, bool) else -1
        if not 0 <= first <= last:
            raise OptionError(f"got {describe(item)}, expected {_WANTED}.")
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
        raise OptionError(f"got an empty list, expected {_WANTED}.")
    return tuple(sorted(found))
