"""What the keys of a recipe hold, typed: one method for each kind of key, and plugins looked up by name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from calfat_plugin import entries
from calfat_plugin.errors import OptionError, PluginError, did_you_mean, listed
from calfat_plugin.options import describe, describe_options, quoting_hint
from calfat_plugin.recipe.clients import BESIDE, CHOOSING, CLIENTS, OTHERS, TRAINED, GroupOptions, parsed_ids
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_sections import read_host_section
from calfat_plugin.recipe.keys import (
    Groups,
    Key,
    OnePlugin,
    OptionsOf,
    Others,
    Plugin,
    Plugins,
    Section,
    Sections,
    keys_of,
)
from calfat_plugin.recipe.plugin_files import plugin_files
from calfat_plugin.recipe.schema import HOST_SECTIONS, CalfatSection, ClientGroup, Recipe
from calfat_plugin.recipe.training import ADDED, Additions
from calfat_plugin.registry import Registry

E = TypeVar("E", bound=entries.Entry)

_BESIDE = ("name", "preset", "label")  # of a plugin in a recipe, beside its options
_BESIDE_TRAINER = ("name", "preset", "loss", *ADDED)
_GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_EXAMPLE = "[{ids: 0-1, trainer: standard}]"
_THREAT_KEYS = ("inner", "by_class")  # of a group's threat: where they are written, a recipe in full has them, too
_CHANGES = ("trainer", "threat", "attacker", *TRAINED)  # what makes a group differ from the other clients


@dataclasses.dataclass(frozen=True)
class RecipeReader:
    """Reads what the keys of a recipe hold, by what they are declared to hold."""

    document: Document
    registry: Registry
    finished: bool  # of a run that is only looked at: a plugin that is not installed has untyped options

    def value(self, path: KeyPath, declared: Key) -> Any:
        """What the key at ``path`` holds."""
        match declared:
            case Section():
                if declared.may_lack and self.document.get(path) is None:
                    return None
                return self.section(path, declared.config)
            case Sections():
                return plugin_files(self.document)
            case OnePlugin(kind=entries.TrainerEntry):
                return self.trainer(path, declared.default)
            case OnePlugin():
                return self.one_plugin(path, declared)
            case Plugins():
                return self.plugins(path, declared)
            case OptionsOf():
                return self.options_of_plugin(path, declared)
            case Groups():
                return ()  # they are read in a second pass (read_groups), for which the rest of the recipe is needed
        raise TypeError(f"{dotted(path)}: {declared!r}")

    def section(self, path: KeyPath, config: type, written: Mapping[str, Any] | None = None) -> Any:
        """The section with the keys of ``config``; ``written``: its values, where others are at ``path``, too."""
        if written is None:
            written = self.document.section(path)
        options = dict(written)
        fields: dict[str, Any] = {}
        for name, declared in keys_of(config).items():
            if isinstance(declared, Others):
                fields[name] = self.others(path, config, declared, written)
                options = {key: value for key, value in options.items() if key not in fields[name]}
            else:
                options.pop(name, None)
                fields[name] = self.value((*path, name), declared)
        return self.document.options(path, config, options, fields)

    def others(self, path: KeyPath, config: type, declared: Others, written: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the keys of a section that are no options of ``config``, by key."""
        options = {info.name for info in describe_options(config)}
        values = {}
        for key, value in written.items():
            if key not in options:
                try:
                    values[key] = declared.info.parse(value)
                except OptionError as error:
                    raise self.document.error((*path, key), str(error)) from None
        return values

    def one_plugin(self, path: KeyPath, declared: OnePlugin) -> Plugin[Any]:
        """The plugin that a key names; the default where the recipe leaves it out."""
        written = self.document.get(path)
        if written is None:
            written = declared.default
        return self.plugin(path, declared.kind, written, default=declared.default)

    def trainer(self, path: KeyPath, default: str) -> Plugin[entries.TrainerEntry]:
        """The local trainer with its loss modifier and what is added to it."""
        written = self.document.get(path)
        if written is None:
            written = default
        trainer = self.plugin(path, entries.TrainerEntry, written, default=default, beside=_BESIDE_TRAINER)
        loss = self.loss(path, trainer.entry)
        added: dict[str, Any] = {}
        if isinstance(written, Mapping):
            added = {name: written[name] for name in ADDED if name in written}
        return dataclasses.replace(trainer, loss=loss, additions=self.section(path, Additions, added))

    def loss(self, path: KeyPath, trainer: entries.TrainerEntry) -> Plugin[entries.ModifierEntry]:
        """The loss modifier of the trainer at ``path``; ``plain`` where the recipe names none."""
        at = (*path, "loss")
        written = self.document.get(at)
        if written is None:
            return self.plugin(at, entries.ModifierEntry, "plain")
        loss = self.plugin(at, entries.ModifierEntry, written)
        supported = defined_modifiers(self.registry, trainer)
        if loss.entry.name not in supported and not self.finished:
            hint = "It has its own loss; remove the key."
            if supported:
                hint = f"It supports: {listed(supported)}."
            raise self.document.error(
                at, f"local trainer '{trainer.name}' does not support the loss modifier '{loss.entry.name}'. {hint}"
            )
        return loss

    def plugins(self, path: KeyPath, declared: Plugins) -> tuple[Plugin[Any], ...]:
        """A list of plugins of one kind, each with a label of its own."""
        written = self.document.get(path)
        if written is None:
            written = list(declared.default)
        if not isinstance(written, list):
            raise self.document.error(path, f"got {describe(written)}, expected a list such as {declared.example}.")
        plugins: dict[str, Plugin[Any]] = {}
        for index, item in enumerate(written):
            plugin = self.plugin((*path, index), declared.kind, item)
            if plugin.label in plugins:
                raise self.document.error(
                    plugin.path,
                    f"the {declared.kind.kind} '{plugin.label}' is listed twice; remove one, or give it its own "
                    "'label'.",
                )
            plugins[plugin.label] = plugin
        return tuple(plugins.values())

    def options_of_plugin(self, path: KeyPath, declared: OptionsOf) -> Plugin[Any]:
        """The plugin that a section of the host names, with the options at ``path``."""
        written = self.document.get(path)
        if isinstance(written, str) or (isinstance(written, Mapping) and "name" in written):
            raise self.document.error(
                path, f"the {path[-1]} is set by {dotted(declared.named_by)}; only its options belong here."
            )
        name = self.document.get(declared.named_by)
        if name is None:
            section, key = declared.named_by
            name = getattr(HOST_SECTIONS[section], key)
        options = self.document.section(path)
        if declared.kind is entries.ModelEntry and ":" in name:
            module, _, network = name.partition(":")
            if not (module and network):
                text = f"got '{name}', expected the name of a model, or package.module:factory of your own."
                raise self.document.error(declared.named_by, text)
            return self.own_model(path, name, options)
        return self.resolved(path, declared.kind, name, options, name_at=declared.named_by)

    def own_model(self, path: KeyPath, name: str, options: Mapping[str, Any]) -> Plugin[entries.ModelEntry]:
        """A user's own ``package.module:factory``, which takes no options, and of the images' facts those that it asks
        for."""

        def build(**arguments: Any) -> Any:
            from calfat_plugin.models.building import factory_at

            factory: Any = factory_at(name)
            with suppress(ValueError):  # of what has no signature
                parameters = inspect.signature(factory).parameters
                if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                    arguments = {key: value for key, value in arguments.items() if key in parameters}
            return factory(**arguments)

        entry = entries.ModelEntry("own", build=build, summary=f"built by {name}")
        typed: Any = self.document.options(path, entry.config, options, owner=f"model '{name}'")
        return Plugin(entry, typed, name, name, path)

    def plugin(
        self,
        path: KeyPath,
        kind: type[E],
        written: Any,
        *,
        default: str | None = None,
        beside: tuple[str, ...] = _BESIDE,
    ) -> Plugin[E]:
        """``name`` or ``{name: ..., preset: ..., options...}``; ``beside``: keys beside the options."""
        if isinstance(written, str):
            return self.resolved(path, kind, written, {})
        example = "such as {name: calfat, preset: release}"
        if kind is not entries.TrainerEntry:
            example = f"such as {{name: {self.registry.names(kind)[0]}}}"
        if not isinstance(written, Mapping):
            raise self.document.error(
                path, f"got {describe(written)}, expected a name or a mapping {example}.{quoting_hint(written)}"
            )
        self._check_names(path, written)
        name = written.get("name", default)
        if name is None:
            raise self.document.error(path, f"there is no 'name'; expected a mapping {example}.")
        options = {key: value for key, value in written.items() if key not in (*_BESIDE, *beside)}
        return self.resolved(
            path, kind, name, options, preset=written.get("preset"), label=written.get("label"), beside=beside
        )

    def _check_names(self, path: KeyPath, written: Mapping[str, Any]) -> None:
        """Refuse a name, a preset or a label of a plugin that is no text, and a label where there is no list."""
        if "label" in written and isinstance(path[-1], str):
            raise self.document.error((*path, "label"), "only evaluators and loggers have a label; remove it.")
        for key in _BESIDE:
            text = written.get(key)
            is_left_out = text is None and (key != "name" or key not in written)
            is_name = isinstance(text, str) and bool(text.strip()) and text.isprintable()
            if not (is_left_out or is_name):
                raise self.document.error((*path, key), f"got {describe(text)}, expected a name.{quoting_hint(text)}")

    def resolved(
        self,
        path: KeyPath,
        kind: type[E],
        name: str,
        options: Mapping[str, Any],
        *,
        preset: str | None = None,
        label: str | None = None,
        name_at: KeyPath | None = None,
        beside: tuple[str, ...] = (),
    ) -> Plugin[E]:
        """The plugin of this name with its options typed; ``name_at``: where the name is, if not at ``path``."""
        document = self.document
        label = label or name
        try:
            entry, of_name = self.registry.find(kind, name)
        except PluginError as error:
            if self.finished:
                return Plugin(kind("unknown", build="", summary="not installed"), options, name, label, path)
            if name_at is None:
                name_at = path
                if document.has((*path, "name")):
                    name_at = (*path, "name")
            raise document.error(name_at, str(error)) from None
        for option, value in of_name.items():  # pgd20 has steps: 20
            if options.get(option, value) != value:
                text = f"'{name}' already sets {option} = {value}; keep one of the two."
                raise document.error((*path, option), text)
        typed: Any = document.options(
            path,
            entry.config,
            {**self._options_of_preset(path, entry, preset), **of_name, **options},
            also=beside,
            owner=f"{kind.kind} '{entry.name}'",
        )
        return Plugin(entry, typed, name, label, path)

    def _options_of_preset(self, path: KeyPath, entry: entries.Entry, preset: str | None) -> Mapping[str, Any]:
        """The options that a preset of a plugin sets; none without a preset."""
        if preset is None:
            return {}
        if preset in entry.presets:
            return entry.presets[preset].options
        hint = did_you_mean(preset, entry.presets)
        if not entry.presets:
            hint = " It has none."
        elif not hint:
            hint = f" Known: {listed(entry.presets)}."
        raise self.document.error((*path, "preset"), f"{entry.kind} '{entry.name}' has no preset '{preset}'.{hint}")


def defined_modifiers(registry: Registry, trainer: entries.TrainerEntry) -> tuple[str, ...]:
    """Names of the loss modifiers that a method composes with, whichever side says so; none where it brings its own."""
    if not trainer.modifiers:
        return ()
    names = list(trainer.modifiers)
    for modifier, _ in registry.offers(entries.ModifierEntry):
        if trainer.name in modifier.methods and modifier.name not in names:
            names.append(modifier.name)
    return tuple(names)


# --- groups of clients ------------------------------------------------------------------------------------------------


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
        attacker = reader.plugin(
            (*path, "attacker"), entries.AttackerEntry, written["attacker"], beside=("name", "preset")
        )
    if all(written.get(key) is None for key in _CHANGES):
        raise document.error(path, f"nothing differs in this group; expected one of {listed(_CHANGES)}.")
    name = options.name or f"group{index + 1}"
    if not _GROUP_NAME.fullmatch(name) or name == OTHERS:
        text = f"got '{name}', expected letters, digits, '-' and '_', and not '{OTHERS}'."
        raise document.error((*path, "name"), text)
    return ClientGroup(name, dataclasses.replace(options, name=None), ids, recipe, attacker, tuple(changed), path)


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
    """What a group's clients train by: the run's recipe, in which the group's keys are read in the place of the run's.

    Of a preset of its trainer only the options count.
    """
    document = experiment.document
    threat = written.get("threat")
    if threat is not None and not isinstance(threat, Mapping):
        raise document.error((*path, "threat"), f"got {describe(threat)}, expected a section such as {{eps: 4/255}}.")
    changes: list[tuple[KeyPath, Any, str]] = []

    def change(key_of_run: KeyPath, value: Any, *key: str) -> None:
        changes.append((key_of_run, value, f"{document.place((*path, *key))}: {dotted(path)}"))

    train_keys = [key for key in TRAINED if written.get(key) is not None]
    for key in train_keys:
        change(("train_args", key), written[key], key)
    if written.get("trainer") is not None:
        change(("calfat", "trainer"), written["trainer"], "trainer")
    for key, value in (threat or {}).items():  # null, too: a group may have no by_class where the run has one
        change(("calfat", "threat", key), value, "threat", key)
    document = document.with_value(CLIENTS, None, document.place(CLIENTS)).with_values(changes)
    document.check_norm()
    reader = dataclasses.replace(reader, document=document)
    declared = keys_of(CalfatSection)
    sections: dict[str, Any] = {}
    if train_keys:
        sections["train"] = read_host_section(document, "train_args")
    for key in ("trainer", "threat"):
        if written.get(key) is not None:
            sections[key] = reader.value(("calfat", key), declared[key])
    return dataclasses.replace(experiment, document=document, clients=(), **sections)
