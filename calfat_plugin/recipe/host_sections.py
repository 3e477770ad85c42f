"""The host's sections of a recipe: keys that act are typed, a switch of what there is not is refused, and one warning
lists what has no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calfat_plugin.errors import did_you_mean
from calfat_plugin.options import describe, describe_options
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.keys import Section, keys_of

_KEYS: dict[str, list[str]] = {"tracking_args": []}  # FedML's own section, of which no key acts here
for _name, _config in schema.HOST_SECTIONS.items():
    _KEYS[_name] = [info.name for info in describe_options(_config)]
_OURS = (*schema.HOST_SECTIONS, "tracking_args", "calfat")
#: Key to the section that it is of: of the host, and of ``calfat``.
_HOME: dict[str, str] = {}
for _name, _keys in _KEYS.items():
    _HOME |= dict.fromkeys(_keys, _name)
_HOME_IN_CALFAT: dict[str, str] = {}
for _name, _key in keys_of(schema.CalfatSection).items():
    if isinstance(_key, Section):
        _HOME_IN_CALFAT |= {info.name: f"calfat.{_name}" for info in describe_options(_key.config)}
_HOME_IN_CALFAT |= dict.fromkeys(schema.CALFAT_KEYS, "calfat")
_MISSPELT = 0.8  # similarity from which an unknown section must be one of ours: calfta, train_arg, but not server_args
_OTHER_WORDS = {  # what other programs call a key, where no spelling finds it
    "lr": "train_args.learning_rate",
    "wd": "train_args.weight_decay",
    "local_epochs": "train_args.epochs",
    "seed": "common_args.random_seed",
}

SWITCHES: Mapping[str, str] = {
    "enable_dp": "there is no differential privacy here: no client's update is clipped and no noise is added",
    "enable_defense": "FedML's own defences do not run here (calfat.aggregator has others)",
    "enable_attack": "FedML's own attacks do not run here (calfat.clients has others)",
    "enable_fhe": "there is no homomorphic encryption here: the server sees every client's update",
    "enable_wandb": "FedML's own tracking does not run here (calfat.loggers: [wandb] is ours)",
}
"""FedML's switches of what there is not here, and the reason. FedML reads them in any section."""

_SECURE = "there is no secure aggregation here: the server sees every client's update"
_REFUSED_OPTIMIZERS = {
    **dict.fromkeys(("lsa", "sa", "turbo_aggregate"), _SECURE),
    "fedavg_robust": SWITCHES["enable_defense"],
}


def read_host_sections(document: Document, warnings: list[str]) -> dict[str, Any]:
    """All sections but ``calfat``, typed, by name; ``warnings`` receives a finding for what has no effect."""
    without_effect: list[KeyPath] = []
    for name in document.data:
        if name != "calfat":
            without_effect += _without_effect(document, name)
    typed = {name: read_host_section(document, name) for name in schema.HOST_SECTIONS}
    optimizer = typed["train_args"].federated_optimizer
    reason = _REFUSED_OPTIMIZERS.get(optimizer.lower())
    if reason:
        raise document.error(
            ("train_args", "federated_optimizer"), f"got '{optimizer}', but {reason}. Remove the key, or write FedAvg."
        )
    if without_effect:  # one warning for all: a file from elsewhere may have a dozen of them
        first, *others = without_effect
        kind = "key"
        if len(first) == 1:
            kind = "section"
        text = f"{document.place(first)}: {dotted(first)}: this {kind} has no effect here.{_hint(first)}"
        for path in others:
            text += f" Nor has {document.place(path)}: {dotted(path)}.{_hint(path)}"
        warnings.append(text)
    return typed


def read_host_section(document: Document, name: str) -> Any:
    """A section of the host, typed; keys of it that do not act here are left out."""
    known = {key: value for key, value in document.section((name,)).items() if key in _KEYS[name]}
    return document.options((name,), schema.HOST_SECTIONS[name], known)


def refuse_misplaced(document: Document, path: KeyPath) -> None:
    """Refuse a key of another section."""
    homes = {**_HOME_IN_CALFAT, **_HOME}
    if isinstance(document.get(path), Mapping):  # model: {...} are options, model: cnn is a name
        homes = {**_HOME, **_HOME_IN_CALFAT}
    home = homes.get(str(path[-1]))
    if home and home != path[0]:
        raise document.error(path, f"this key belongs in the section {home}; move it there.")


def _without_effect(document: Document, name: str) -> Iterator[KeyPath]:
    """The keys of a section on which nobody acts, or the section itself where that is true of all its keys."""
    if name not in (*_OURS, "attack_args"):  # FedML's, and no misspelt data_args
        refuse_misplaced(document, (name,))
        hint = did_you_mean(name, _OURS, cutoff=_MISSPELT)
        if hint:
            raise document.error((name,), f"there is no such section.{hint}")
    section = document.section((name,))
    # null and false ask for nothing: they are the defaults of all our keys that take them.
    keys = [key for key, value in section.items() if value is not None and value is not False]
    for key in keys:
        if key in SWITCHES:
            text = f"got {describe(section[key])}, but {SWITCHES[key]}. Write {key}: false."
            raise document.error((name, key), text)
    is_off = any(section.get(switch) is False for switch in SWITCHES)
    if name not in _KEYS:
        if keys and not is_off:
            yield (name,)
        return
    for key in keys:
        if key not in _KEYS[name]:
            refuse_misplaced(document, (name, key))
            if not (is_off and name == "tracking_args"):
                yield name, key


def _hint(path: KeyPath) -> str:
    """What a key without effect was probably meant to be; empty for a section."""
    if len(path) == 1:
        return ""
    name, key = map(str, path)
    if key in _OTHER_WORDS:
        return f" Did you mean '{_OTHER_WORDS[key]}'?"
    return did_you_mean(key, _KEYS[name])
