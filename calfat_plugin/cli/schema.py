"""``calfat schema``: a JSON schema of recipes, for editors; ``calfat check`` remains the judge.

Made from the options that the parser reads and the plugins that are installed. It accepts whatever ``calfat check``
accepts; what depends on several keys at once, or on files, is left to the command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from calfat_plugin import entries
from calfat_plugin.cli.options import json_output, plugin_option
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
    document = with_plugins(Document("calfat schema", {}), plugins)
    with json_output(True) as show:
        show(recipe_schema(Registry.for_recipe(document)))


def recipe_schema(registry: Registry) -> Schema:
    """The schema (JSON Schema, draft 7) of a recipe that names plugins of ``registry``."""
    sections = {}
    for name, config in HOST_SECTIONS.items():
        sections[name] = _section(registry, config, strict=False)
    sections["calfat"] = _section(registry, CalfatSection)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Recipe of calfat-plugin {__version__}",
        "type": "object",
        "required": ["calfat"],
        "properties": sections,
    }


def _object(properties: Mapping[str, Schema], *, strict: bool = True) -> Schema:
    """A section, which may be left empty."""
    return {"type": ["object", "null"], "properties": dict(properties), "additionalProperties": not strict}


def _section(registry: Registry, config: type, *, strict: bool = True) -> Schema:
    """The section with the keys of ``config``."""
    properties = _options(config)
    further_keys: Schema | None = None  # None: the section has no keys beside those of ``config``
    for name, key in keys_of(config).items():
        if isinstance(key, Others):
            further_keys = _value(key.info)
        else:
            properties[name] = _below(registry, key)
    section = _object(properties, strict=strict)
    if further_keys is not None:
        section["additionalProperties"] = further_keys
    return section


def _below(registry: Registry, key: Key) -> Schema:
    """What a key of a section holds."""
    match key:
        case Section():
            return _section(registry, key.config)
        case Sections():
            return {"type": ["object", "null"], "additionalProperties": _section(registry, key.config)}
        case OnePlugin():
            return _choice(registry, key.kind, default=key.default)
        case Plugins():
            return {"type": ["array", "null"], "items": _choice(registry, key.kind)}
        case Groups():
            group = _options(key.config)
            group["ids"] = {"type": ["integer", "string", "array"]}
            group["trainer"] = _choice(registry, entries.TrainerEntry)
            group["threat"] = _section(registry, Threat)
            group["attacker"] = _choice(registry, entries.AttackerEntry)
            return {"type": ["array", "null"], "items": _object(group)}
        case OptionsOf():
            return _options_of(registry, key.kind)
    raise TypeError(repr(key))


def _options(config: type) -> dict[str, Schema]:
    return {info.name: _value(info) for info in describe_options(config)}


def _value(info: OptionInfo) -> Schema:
    """The value of an option."""
    description = info.help
    if info.unit:
        description += f" ({info.unit})"
    value: Schema = {"description": description}
    if not info.required:
        value["default"] = to_plain(info.default)
    types = [_TYPES[info.type]]
    choices: list[str | None] = list(info.choices)
    if info.optional and not info.many:  # a list may be null, its items may not
        types.append("null")
        choices.append(None)
    item: Schema = {}  # of a list, or the value itself
    if info.choices:
        item["enum"] = choices
    elif info.type in (int, float, Fraction, StepSize):
        types.append("string")
        item["pattern"] = _STEP_IN_TEXT if info.type is StepSize else _NUMBER_IN_TEXT
        if info.low is not None:
            item["exclusiveMinimum" if info.open_low else "minimum"] = float(info.low)
        if info.high is not None:
            item["maximum"] = float(info.high)
    item["type"] = types
    if not info.many:
        return value | item
    return value | {"type": ["array", "null"] if info.optional else "array", "items": item}


def _choice(registry: Registry, kind: type[entries.Entry], default: str | None = None) -> Schema:
    """A plugin by name, or with its options; ``default`` is meant where a mapping has no name."""
    names, cases = [], []
    for entry, _ in registry.offers(kind):
        entry_name = _names(entry)
        required = [] if entry.name == default else ["name"]
        names.append(entry_name)
        cases.append(
            {
                "if": {"properties": {"name": entry_name}, "required": required},
                "then": _with_options(registry, entry),
            }
        )
    mapping = {
        "type": "object",
        "properties": {"name": {"anyOf": names}},
        "required": [] if default else ["name"],
        "allOf": cases,
    }
    no_mapping = [*names, _NULL] if default else names
    return {"if": {"type": "object"}, "then": mapping, "else": {"anyOf": no_mapping}}


def _names(entry: entries.Entry) -> Schema:
    """What a recipe calls an entry: its name, which may end with a number."""
    names: Schema = {"const": entry.name, "description": entry.summary}
    if entry.number_option is None:
        return names
    return {
        "anyOf": [names, {"type": "string", "pattern": f"^{entry.name}[0-9]{{1,6}}$", "description": entry.summary}]
    }


def _with_options(registry: Registry, entry: entries.Entry) -> Schema:
    """A mapping that names an entry, with its options."""
    keys: Schema = {"name": {}, "preset": {"enum": [*entry.presets, None]}}
    if isinstance(entry, (entries.EvaluatorEntry, entries.LoggerEntry)):
        keys["label"] = {"type": ["string", "null"]}
    if isinstance(entry, entries.TrainerEntry) and list(defined_modifiers(registry, entry)):
        keys["loss"] = _choice(registry, entries.ModifierEntry)
    if isinstance(entry, entries.TrainerEntry):
        keys |= _section(registry, Additions)["properties"]
    return {"properties": {**keys, **_options(entry.config)}, "additionalProperties": False}


def _options_of(registry: Registry, kind: type[entries.Entry]) -> Schema:
    """The options of a plugin that is named in another section: those of all plugins of its kind."""
    schemas_of: dict[str, dict[str, Schema]] = {}  # option to its different schemas, by their text
    for entry, _ in registry.offers(kind):
        for name, schema_of_value in _options(entry.config).items():
            schemas_of.setdefault(name, {})[json.dumps(schema_of_value)] = schema_of_value
    properties: dict[str, Schema] = {}
    for name, by_text in schemas_of.items():
        schemas = list(by_text.values())
        properties[name] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    # A factory of the user's own takes any option.
    return _object(properties, strict=kind is not entries.ModelEntry)
