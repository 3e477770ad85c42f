"""The host's sections of a recipe: our keys typed, every other key sorted by what FedML would make of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from calfat_plugin.errors import did_you_mean
from calfat_plugin.options import describe, describe_options, yaml_text
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_keys import BY_NAME, HOST_KEYS, REFUSED_SECTIONS, Effect, HostKey
from calfat_plugin.recipe.keys import Section, keys_of
from calfat_plugin.recipe.sections import options_at, section_at

_OUR_KEYS = {name: [info.name for info in describe_options(config)] for name, config in schema.HOST_SECTIONS.items()}
_HOME = {key: name for name, keys in _OUR_KEYS.items() for key in keys}
_HOME_IN_CALFAT = {
    info.name: f"calfat.{name}"
    for name, what in keys_of(schema.CalfatSection).items()
    if isinstance(what, Section)
    for info in describe_options(what.config)
}
_HOME_IN_CALFAT |= dict.fromkeys(schema.CALFAT_KEYS, "calfat")
_HOST_HOME = {key: name for name, keys in HOST_KEYS.items() for key in keys}
_MISSPELT = 0.8  # similarity from which an unknown name must be one of ours: calfta, train_arg, but not server_args
_MAX_UNKNOWN = 50  # unknown names that are worth a warning each; with more, the file is something else

Sections = Mapping[str, Mapping[str, Any]]


def read_host_sections(document: Document, warnings: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """All sections but ``calfat``.

    Args:
        warnings: receives a finding for every key that has no effect.

    Returns:
        (section to our typed keys, section to the further keys that FedML reads and that have an effect).

    Raises:
        RecipeError: a misspelt or misplaced key, or one that promises what there is not.
    """
    _check_names(document, warnings)
    sections = {name: section_at(document, (name,)) for name in (*_OUR_KEYS, *document.data) if name != "calfat"}
    passed_on: dict[str, dict[str, Any]] = {}
    for name, section in sections.items():
        keys = [key for key in section if key not in _OUR_KEYS.get(name, ())]
        _refuse_many(document, (name,), [key for key in keys if key not in BY_NAME], "keys")
        for key in keys:
            if _is_in_force(document, sections, (name, key), warnings):
                passed_on.setdefault(name, {})[key] = section[key]
    typed: dict[str, Any] = {
        name: options_at(
            document, (name,), config, {key: sections[name][key] for key in _OUR_KEYS[name] if key in sections[name]}
        )
        for name, config in schema.HOST_SECTIONS.items()
    }
    if typed["tracking_args"].enable_wandb and not isinstance(_value(sections, "wandb_project"), str):
        raise document.error(
            ("tracking_args", "enable_wandb"),
            "FedML also needs the name of a project; write it as tracking_args.wandb_project.",
        )
    return typed, passed_on


def _check_names(document: Document, warnings: list[str]) -> None:
    """A section that is nearly one of ours would be ignored as a whole, which nobody means."""
    ours = (*_OUR_KEYS, "calfat")
    unknown = [name for name in document.data if name not in HOST_KEYS and name not in ours]
    _refuse_many(document, (), unknown, "sections")
    for name in unknown:
        refuse_misplaced(document, (name,))
        near = _near(name, ours)
        if near:
            raise document.error((name,), f"there is no such section. Did you mean '{near}'?")
        warnings.append(
            f"{document.place((name,))}: {name}: not a section of FedML or calfat_plugin."
            f"{did_you_mean(name, (*HOST_KEYS, 'calfat'))}"
        )


def refuse_misplaced(document: Document, path: KeyPath) -> None:
    """Refuse a key of another section."""
    key = str(path[-1])
    homes = (_HOME, _HOME_IN_CALFAT, _HOST_HOME)
    if isinstance(document.get(path), Mapping):  # model: {...} are options, model: cnn is a name
        homes = (_HOME_IN_CALFAT, _HOME, _HOST_HOME)
    home = next((found[key] for found in homes if key in found), "")
    if home and home != path[0]:
        raise document.error(path, f"this key belongs in the section {home}; move it there.")


def _refuse_many(document: Document, path: KeyPath, unknown: list[str], what: str) -> None:
    if len(unknown) > _MAX_UNKNOWN:
        raise document.error(
            (*path, unknown[0]),
            f"this is one of {len(unknown)} {what} here that neither FedML nor calfat_plugin knows; docs/recipes.md "
            "describes a recipe.",
        )


def _is_in_force(document: Document, sections: Sections, path: tuple[str, str], warnings: list[str]) -> bool:
    """Whether FedML acts on the key at ``path``, which is none of ours in that section; if not, this is reported."""
    section, key = path
    value = sections[section][key]
    if key in _HOME and section not in REFUSED_SECTIONS:  # where it is part of a promise that there is not
        raise document.error(path, f"this key belongs in the section {_HOME[key]}; move it there.")
    row = BY_NAME.get(key)
    if section in REFUSED_SECTIONS and (row is None or row.switch or row.effect is not Effect.REFUSED):
        row = REFUSED_SECTIONS[section]
    if row is None:
        _report_unknown(document, path, warnings)
        return False
    switch = _value(sections, row.switch)
    if switch is False or value is None or value in row.harmless:
        return False
    if row.effect is Effect.RENAMED:
        right = row.text.removeprefix(f"{section}.")
        raise document.error(path, f"this key has no effect here. Did you mean '{right}'?")
    if row.effect is Effect.REFUSED:
        raise document.error(path, _refusal(row, value))
    if row.effect is Effect.ACTS and switch is True:
        return True
    why = {
        Effect.ACTS: f"it needs {_HOME.get(row.switch)}.{row.switch}: true",
        Effect.OVERRIDDEN: f"it is decided by {row.text}",
        Effect.NOTHING: row.text,
    }[row.effect]
    warnings.append(f"{document.place(path)}: {dotted(path)}: this key has no effect here: {why}.")
    return False


def _refusal(row: HostKey, value: Any) -> str:
    instead = f", or write {row.switch}: false" if row.switch else ""
    if row.harmless:
        instead = f", or write {yaml_text(row.harmless[0])}"
    return f"got {describe(value)}, but {row.text}. Remove the key{instead}."


def _report_unknown(document: Document, path: tuple[str, str], warnings: list[str]) -> None:
    """A key that neither side knows; keys of an unknown section share the section's warning.

    Raises:
        RecipeError: it is nearly one that has an effect in that section.
    """
    section, key = path
    if section not in HOST_KEYS:
        return
    if key not in _HOST_HOME:
        refuse_misplaced(document, path)
    acting = [name for name, row in HOST_KEYS[section].items() if row.effect is Effect.ACTS]
    right = (*_OUR_KEYS.get(section, ()), *acting)
    near = _near(key, right)
    if near:
        raise document.error(path, f"there is no such key. Did you mean '{near}'?")
    warnings.append(
        f"{document.place(path)}: {dotted(path)}: this key is unknown to FedML and calfat_plugin and "
        f"has no effect.{did_you_mean(key, right)}"
    )


def _near(name: str, known: tuple[str, ...]) -> str:
    """The one of ``known`` that ``name`` must mean; empty where there is none."""
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1, cutoff=_MISSPELT)), "")


def _value(sections: Sections, key: str) -> Any:
    """The value of a key of the host, whose sections all end up on one object; None where no section has it."""
    return next((section[key] for section in sections.values() if key in section), None)
