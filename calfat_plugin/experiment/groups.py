"""Groups of clients: how a recipe's are read, and which clients are in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from calfat_plugin.entries import AttackerEntry
from calfat_plugin.errors import OptionError, listed
from calfat_plugin.experiment.reading import RecipeReader
from calfat_plugin.options import describe
from calfat_plugin.recipe.clients import BESIDE, CHOOSING, CLIENTS, OTHERS, TRAINED, GroupOptions, parsed_ids
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_sections import read_host_section
from calfat_plugin.recipe.keys import keys_of
from calfat_plugin.recipe.schema import CalfatSection, ClientGroup, Recipe
from calfat_plugin.seeds import derive_seed

_GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_EXAMPLE = "[{ids: 0-1, trainer: standard}]"
_THREAT_KEYS = ("inner", "by_class")  # of a group's threat: where they are written, a recipe in full has them, too
_CHANGES = ("trainer", "threat", "attacker", *TRAINED)  # what makes a group differ from the other clients


def read_groups(experiment: Recipe, reader: RecipeReader) -> tuple[ClientGroup, ...]:
    """The groups of a recipe; ``experiment`` is that of its clients of no group, and ``reader`` read it."""
    document = experiment.document
    written = document.get(CLIENTS)
    if written is None:
        return ()
    if not isinstance(written, list) or not all(isinstance(item, Mapping) for item in written):
        raise document.error(CLIENTS, f"got {describe(written)}, expected a list such as {_EXAMPLE}.")
    groups: list[ClientGroup] = []
    for index, of_group in enumerate(written):
        group = _read_group(experiment, reader, index, of_group)
        if any(group.name == other.name for other in groups):
            raise document.error((*group.path, "name"), f"there are two groups '{group.name}'; give one another name.")
        groups.append(group)
    return tuple(groups)


def _read_group(experiment: Recipe, reader: RecipeReader, index: int, written: Mapping[str, Any]) -> ClientGroup:
    """A group from what the recipe says about it."""
    document = experiment.document
    path: KeyPath = (*CLIENTS, index)
    of_options = {key: value for key, value in written.items() if key not in BESIDE}
    options = document.options(path, GroupOptions, of_options, also=tuple(BESIDE))
    recipe = _recipe_of_group(experiment, reader, path, written)
    ids = _chosen_ids(document, path, written, options, recipe.num_clients)
    changed = [key for key in ("trainer", "threat") if written.get(key) is not None]
    changed += [key for key in _THREAT_KEYS if key in (written.get("threat") or {})]
    attacker = None
    if written.get("attacker") is not None:
        attacker = reader.plugin((*path, "attacker"), AttackerEntry, written["attacker"], beside=("name", "preset"))
    if all(written.get(key) is None for key in _CHANGES):
        raise document.error(path, f"nothing differs in this group; expected one of {listed(_CHANGES)}.")
    name = options.name or f"group{index + 1}"
    if not _GROUP_NAME.fullmatch(name) or name == OTHERS:
        text = f"got '{name}', expected letters, digits, '-' and '_', and not '{OTHERS}'."
        raise document.error((*path, "name"), text)
    return ClientGroup(name, replace(options, name=None), ids, recipe, attacker, tuple(changed), path)


def _chosen_ids(
    document: Document, path: KeyPath, written: Mapping[str, Any], options: GroupOptions, num_clients: int
) -> tuple[int, ...] | None:
    """The clients that a group lists; None where it chooses them otherwise. One key must choose them."""
    choosing = [name for name in CHOOSING if written.get(name) is not None]
    if len(choosing) != 1:
        problem = "nothing says"
        if choosing:
            problem = f"{' and '.join(choosing)} say"
        raise document.error(path, f"{problem} who is in the group; expected one of {', '.join(CHOOSING)}.")
    if options.seed is not None and choosing != ["share"]:
        raise document.error((*path, "seed"), "only a share is drawn; remove the key.")
    if choosing != ["ids"]:
        return None
    try:
        return parsed_ids(written["ids"], num_clients)
    except OptionError as error:
        raise document.error((*path, "ids"), str(error)) from None


def _recipe_of_group(experiment: Recipe, reader: RecipeReader, path: KeyPath, written: Mapping[str, Any]) -> Recipe:
    """What a group's clients train by: the run's recipe, in which the group's keys are read anew."""
    document = _with_group(experiment.document, path, written)
    document.check_norm()
    reader = replace(reader, document=document)
    declared = keys_of(CalfatSection)
    sections: dict[str, Any] = {}
    if any(written.get(key) is not None for key in TRAINED):
        sections["train"] = read_host_section(document, "train_args")
    for key in ("trainer", "threat"):
        if written.get(key) is not None:
            sections[key] = reader.value(("calfat", key), declared[key])
    return replace(experiment, document=document, clients=(), **sections)


def _with_group(document: Document, path: KeyPath, written: Mapping[str, Any]) -> Document:
    """The recipe with a group's keys in the place of the run's; of a preset of its trainer only the options count."""
    threat = written.get("threat")
    if threat is not None and not isinstance(threat, Mapping):
        raise document.error((*path, "threat"), f"got {describe(threat)}, expected a section such as {{eps: 4/255}}.")
    changes: list[tuple[KeyPath, Any, str]] = []

    def change(key_of_run: KeyPath, value: Any, *key: str) -> None:
        changes.append((key_of_run, value, f"{document.place((*path, *key))}: {dotted(path)}"))

    for key in TRAINED:
        if written.get(key) is not None:
            change(("train_args", key), written[key], key)
    if written.get("trainer") is not None:
        change(("calfat", "trainer"), written["trainer"], "trainer")
    for key, value in (threat or {}).items():  # null, too: a group may have no by_class where the run has one
        change(("calfat", "threat", key), value, "threat", key)
    without = document.with_value(CLIENTS, None, document.place(CLIENTS))
    return without.with_values(changes)


def some_choose_by_size(experiment: Recipe) -> bool:
    """Whether a group is of the clients with the fewest or the most training examples."""
    return any(group.options.smallest or group.options.largest for group in experiment.clients)


def members_of(experiment: Recipe, sizes: Sequence[int]) -> dict[int, ClientGroup]:
    """Client id to its group, of those in one; the first group that chooses a client has it.

    ``sizes``, the training examples of each client, are needed only for ``smallest`` and ``largest``.
    """
    group_of: dict[int, ClientGroup] = {}
    for index, group in enumerate(experiment.clients):
        free = [client for client in range(experiment.num_clients) if client not in group_of]
        options = group.options
        if group.ids is not None:
            candidates = [client for client in group.ids if client not in group_of]
            count = len(candidates)
        elif options.share is not None:
            candidates = _drawn(experiment, options, index, free)
            count = round(options.share * experiment.num_clients)
            if count == 0:
                text = f"share: {options.share:g} of {experiment.num_clients} clients is none; take a larger one."
                raise experiment.document.error(group.path, text)
        else:
            candidates = sorted(free, key=lambda client: sizes[client], reverse=options.largest is not None)
            count = options.smallest or options.largest or 0
        if not candidates:
            text = "no client is left for this group: those above have them all."
            raise experiment.document.error(group.path, text)
        if count > len(candidates):
            text = f"it asks for {count} clients, and {len(free)} are in no group above."
            raise experiment.document.error(group.path, text)
        for client in candidates[:count]:
            group_of[client] = group
    if len(group_of) == experiment.num_clients and all(group.attacker for group in group_of.values()):
        raise experiment.document.error(CLIENTS, "every client is an attacker; expected at least one that is not.")
    return dict(sorted(group_of.items()))


def _drawn(experiment: Recipe, options: GroupOptions, index: int, free: Sequence[int]) -> list[int]:
    """The free clients in the order in which a share of them is drawn; ``index``: the place of the group."""
    import numpy as np

    seed = experiment.seed if options.seed is None else options.seed
    draw = np.random.default_rng(derive_seed(seed, "clients of a group", extra=index))
    return [int(client) for client in draw.permutation(free)]


def attackers_among(groups: Mapping[int, ClientGroup]) -> list[int]:
    """Ids of the clients that attack, of those in a group."""
    return [client for client, group in groups.items() if group.attacker is not None]
