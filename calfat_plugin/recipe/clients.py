"""The keys of a group of clients (``calfat.clients``)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from calfat_plugin.errors import OptionError
from calfat_plugin.options import Tag, describe, option, tagged, tags_of
from calfat_plugin.recipe.document import KeyPath

CLIENTS: KeyPath = ("calfat", "clients")
TRAINED = (
    "epochs",
    "local_steps",
    "batch_size",
    "learning_rate",
)  #: a group may replace these of ``train_args``
_EXPECTED_IDS = "client ids such as 3, 2-4 or [0, 1, 5-7]"
OTHERS = "others"  #: what results call the clients of no group
GROUPED = ("loss", "update_norm", "update_cosine")  #: ``rounds.csv`` has the mean of these over each group
CHOOSING = ("ids", "share", "smallest", "largest")

_IDS = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")  # Python reads no number of 5,000 digits


class KeyBeside(NamedTuple):
    """A key of a group that is not an option: a list of ids, a section or a plugin."""

    holds: str  # the valid values in words
    help: str
    tags: Tag = Tag(0)


BESIDE: Mapping[str, KeyBeside] = {
    "ids": KeyBeside(_EXPECTED_IDS, "chooses these clients", Tag.PROBLEM),
    "trainer": KeyBeside("one of the local trainers", "as calfat.trainer, with its loss modifier"),
    "threat": KeyBeside(
        "a section",
        "keys of calfat.threat that differ; the others are the run's, but another norm needs an eps",
        Tag.PROBLEM,
    ),
    "attacker": KeyBeside(
        "one of the attackers",
        "what its clients send instead of what they trained; in simulations only",
        Tag.PROBLEM,
    ),
}


@dataclass(frozen=True)
class GroupOptions:
    """``calfat.clients[]``: clients that differ from the others, chosen by one of ``ids``, ``share``, ``smallest`` and
    ``largest``. The first group that chooses a client has it."""

    name: str | None = tagged(
        Tag.PROBLEM, option(None, help="what results call the group; null: group1, group2 and so on")
    )
    share: float | None = tagged(
        Tag.PROBLEM,
        option(
            None,
            low=0,
            open_low=True,
            high=1,
            help="chooses this share of all clients, drawn from those of no group above",
        ),
    )
    seed: int | None = tagged(Tag.PROBLEM, option(None, low=0, help="of the draw; null: the run's seed"))
    smallest: int | None = tagged(
        Tag.PROBLEM,
        option(
            None, low=1, help="chooses so many clients with the fewest training examples, of those of no group above"
        ),
    )
    largest: int | None = tagged(Tag.PROBLEM, option(None, low=1, help="likewise, with the most training examples"))
    epochs: int | None = option(None, low=1, help="as train_args.epochs")
    local_steps: int | None = option(None, low=1, help="as train_args.local_steps")
    batch_size: int | None = option(None, low=1, help="as train_args.batch_size")
    learning_rate: float | None = option(None, low=0, open_low=True, help="as train_args.learning_rate")


def group_keys_with(tag: Tag) -> tuple[str, ...]:
    """The keys of a group whose declarations have all of ``tag``."""
    tags = {field.name: tags_of(field) for field in dataclasses.fields(GroupOptions)}
    for name, key in BESIDE.items():
        tags[name] = key.tags
    return tuple(name for name in tags if tag in tags[name])


def parsed_ids(raw: Any, num_clients: int) -> tuple[int, ...]:
    """Client ids as a recipe writes them: ``3``, ``2-4`` or a list of these; ascending."""
    ids: set[int] = set()
    items = raw
    if not isinstance(raw, list):
        items = [raw]
    for item in items:
        first, last = _parsed_range(item)
        if last >= num_clients:  # before the range is made, which may be of any length
            raise OptionError(
                f"there is no client {max(first, num_clients)}; the {num_clients} clients of "
                f"train_args.client_num_in_total are 0 to {num_clients - 1}."
            )
        for client in range(first, last + 1):
            if client in ids:
                raise OptionError(f"client {client} is listed twice.")
            ids.add(client)
    if not ids:
        raise OptionError(f"got an empty list, expected {_EXPECTED_IDS}.")
    return tuple(sorted(ids))


def _parsed_range(item: Any) -> tuple[int, int]:
    """First and last client of ``3`` or of ``2-4``."""
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return item, item
    if isinstance(item, str):
        match = _IDS.fullmatch(item)
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if first <= last:
                return first, last
    raise OptionError(f"got {describe(item)}, expected {_EXPECTED_IDS}.")
