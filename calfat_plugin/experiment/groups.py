"""Groups of clients: how a recipe's are read, and which clients are in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calfat_plugin import entries
from calfat_plugin.errors import OptionError, PluginError, listed
from calfat_plugin.options import describe
from calfat_plugin.recipe.clients import BESIDE, CHOOSING, CLIENTS, OTHERS, TRAINED, GroupOptions, parsed_ids
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.seeds import derive_seed

if TYPE_CHECKING:
    from calfat_plugin.recipe.keys import Plugin

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SIZES = ("smallest", "largest")
_EXAMPLE = "[{ids: 0-1, trainer: standard}]"


def read_groups(
    document: Document,
    resolved: Callable[[Document], Recipe],
    attacker: Callable[[KeyPath, Any], Plugin[entries.AttackerEntry]],
) -> tuple[ClientGroup, ...]:
    """The groups of a recipe; ``resolved`` is the experiment of one without groups."""
    raw = document.get(CLIENTS)
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(item, Mapping) for item in raw):
        raise document.error(CLIENTS, f"got {describe(raw)}, expected a list such as {_EXAMPLE}.")
    without = document.with_value(CLIENTS, None, document.place(CLIENTS))
    groups: list[ClientGroup] = []
    for index, given in enumerate(raw):
        path: KeyPath = (*CLIENTS, index)
        options = document.options(
            path, GroupOptions, {key: value for key, value in given.items() if key not in BESIDE}, also=tuple(BESIDE)
        )
        recipe = resolved(_with_group(without, document, path, given))
        chosen = [name for name in CHOOSING if given.get(name) is not None]
        if len(chosen) != 1:
            found = f"{' and '.join(chosen)} say" if chosen else "nothing says"
            text = f"{found} who is in the group; expected one of {', '.join(CHOOSING)}."
            raise document.error(path, text)
        try:
            ids = parsed_ids(given["ids"], recipe.num_clients) if chosen == ["ids"] else None
        except OptionError as error:
            raise document.error((*path, "ids"), str(error)) from None
        if options.seed is not None and chosen != ["share"]:
            raise document.error((*path, "seed"), "only a share is drawn; remove the key.")
        changed = tuple(key for key in ("trainer", "threat") if given.get(key) is not None)
        changed += tuple(key for key in ("inner", "by_class") if key in (given.get("threat") or {}))
        picked = attacker((*path, "attacker"), given["attacker"]) if given.get("attacker") is not None else None
        if not changed and picked is None and all(getattr(options, key) is None for key in TRAINED):
            raise document.error(path, f"nothing differs in this group; expected one of {listed(_CHANGES)}.")
        name = options.name or f"group{index + 1}"
        if not _NAME.fullmatch(name) or name == OTHERS:
            text = f"got '{name}', expected letters, digits, '-' and '_', and not '{OTHERS}'."
            raise document.error((*path, "name"), text)
        if name in (group.name for group in groups):
            raise document.error((*path, "name"), f"there are two groups '{name}'; give one another name.")
        groups.append(ClientGroup(name, replace(options, name=None), ids, recipe, picked, changed, path))
    return tuple(groups)


_CHANGES = ("trainer", "threat", "attacker", *TRAINED)


def _with_group(without: Document, document: Document, path: KeyPath, given: Mapping[str, Any]) -> Document:
    """The recipe that a group's clients train by."""
    changes: dict[KeyPath, Any] = {("train_args", key): given[key] for key in TRAINED if given.get(key) is not None}
    if given.get("trainer") is not None:
        changes["calfat", "trainer"] = given["trainer"]
    threat = given.get("threat")
    if threat is not None and not isinstance(threat, Mapping):
        raise document.error((*path, "threat"), f"got {describe(threat)}, expected a section such as {{eps: 4/255}}.")
    changes |= {("calfat", "threat", key): value for key, value in (threat or {}).items()}

    def place(key: KeyPath) -> str:
        where = (*path, key[-1]) if key[0] == "train_args" else (*path, *key[1:])
        return f"{document.place(where)}: {dotted(path)}"

    return without.with_values((key, value, place(key)) for key, value in changes.items())


def check_groups(experiment: Recipe, attributed: Callable[[Plugin[Any]], AbstractContextManager[None]]) -> None:
    """Refuse groups that no run could have; ``attributed`` lets errors about a plugin begin with its name."""
    document = experiment.document
    owner: dict[int, str] = {}
    for group in experiment.clients:
        for client in group.ids or ():
            if client in owner:
                raise document.error((*group.path, "ids"), f"client {client} is in the group '{owner[client]}', too.")
            owner[client] = group.name
        if group.attacker is not None and experiment.common.training_type != "simulation":
            raise document.error(
                (*group.path, "attacker"),
                "attackers exist in simulations only: across silos each party is what it is. Remove the key, or set "
                "common_args.training_type: simulation.",
            )
        if experiment.partition.entry.name == SILO and any(getattr(group.options, key) for key in _SIZES):
            raise document.error(
                group.path, "with partition_method: silo no party knows how many examples the others have; use ids."
            )
        found, wanted = (
            [pick.entry.name for pick in (recipe.trainer, recipe.modifier) if pick.entry.reshapes]
            for recipe in (group.recipe, experiment)
        )
        if found != wanted:  # one model is averaged
            raise document.error(
                (*group.path, "trainer"),
                f"'{({*found} ^ {*wanted}).pop()}' changes the model's tensors, so either all clients train with it or "
                "none does.",
            )
        # What a group trains by is checked beside the run's, of which it has its own train_args and threat.
        beside = replace(experiment, train=group.recipe.train, threat=group.recipe.threat)
        for plugin in (group.recipe.trainer, group.recipe.modifier, group.recipe.threat.inner):
            try:
                with attributed(plugin):
                    plugin.entry.check(plugin.options, beside)
            except (OptionError, PluginError) as error:
                raise document.error(group.path, str(error)) from None
    if not any(getattr(group.options, key) for group in experiment.clients for key in _SIZES):
        members_of(experiment, ())  # for its errors


def members_of(experiment: Recipe, sizes: Sequence[int]) -> dict[int, ClientGroup]:
    """Client id to its group, of those in one; the first group that chooses a client has it.

    ``sizes``, the training examples of each client, are needed only for ``smallest`` and ``largest``.
    """
    found: dict[int, ClientGroup] = {}
    for index, group in enumerate(experiment.clients):
        free = [client for client in range(experiment.num_clients) if client not in found]
        count, ordered, options, problem = 0, free, group.options, ""
        if group.ids is not None:
            ordered = [client for client in group.ids if client not in found]
            count = len(ordered)
        elif options.share is None:
            count = options.smallest or options.largest or 0
            ordered = sorted(free, key=lambda client: sizes[client], reverse=options.largest is not None)
        else:
            import numpy as np

            count = round(options.share * experiment.num_clients)
            seed = experiment.seed if options.seed is None else options.seed
            draw = np.random.default_rng(derive_seed(seed, "clients of a group", extra=index))
            ordered = [int(client) for client in draw.permutation(free)]
            if count == 0:
                problem = f"share: {options.share:g} of {experiment.num_clients} clients is none; take a larger one."
        if not ordered:
            problem = problem or "no client is left for this group: those above have them all."
        elif count > len(ordered):
            problem = f"it asks for {count} clients, and {len(free)} are in no group above."
        if problem:
            raise experiment.document.error(group.path, problem)
        found |= dict.fromkeys(ordered[:count], group)
    if len(found) == experiment.num_clients and all(group.attacker for group in found.values()):
        raise experiment.document.error(CLIENTS, "every client is an attacker; expected at least one that is not.")
    return dict(sorted(found.items()))


def attackers_among(groups: Mapping[int, ClientGroup]) -> list[int]:
    """Ids of the clients that attack, of those in a group."""
    return [client for client, group in groups.items() if group.attacker is not None]
