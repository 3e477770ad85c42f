"""FedML's ``attack_args``: an attack of the host's is a group of ``calfat.clients`` whose attacker does the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from calfat_plugin.errors import listed
from calfat_plugin.options import describe, yaml_text
from calfat_plugin.recipe.clients import CLIENTS
from calfat_plugin.recipe.defenses import asked_of_host
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.training import TrainArgs

_SECTION = "attack_args"
_PROBABILITY = "attack_prob"
_MODES: Mapping[str, Mapping[str, Any]] = {
    "random": {"name": "untrained", "values": "uniform"},
    "zero": {"name": "untrained", "values": "zero"},
    "flip": {"name": "sign_flip", "scale": 1},
}


@dataclass(frozen=True)
class _Asked:
    """What ``attack_args`` say of an attack."""

    document: Document
    kind: str
    given: Mapping[str, Any]

    def value(self, key: str, wanted: str, holds: Callable[[Any], bool]) -> Any:
        """What the key says; an error where it says nothing, or something else than is wanted."""
        value = self.given.get(key)
        if not holds(value):
            text = f"got {describe(value)}, expected {wanted} for the attack '{self.kind}'."
            raise self.document.error((_SECTION, key), text)
        return value

    @property
    def clients(self) -> int:
        """How many train in a round; what is no number is left to who reads that section."""
        keys = ("client_num_per_round", "client_num_in_total")
        found = (self.document.get(("train_args", key)) for key in keys)
        return next((number for number in found if _whole(number) and number > 0), TrainArgs.client_num_in_total)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _labels(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_whole, value))


def _byzantine(asked: _Asked) -> dict[str, Any]:
    mode = asked.value("attack_mode", f"one of {listed(_MODES)}", lambda value: value in [*_MODES])
    number = asked.value("byzantine_client_num", "a whole number, >= 1", lambda value: _whole(value) and value > 0)
    return {"share": min(1.0, number / asked.clients), "attacker": {**_MODES[mode]}}


def _label_flipping(asked: _Asked) -> dict[str, Any]:
    keys = {"source": "original_class_list", "target": "target_class_list"}
    lists = {option: asked.value(key, "a list of labels such as [3, 5]", _labels) for option, key in keys.items()}
    share = asked.value(
        "ratio_of_poisoned_client",
        "a number, 0 < value <= 1,",
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1,
    )
    return {"share": share, "attacker": {"name": "label_flip", **lists}}


def _model_replacement(asked: _Asked) -> dict[str, Any]:
    client, length = asked.given.get("malicious_client_id"), asked.given.get("scale_factor_S")
    who = {"share": 1 / asked.clients} if client is None else {"ids": client}
    how = {"factor": asked.clients} if length is None else {"norm": length}
    return {**who, "attacker": {"name": "scaling", **how}}


class _Attack(NamedTuple):
    """What the group in the place of an attack holds, and the keys of ``attack_args`` that it reads."""

    group: Callable[[_Asked], dict[str, Any]]
    options: Collection[str]


ATTACKS: Mapping[str, _Attack] = {
    "byzantine": _Attack(_byzantine, ("attack_mode", "byzantine_client_num", _PROBABILITY)),
    "label_flipping": _Attack(
        _label_flipping, ("original_class_list", "target_class_list", "ratio_of_poisoned_client", _PROBABILITY)
    ),
    "model_replacement": _Attack(_model_replacement, ("malicious_client_id", "scale_factor_S", _PROBABILITY)),
}
"""``attack_args.attack_type`` of FedML 0.9.6 to what does it here."""


def with_attack(document: Document, warnings: list[str]) -> Document:
    """Append to ``calfat.clients`` the attackers that ``attack_args`` ask for; the host's own attack stays off.

    Args:
        warnings: receives a sentence on the group.

    Raises:
        RecipeError: a type or a parameter that there is not, or two answers to who attacks.
    """
    options = {kind: attack.options for kind, attack in ATTACKS.items()}
    found = asked_of_host(document, _SECTION, "attack", options, "attack")
    if found is None:
        return document
    kind, given = found
    others = document.get(CLIENTS)
    others = [] if others is None else others
    if not isinstance(others, list):
        return document  # who reads the groups has the words
    if any(isinstance(group, Mapping) and group.get("attacker") is not None for group in others):
        raise document.error(
            (_SECTION, "attack_type"),
            f"'{kind}' selects attackers, and calfat.clients in {document.place(CLIENTS)} has some, too; keep one of "
            "the two.",
        )
    asked = _Asked(document, kind, {_PROBABILITY: 1, **given})
    asked.value(_PROBABILITY, "1, as attackers here attack in every round,", lambda value: value in (1, 1.0))
    group = ATTACKS[kind].group(asked)
    place = document.place((_SECTION,))
    who = (
        "the same clients attack in every round, where FedML draws them anew in each"
        if "share" in group
        else "the client of this id attacks, where FedML takes the one at this place among a round's clients"
    )
    warnings.append(
        f"{place}: {_SECTION}: FedML's '{kind}' is a group of calfat.clients here: {yaml_text(group)}; {who}."
    )
    off, where = document.with_value((_SECTION,), {"enable_attack": False}, place), f"{place}: {_SECTION}"
    grown = off.with_value(CLIENTS, [*others, group], where)
    return replace(grown, places={**grown.places, **off.places, (*CLIENTS, len(others)): where})
