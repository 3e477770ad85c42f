"""Differences between recipes, and those with which a run may continue."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from calfat_plugin.exact import StepSize, parse_number
from calfat_plugin.inner_attacks.atas import ENTRY as ATAS
from calfat_plugin.recipe.training import COSINE

#: Keys of the places of plugin files; their SHA-256 says whether they are the same.
PLUGIN_PLACE = re.compile(r"calfat\.plugins\.\w+\.file")

_PATIENCE = "train_args.patience"  # of a run that has not stopped yet, nothing that is done depends on it
_ROUNDS, _SCHEDULE = "train_args.comm_round", "train_args.lr_schedule"
STEP_SIZE = "calfat.threat.step_size"
FREE = (
    "device_args.",  # it may move to another machine; environment.json describes each
    "data_args.data_cache_dir",  # the same data in another place
    "common_args.host",  # whatever runs the rounds: the same bits
    "comm_args.backend",  # whatever carries the messages: the same bits
    "calfat.dataset.download",
    "calfat.evaluation.evidence_mb",
    "calfat.dataset.sha256",  # partition.json has the digests of what is used of the data
    "calfat.loggers",
    "calfat.reported.",
    "calfat.runtime.executor",  # whoever trains the clients: the same bits
    "calfat.runtime.scheduler",
    "calfat.flower.",  # how many clients train at a time
    "calfat.silo.",  # addresses, and how patient the parties are
)
_SHOWN = 3  # keys that a message names
_REASONS = {
    _ROUNDS: "A cosine schedule ends with the rounds, the warm-up of by_class is a share of them, and atas draws "
    "nothing anew in the last of them, so the finished ones would have been others",
    "calfat.runtime.threads": "A different number of threads changes the order of sums, "
    "so the last bits of the result would differ",
    "calfat.runtime.layout": "Another memory layout changes the order of sums, "
    "so the last bits of the result would differ",
    "calfat.runtime.precision": "Rounds in different arithmetic would make a model of neither",
    "calfat.plugins.": "Rounds with different versions of a plugin would make a model of neither",
    "calfat.evaluators.": "Two settings under one label would be mixed: give the new one a label of its own",
}


def same_but_rounds(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Dotted keys in which two recipes, as run, differ; first those with a value in both.

    An evaluator of the final evaluation that only one of them has is no difference, as training does not depend on it;
    nor is a plugin file that only the second one has, which the first could not have used.
    """
    shared = evaluators_of(first).keys() & evaluators_of(second).keys()
    flat_first, flat_second = _flat_by_label(first, shared), _flat_by_label(second, shared)
    plugins_then, plugins_now = (recipe.get("calfat", {}).get("plugins") or {} for recipe in (first, second))
    new_plugins = plugins_now.keys() - plugins_then.keys()
    of_new_plugins = tuple(f"calfat.plugins.{name}." for name in new_plugins)
    flat_second = {key: value for key, value in flat_second.items() if not key.startswith(of_new_plugins)}
    if comparable(first).get(STEP_SIZE) == comparable(second).get(STEP_SIZE):
        flat_first[STEP_SIZE] = flat_second[STEP_SIZE] = None
    every = sorted(set(flat_first) | set(flat_second))
    shorter = min(flat_first, flat_second, key=lambda recipe: recipe.get(_ROUNDS, 0))
    depends = COSINE in (flat_first.get(_SCHEDULE), flat_second.get(_SCHEDULE)) or _counts_its_rounds(shorter)
    free = _free(depends)
    keys = [key for key in every if not (key.startswith(free) or PLUGIN_PLACE.fullmatch(key))]
    missing = object()
    different = [key for key in keys if flat_first.get(key, missing) != flat_second.get(key, missing)]
    return sorted(different, key=lambda key: flat_first.get(key) is None or flat_second.get(key) is None)


def _free(depends_on_rounds: bool) -> tuple[str, ...]:
    """Keys that a resumed run may change, or what they begin with."""
    return (*FREE, _PATIENCE) if depends_on_rounds else (*FREE, _PATIENCE, _ROUNDS)


def unchanging_digest(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of what a resumed run may not change of its recipe: two runs with the same one make the same models.

    The number of rounds is a part of it where every round goes by it.
    """
    values = comparable(recipe)
    depends = values.get(_SCHEDULE) == COSINE or _counts_its_rounds(flat(recipe))
    free = _free(depends)
    kept = {key: value for key, value in values.items() if not (key.startswith(free) or PLUGIN_PLACE.fullmatch(key))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def evaluators_of(recipe: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Label to pick of the final evaluation's evaluators, of a recipe as run."""
    picks = recipe.get("calfat", {}).get("evaluators") or ()
    return {pick.get("label", pick["name"]): pick for pick in picks}


def _flat_by_label(recipe: Mapping[str, Any], labels: Collection[str]) -> dict[str, Any]:
    """As :func:`flat`, with a key for each option of these evaluators; others are left out."""
    picks = {label: pick for label, pick in evaluators_of(recipe).items() if label in labels}
    return flat({**recipe, "calfat": {**recipe.get("calfat", {}), "evaluators": picks}})


def _counts_its_rounds(recipe: Mapping[str, Any]) -> bool:
    """Whether training, also a group's, goes by the number of rounds: in a warm-up of eps by class, which is a share of
    them, or where ATAS goes on in the last one with what a longer run draws anew."""
    groups = (flat(group) for group in recipe.get("calfat.clients") or ())
    threats = [(recipe, "calfat.threat."), *((group, "threat.") for group in groups)]
    resets = [keys.get(f"{at}inner.reset") for keys, at in threats if keys.get(f"{at}inner.name") == ATAS.name]
    warmups = [keys.get(f"{at}by_class.warmup") for keys, at in threats]
    return any(warmups) or any(reset and recipe[_ROUNDS] % reset == 0 for reset in resets)


def changes(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str], when: str) -> str:
    """The first of these keys with both values, for a message; ``when`` is what the first recipe's is called."""
    flat_then, flat_now = _flat_by_label(then, evaluators_of(then)), _flat_by_label(now, evaluators_of(now))
    shown = "; ".join(f"{key}: {flat_then.get(key)!r} {when}, {flat_now.get(key)!r} now" for key in keys[:_SHOWN])
    return shown + (f" (and {len(keys) - _SHOWN} more)" if len(keys) > _SHOWN else "")


def why_not(keys: list[str]) -> str:
    """Why a change of these keys matters where that is not plain to see: a sentence and a space, or nothing."""
    return "".join(f"{why}. " for what, why in _REASONS.items() if any(key.startswith(what) for key in keys))


def going_further(recipe: Mapping[str, Any], done: int, what: str) -> str:
    """How to resume ``what`` of a run that has ``done`` rounds for more of them, or why that cannot be: sentences."""
    rounds = done + 10
    of = [{**recipe, "train_args": {**recipe["train_args"], "comm_round": number}} for number in (done, rounds)]
    if why := why_not(same_but_rounds(*of)):
        return f"It cannot go further. {why.rstrip()}"
    return f"To go further, resume {what} with --set {_ROUNDS}={rounds}."


def comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """As ``flat``, with the step as a multiple of eps: 0.025 at eps 0.1 is eps/4, as earlier versions wrote it."""
    found = flat(recipe)
    with suppress(KeyError, ValueError, ZeroDivisionError):  # no budget, or a recipe that was edited by hand
        eps = parse_number(found["calfat.threat.eps"])
        found[STEP_SIZE] = StepSize(f"{StepSize(found[STEP_SIZE], eps) / eps} eps").text
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, for every value of a recipe."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
