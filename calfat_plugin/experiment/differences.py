"""Differences between recipes, and those with which a run may continue.

Recipes here are mappings as a run wrote them, since one of the two may be of a run that is long over. Which keys a
resumed run may change is a tag on each key (``Tag.MAY_CHANGE``); this module adds what depends on several keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from calfat_plugin.exact import StepSize, parse_number
from calfat_plugin.inner_attacks.atas import ENTRY as ATAS
from calfat_plugin.options import Tag
from calfat_plugin.recipe.document import flat
from calfat_plugin.recipe.tagged_keys import has_tag, is_below, reasons_to_keep
from calfat_plugin.recipe.training import COSINE

STEP_SIZE = "calfat.threat.step_size"
_ROUNDS, _SCHEDULE = "train_args.comm_round", "train_args.lr_schedule"
_NAMED = 3  # keys that a message names
_MISSING = object()


def same_but_rounds(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two recipes, as run, differ, and which a resumed run may not change.

    First those with a value in both. An evaluator of the final evaluation that only one of them has is no difference,
    as training does not depend on it; nor is a plugin file that only the second one has, which the first could not have
    used.
    """
    shared = evaluators_of(first).keys() & evaluators_of(second).keys()
    flat_first, flat_second = _flat_by_label(first, shared), _flat_by_label(second, shared)
    plugins_then = first.get("calfat", {}).get("plugins") or {}
    plugins_now = second.get("calfat", {}).get("plugins") or {}
    for name in plugins_now.keys() - plugins_then.keys():
        for key in flat({name: plugins_now[name]}, "calfat.plugins."):
            del flat_second[key]
    if comparable(first).get(STEP_SIZE) == comparable(second).get(STEP_SIZE):
        # The same step, which an earlier version wrote as a number.
        flat_first[STEP_SIZE] = flat_second[STEP_SIZE] = None
    different = []
    for key in sorted({*flat_first, *flat_second}):
        if flat_first.get(key, _MISSING) != flat_second.get(key, _MISSING) and not has_tag(key, Tag.MAY_CHANGE):
            different.append(key)
    shorter = min(flat_first, flat_second, key=lambda recipe: recipe.get(_ROUNDS, 0))
    has_cosine = COSINE in (flat_first.get(_SCHEDULE), flat_second.get(_SCHEDULE))
    if _ROUNDS in different and not has_cosine and not _counts_its_rounds(shorter):
        different.remove(_ROUNDS)
    return sorted(different, key=lambda key: flat_first.get(key) is None or flat_second.get(key) is None)


def unchanging_digest(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of what a resumed run may not change of its recipe: two runs with the same one make the same models.

    The number of rounds is a part of it where every round goes by it.
    """
    fixed = {key: value for key, value in comparable(recipe).items() if not has_tag(key, Tag.MAY_CHANGE)}
    if fixed.get(_SCHEDULE) != COSINE and not _counts_its_rounds(flat(recipe)):
        fixed.pop(_ROUNDS, None)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()


def _counts_its_rounds(recipe: Mapping[str, Any]) -> bool:
    """Whether training, also a group's, goes by the number of rounds; ``recipe``: flat.

    It does in a warm-up of eps by class, which is a share of them, and where ATAS goes on in the last round with what a
    longer run draws anew.
    """
    threats = [(recipe, "calfat.threat.")]
    for group in recipe.get("calfat.clients") or ():
        threats.append((flat(group), "threat."))
    for keys, at in threats:
        if keys.get(f"{at}by_class.warmup"):
            return True
        reset = keys.get(f"{at}inner.reset")
        if keys.get(f"{at}inner.name") == ATAS.name and reset and recipe[_ROUNDS] % reset == 0:
            return True
    return False


def changes(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str], when: str) -> str:
    """The first of these keys with both values, for a message; ``when`` is what the first recipe's is called."""
    flat_then, flat_now = _flat_by_label(then, evaluators_of(then)), _flat_by_label(now, evaluators_of(now))
    named = [f"{key}: {flat_then.get(key)!r} {when}, {flat_now.get(key)!r} now" for key in keys[:_NAMED]]
    text = "; ".join(named)
    if len(keys) > _NAMED:
        text += f" (and {len(keys) - _NAMED} more)"
    return text


def why_not(keys: list[str]) -> str:
    """Why a change of these keys matters where that is not plain to see: sentences, each with a space; or nothing."""
    text = ""
    for above, reason in reasons_to_keep().items():
        if any(is_below(key, above) for key in keys):
            text += f"{reason}. "
    return text


def going_further(recipe: Mapping[str, Any], done: int, what: str) -> str:
    """How to resume ``what`` of a run that has ``done`` rounds for more of them, or why that cannot be: sentences."""
    rounds = done + 10
    now = {**recipe, "train_args": {**recipe["train_args"], "comm_round": done}}
    longer = {**recipe, "train_args": {**recipe["train_args"], "comm_round": rounds}}
    why = why_not(same_but_rounds(now, longer))
    if why:
        return f"It cannot go further. {why.rstrip()}"
    return f"To go further, resume {what} with --set {_ROUNDS}={rounds}."


def evaluators_of(recipe: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Label to pick of the final evaluation's evaluators, of a recipe as run."""
    picks = recipe.get("calfat", {}).get("evaluators") or ()
    return {pick.get("label", pick["name"]): pick for pick in picks}


def _flat_by_label(recipe: Mapping[str, Any], labels: Collection[str]) -> dict[str, Any]:
    """As :func:`flat`, with a key for each option of these evaluators; others are left out."""
    picks = {label: pick for label, pick in evaluators_of(recipe).items() if label in labels}
    return flat({**recipe, "calfat": {**recipe.get("calfat", {}), "evaluators": picks}})


def comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """As ``flat``, with the step as a multiple of eps: 0.025 at eps 0.1 is eps/4, as earlier versions wrote it."""
    keys = flat(recipe)
    with suppress(KeyError, ValueError, ZeroDivisionError):  # no budget, or a recipe that was edited by hand
        eps = parse_number(keys["calfat.threat.eps"])
        keys[STEP_SIZE] = StepSize(f"{StepSize(keys[STEP_SIZE], eps) / eps} eps").text
    return keys
