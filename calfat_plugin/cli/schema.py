"""``calfat schema``: a JSON schema of recipes, for editors; ``calfat check`` remains the judge.

Made from the options that the parser reads and the plugins that are installed. It accepts whatever ``calfat check``
accepts; what depends on several keys at once, or on files, is left to the command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from calfat_plugin import entries
from calfat_plugin.cli.as_json import json_output
from calfat_plugin.cli.options import plugin_option
from calfat_plugin.exact import StepSize
from calfat_plugin.experiment import defined_modifiers
from calfat_plugin.options import OptionInfo, describe_options, to_plain
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.keys import Groups, Key, OnePlugin, OptionsOf, Others, Plugins, Section, Sections, keys_of
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.recipe.schema import HOST_SECTIONS, CalfatSection, Threat
from calfat_plugin.recipe.training import Additions
from calfat_plugin.registry import Registry
from calfat_plugin.version import __version__

Schema = dict[str, Any]

_NUMBER = r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?(\s*/\s*[0-9.]+)?"  # 1e-3 is a text in YAML 1.1, 8/255 in all
_NUMBER_IN_TEXT = rf"^\s*{_NUMBER}\s*$"
_STEP_IN_TEXT = rf"^\s*({_NUMBER}|({_NUMBER})?\s*eps\s*(/\s*[0-9.]+)?)\s*$"
_TYPES = {int: "integer", float: "number", Fraction: "number", StepSize: "number", bool: "boolean", str: "string"}
_NULL: Schema = {"type": "null"}


@click.command()
@plugin_option
def schema(plugins: tuple[Path, ...]) -> None:
    """Print a JSON schema of recipes, with the plugins that are installed, for editors."""
    with json_output(True) as show:
        show(recipe_schema(Registry.for_recipe(with_plugins(Document("calfat schema", {}), plugins))))


def recipe_schema(registry: Registry) -> Schema:
    """The schema (JSON Schema, draft 7) of a recipe that names plugins of ``registry``."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Recipe of calfat-plugin {__version__}",
        "type": "object",
        "required": ["calfat"],
        "properties": {
            **{name: _section(registry, config, strict=False) for name, config in HOST_SECTIONS.items()},
            "calfat": _section(registry, CalfatSection),
        },
    }


def _object(properties: Mapping[str, Schema], *, strict: bool = True) -> Schema:
    """A section, which may be left empty."""
    return {"type": ["object", "null"], "properties": dict(properties), "additionalProperties": not strict}


def _section(registry: Registry, config: type, *, strict: bool = True) -> Schema:
    """The section with the keys of ``config``."""
    keys = keys_of(config)
    section = _object(
        {
            **_options(config),
            **{name: _below(registry, what) for name, what in keys.items() if not isinstance(what, Others)},
        },
        strict=strict,
    )
    for what in keys.values():
        if isinstance(what, Others):
            section["additionalProperties"] = _value(what.info)
    return section


def _below(registry: Registry, what: Key) -> Schema:
    """What a key of a section holds."""
    match what:
        case Section():
            return _section(registry, what.config)
        case Sections():
            return {"type": ["object", "null"], "additionalProperties": _section(registry, what.config)}
        case OnePlugin():
            return _choice(registry, what.kind, default=what.default)
        case Plugins():
            return {"type": ["array", "null"], "items": _choice(registry, what.kind)}
        case Groups():
            beside = {
                "ids": {"type": ["integer", "string", "array"]},
                "trainer": _choice(registry, entries.TrainerEntry),
                "threat": _section(registry, Threat),
                "attacker": _choice(registry, entries.AttackerEntry),
            }
            return {"type": ["array", "null"], "items": _object({**_options(what.config), **beside})}
        case OptionsOf():
            return _options_of(registry, what.kind)
    raise TypeError(repr(what))


def _options(config: type) -> dict[str, Schema]:
    return {info.name: _value(info) for info in describe_options(config)}


def _value(info: OptionInfo) -> Schema:
    value: Schema = {"description": info.help + (f" ({info.unit})" if info.unit else "")}
    if not info.required:
        value["default"] = to_plain(info.default)
    optional = info.optional and not info.many  # a list may be null, its items may not
    types = [_TYPES[info.type], *(["null"] if optional else [])]
    each: Schema = {}
    if info.choices:
        each["enum"] = [*info.choices, *([None] if optional else [])]
    elif info.type in (int, float, Fraction, StepSize):
        types.append("string")
        each["pattern"] = _STEP_IN_TEXT if info.type is StepSize else _NUMBER_IN_TEXT
        if info.low is not None:
            each["exclusiveMinimum" if info.open_low else "minimum"] = float(info.low)
        if info.high is not None:
            each["maximum"] = float(info.high)
    each["type"] = types
    if not info.many:
        return value | each
    return value | {"type": ["array", "null"] if info.optional else "array", "items": each}


def _choice(registry: Registry, kind: type[entries.Entry], default: str | None = None) -> Schema:
    """A plugin by name, or with its options; ``default`` is meant where a mapping has no name."""
    offered = [entry for entry, _ in registry.offers(kind)]
    names = [_names(entry) for entry in offered]
    cases = [
        {
            "if": {"properties": {"name": _names(entry)}, "required": [] if entry.name == default else ["name"]},
            "then": _with_options(registry, entry),
        }
        for entry in offered
    ]
    mapping = {
        "type": "object",
        "properties": {"name": {"anyOf": names}},
        "required": [] if default else ["name"],
        "allOf": cases,
    }
    return {"if": {"type": "object"}, "then": mapping, "else": {"anyOf": [*names, *([_NULL] if default else [])]}}


def _names(entry: entries.Entry) -> Schema:
    """What a recipe calls an entry: its name, which may end with a number."""
    names: Schema = {"const": entry.name, "description": entry.summary}
    if entry.number_option is None:
        return names
    return {
        "anyOf": [names, {"type": "string", "pattern": f"^{entry.name}[0-9]{{1,6}}$", "description": entry.summary}]
    }


def _with_options(registry: Registry, entry: entries.Entry) -> Schema:
    keys: Schema = {"name": {}, "preset": {"enum": [*entry.presets, None]}}
    if isinstance(entry, (entries.EvaluatorEntry, entries.LoggerEntry)):
        keys["label"] = {"type": ["string", "null"]}
    if isinstance(entry, entries.TrainerEntry) and list(defined_modifiers(registry, entry)):
        keys["loss"] = _choice(registry, entries.ModifierEntry)
    if isinstance(entry, entries.TrainerEntry):
        keys |= _section(registry, Additions)["properties"]
    return {"properties": {**keys, **_options(entry.config)}, "additionalProperties": False}


def _options_of(registry: Registry, kind: type[entries.Entry]) -> Schema:
    """The options of a plugin that another section names: those of all of them together."""
    found: dict[str, list[Schema]] = {}
    for entry, _ in registry.offers(kind):
        for name, value in _options(entry.config).items():
            found.setdefault(name, []).append(value)
    any_key = kind is entries.ModelEntry  # a factory of the user's own takes what it takes
    return _object({name: _any(values) for name, values in found.items()}, strict=not any_key)


def _any(values: Iterable[Schema]) -> Schema:
    different = [json.loads(text) for text in dict.fromkeys(json.dumps(value) for value in values)]
    return different[0] if len(different) == 1 else {"anyOf": different}
