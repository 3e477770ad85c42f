"""Recipe and registry become an experiment: structure, types and units checked, names resolved, defaults filled in."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from calfat_plugin import entries, returned
from calfat_plugin.entries import kind_of
from calfat_plugin.errors import OptionError, PluginError, RecipeError, did_you_mean, listed
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.experiment.groups import check_groups, read_groups
from calfat_plugin.experiment.implausible import implausible
from calfat_plugin.experiment.plugin_class import check_class
from calfat_plugin.options import describe, describe_options, quoting_hint
from calfat_plugin.plugin_errors import attribute_errors_to
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.additions import ADDED, Additions
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_sections import read_host_sections, refuse_misplaced
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
from calfat_plugin.recipe.training import useless
from calfat_plugin.registry import Registry
from calfat_plugin.results import WORST_CASE
from calfat_plugin.rounds_csv import owner_of

E = TypeVar("E", bound=entries.Entry)

_FOLDER = re.compile(r"[^/\\\x00-\x1f]+")  # what a folder may be called
_NO_FOLDER = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # what it is better not: some is no UTF-8, too
_BESIDE = ("name", "preset", "label")  # of a plugin in a recipe, beside its options
_MONITORED: KeyPath = ("calfat", "monitor", "evaluators")


def assemble(
    document: Document, registry: Registry, *, trains: bool = True, finished: bool = False, group: bool = False
) -> Experiment:
    """Resolve a recipe.

    Args:
        trains: whether it will run as it is, so that warnings about training and the monitor matter.
        finished: whether it is that of a run that is only looked at: a plugin that is not there has untyped options.
        group: whether it is what a group of clients trains by, whose plugins are checked beside those of the run.
    """
    warnings: list[str] = []
    written = document
    document.check_norm()
    if not group:  # of a preset in a group only the options count: what else a client trains by is the run's
        document = _with_preset(document, registry)
    host = read_host_sections(document, warnings)
    if "calfat" not in document.data:
        raise RecipeError(f"{document.file}: there is no section 'calfat', such as calfat: {{trainer: calfat}}.")
    for name in document.section(("calfat",)):
        if name not in schema.CALFAT_KEYS:
            refuse_misplaced(document, ("calfat", name))
            hint = did_you_mean(name, schema.CALFAT_KEYS) or f" Known: {listed(schema.CALFAT_KEYS)}."
            raise document.error(("calfat", name), f"unknown key.{hint}")
    for name, needed in useless(host["train_args"]):
        path = ("train_args", name)
        warnings.append(f"{document.place(path)}: {dotted(path)}: this key has no effect here: it needs {needed}.")
    reader = _Reader(document, registry, finished)
    sections = {schema.HOST_ATTRIBUTES[name]: section for name, section in host.items()}
    values = {name: reader.value(("calfat", name), what) for name, what in keys_of(schema.CalfatSection).items()}
    experiment = Experiment(name=_name(document), document=document, registry=registry, **sections, **values)
    if not group:
        _check_together(experiment, finished)
    for each in experiment.clients:  # what holds for the whole run is said there, too
        warnings += [text for text in each.recipe.warnings if text not in warnings]
    if not finished:
        warnings += [text for text in _of_misfits(experiment) if text not in warnings]
    more = () if finished or group else implausible(experiment, written, trains)
    return dataclasses.replace(experiment, warnings=(*warnings, *more))


def _of_misfits(experiment: Experiment) -> Iterator[str]:
    """A warning for each plugin that the recipe picks and whose distribution requires another version of this one."""
    for plugin in experiment.picked:
        if ":" in plugin.name:  # a model of the user's own
            continue
        provider = experiment.registry.provider(kind_of(plugin.entry), plugin.entry.name)
        if provider.complaint:
            place = f"{experiment.document.place(plugin.path)}: {dotted(plugin.path)}"
            yield f"{place}: '{plugin.name}' is of {provider.complaint}"


def _name(document: Document) -> str:
    """``calfat.name``, which becomes a folder's name, or the file's own."""
    path: KeyPath = ("calfat", "name")
    name = document.get(path)
    if name is None:  # the file's may have any sign
        stem = _NO_FOLDER.sub("_", Path(document.file).stem)
        return stem if stem.strip(". ") else "recipe"
    if not isinstance(name, str) or name.strip(". ") == "" or not _FOLDER.fullmatch(name):
        raise document.error(
            path, f"got {describe(name)}, expected a name for the folder of its runs, such as calfat_digits."
        )
    return name


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads what keys of a recipe hold, by what they are declared to hold."""

    document: Document
    registry: Registry
    finished: bool

    def value(self, path: KeyPath, what: Key) -> Any:
        """What is at ``path``."""
        raw = self.document.get(path)
        match what:
            case Section():
                return None if what.may_lack and raw is None else self.section(path, what.config)
            case Sections():
                return plugin_files(self.document)
            case OnePlugin(kind=entries.TrainerEntry):
                return self.trainer(path, what.default)
            case OnePlugin():
                return self.plugin(path, what.kind, what.default if raw is None else raw, default=what.default)
            case Plugins():
                return self.plugins(path, what, list(what.default) if raw is None else raw)
            case OptionsOf():
                return self.plugin_named_at(path, what)
            case Groups():
                return read_groups(
                    self.document,
                    lambda variant: assemble(variant, self.registry, finished=self.finished, group=True),
                    lambda at, given: self.plugin(at, entries.AttackerEntry, given, also=("name", "preset")),
                )
        raise TypeError(f"{dotted(path)}: {what!r}")

    def section(self, path: KeyPath, config: type, raw: Mapping[str, Any] | None = None) -> Any:
        """The section with the keys of ``config``; ``raw``: its values, where they are not all that is at ``path``."""
        raw, given = dict(self.document.section(path) if raw is None else raw), dict[str, Any]()
        for name, what in keys_of(config).items():
            if isinstance(what, Others):
                own = {info.name for info in describe_options(config)}
                given[name] = {}
                for key in [key for key in raw if key not in own]:
                    try:
                        given[name][key] = what.info.parse(raw.pop(key))
                    except OptionError as error:
                        raise self.document.error((*path, key), str(error)) from None
            else:
                raw.pop(name, None)
                given[name] = self.value((*path, name), what)
        return self.document.options(path, config, raw, given)

    def plugins(self, path: KeyPath, what: Plugins, raw: Any) -> tuple[Plugin[Any], ...]:
        """A list of plugins of one kind, each with a label of its own."""
        if not isinstance(raw, list):
            raise self.document.error(path, f"got {describe(raw)}, expected a list such as {what.example}.")
        found: dict[str, Plugin[Any]] = {}
        for index, item in enumerate(raw):
            plugin = self.plugin((*path, index), what.kind, item)
            if plugin.label in found:
                text = f"the {what.kind.kind} '{plugin.label}' is listed twice; remove one, or give it its own 'label'."
                raise self.document.error(plugin.path, text)
            found[plugin.label] = plugin
        return tuple(found.values())

    def plugin_named_at(self, path: KeyPath, what: OptionsOf) -> Plugin[Any]:
        """The plugin that a host section names, with the options at ``path``."""
        value, (section, key) = self.document.get(path), what.named_by
        if isinstance(value, str) or (isinstance(value, Mapping) and "name" in value):
            raise self.document.error(
                path, f"the {path[-1]} is set by {dotted(what.named_by)}; only its options belong here."
            )
        name = self.document.get(what.named_by)
        name = getattr(schema.HOST_SECTIONS[section], key) if name is None else name
        options = self.document.section(path)
        if what.kind is entries.ModelEntry:
            module, colon, network = name.partition(":")
            if colon and not (module and network):
                text = f"got '{name}', expected the name of a model, or package.module:factory of your own."
                raise self.document.error(what.named_by, text)
            if colon:
                return self._own_model(path, name, options)
        return self._resolved(path, what.kind, name, options, name_at=what.named_by)

    def _own_model(self, path: KeyPath, name: str, options: Mapping[str, Any]) -> Plugin[entries.ModelEntry]:
        """A user's own ``package.module:factory``, which takes no options, and of the images' facts those that it asks
        for."""

        def build(**arguments: Any) -> Any:
            from calfat_plugin.models.building import factory_at

            factory: Any = factory_at(name)
            with suppress(ValueError):  # of what has no signature
                taken = inspect.signature(factory).parameters
                if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
                    arguments = {key: value for key, value in arguments.items() if key in taken}
            return factory(**arguments)

        entry = entries.ModelEntry("own", build=build, summary=f"built by {name}")
        typed: Any = self.document.options(path, entry.config, options, owner=f"model '{name}'")
        return Plugin(entry, typed, name, name, path)

    def trainer(self, path: KeyPath, default: str) -> Plugin[entries.TrainerEntry]:
        """The local trainer with its loss modifier and what is added to it."""
        given, at = self.document.get(path), (*path, "loss")
        also = ("name", "preset", "loss", *ADDED)
        trainer = self.plugin(path, entries.TrainerEntry, default if given is None else given, default, also)
        chosen = self.document.get(at)
        loss = self.plugin(at, entries.ModifierEntry, "plain" if chosen is None else chosen)
        defined_for = defined_modifiers(self.registry, trainer.entry)
        if chosen is not None and loss.entry.name not in defined_for and not self.finished:
            defined = f"It supports: {listed(defined_for)}." if defined_for else "It has its own loss; remove the key."
            raise self.document.error(
                at,
                f"local trainer '{trainer.entry.name}' does not support the loss modifier '{loss.entry.name}'. "
                f"{defined}",
            )
        kept = {name: given[name] for name in ADDED if name in given} if isinstance(given, Mapping) else {}
        return dataclasses.replace(trainer, loss=loss, additions=self.section(path, Additions, kept))

    def plugin(
        self,
        path: KeyPath,
        kind: type[E],
        value: Any,
        default: str | None = None,
        also: tuple[str, ...] = _BESIDE,
    ) -> Plugin[E]:
        """``name`` or ``{name: ..., preset: ..., options...}``; ``also``: keys beside the options."""
        document = self.document
        if isinstance(value, str):
            return self._resolved(path, kind, value, {})
        trainer = kind is entries.TrainerEntry
        example = f"such as {{name: {'calfat, preset: release' if trainer else self.registry.names(kind)[0]}}}"
        if not isinstance(value, Mapping):
            raise document.error(
                path, f"got {describe(value)}, expected a name or a mapping {example}.{quoting_hint(value)}"
            )
        if "label" in value and isinstance(path[-1], str):  # not of a list
            raise document.error((*path, "label"), "only evaluators and loggers have a label; remove it.")
        for key in _BESIDE:
            text = value.get(key)
            good = key != "name" if text is None else isinstance(text, str) and text.strip() and text.isprintable()
            if key in value and not good:
                raise document.error((*path, key), f"got {describe(text)}, expected a name.{quoting_hint(text)}")
        name = value.get("name", default)
        if name is None:
            raise document.error(path, f"there is no 'name'; expected a mapping {example}.")
        options = {key: item for key, item in value.items() if key not in (*_BESIDE, *also)}
        return self._resolved(path, kind, name, options, value.get("preset"), value.get("label"), also=also)

    def _resolved(
        self,
        path: KeyPath,
        kind: type[E],
        name: str,
        given: Mapping[str, Any],
        preset: str | None = None,
        label: str | None = None,
        *,
        name_at: KeyPath | None = None,
        also: tuple[str, ...] = (),
    ) -> Plugin[E]:
        """The plugin of this name with its options typed; ``name_at``: where the name is, if not at ``path``."""
        document = self.document
        try:
            entry, named = self.registry.find(kind, name)
        except PluginError as error:
            if self.finished:
                return Plugin(kind("unknown", build="", summary="not installed"), given, name, label or name, path)
            named_here = (*path, "name")
            raise document.error(name_at or (named_here if document.has(named_here) else path), str(error)) from None
        for option in named:
            if given.get(option, named[option]) != named[option]:
                text = f"'{name}' already sets {option} = {named[option]}; keep one of the two."
                raise document.error((*path, option), text)
        if preset is not None and preset not in entry.presets:
            known = f" Known: {listed(entry.presets)}." if entry.presets else " It has none."
            hint = did_you_mean(preset, entry.presets) or known
            raise document.error((*path, "preset"), f"{kind.kind} '{entry.name}' has no preset '{preset}'.{hint}")
        defaults = {} if preset is None else entry.presets[preset].options
        options: Any = document.options(
            path,
            entry.config,
            {**defaults, **named, **given},
            also=also,
            owner=f"{kind.kind} '{entry.name}'",
        )
        return Plugin(entry, options, name, label or name, path)


def _check_patience(experiment: Experiment) -> None:
    """Refuse to stop early by accuracies that the run is reported by, or by none at all."""
    patience = experiment.train.patience
    if patience is None:
        return
    path = ("train_args", "patience")
    if experiment.data.monitored_split != "validation":
        raise experiment.document.error(
            path,
            f"got {patience}, but there is no validation split, and to stop by the test images would make the results "
            "on them too high. Set data_args.validation_share, such as 0.1, or remove the key.",
        )
    if experiment.selecting_label is None:
        raise experiment.document.error(
            path,
            f"got {patience}, but nothing is measured during the run (calfat.monitor.evaluators is empty). Name an "
            "evaluator there, such as pgd20, or remove the key.",
        )


def _check_together(experiment: Experiment, finished: bool) -> None:
    """Refuse what is good by itself and not beside the rest of the recipe."""
    document = experiment.document
    try:
        experiment.silo.check_clients(experiment.num_clients)
    except OptionError as error:
        raise document.error(("calfat", "silo", *error.at), str(error)) from None
    if finished:
        return
    _check_patience(experiment)
    for plugin in experiment.picked:
        try:
            with experiment.attribute_errors_to(plugin):
                check_class(plugin.entry.build, plugin.entry)
                plugin.entry.check(plugin.options, experiment)
        except (OptionError, PluginError) as error:
            raise document.error(plugin.path, str(error)) from None
    aggregator = experiment.aggregator.entry
    trainers = [recipe.trainer.entry for recipe in (experiment, *(group.recipe for group in experiment.clients))]
    alone = all(trainer.name in aggregator.beside_others for trainer in trainers)
    for trainer in trainers:
        reason = trainer.conflicts.get(aggregator.name) or aggregator.conflicts.get(trainer.name)
        if reason is not None and (alone or trainer.name not in aggregator.beside_others):
            raise document.error(
                experiment.aggregator.path,
                f"aggregator '{aggregator.name}' and local trainer '{trainer.name}' cannot work together: {reason}",
            )
    for trained in (experiment, *map(experiment.trained_by, experiment.clients)):
        trained.check_method(trained.trainer.entry.build)
        _check_clean_rounds(trained)
    _refuse_twin_columns(experiment)
    check_groups(experiment, experiment.attribute_errors_to)


def _check_clean_rounds(trained: Experiment) -> None:
    """Refuse clean rounds that leave no round to attack in, or that an aggregator would take for adversarial ones."""
    clean_rounds = trained.additions.clean_rounds
    path = (*trained.trainer.path, "clean_rounds")
    if clean_rounds and clean_rounds >= trained.num_rounds:
        raise trained.document.error(
            path,
            f"got {clean_rounds} of {trained.num_rounds} rounds (train_args.comm_round), which leaves none to train "
            f"adversarially; expected at most {trained.num_rounds - 1}, or more rounds.",
        )
    ranked_from = getattr(trained.aggregator.options, "start_round", clean_rounds + 1)
    if trained.aggregator.entry.name == "sfat" and ranked_from <= clean_rounds:
        raise trained.document.error(
            path,
            f"got {clean_rounds}, and SFAT would rank clients from round {ranked_from} on "
            "(calfat.aggregator.start_round) by an adversarial loss, which clean rounds do not have; expected a "
            f"start_round of at least {clean_rounds + 1}.",
        )


def _refuse_twin_columns(experiment: Experiment) -> None:
    """Refuse two measurements under one name, in ``results.json`` or in ``rounds.csv``."""
    monitored, document = experiment.monitor.evaluators, experiment.document
    for plugin in experiment.evaluators:
        if plugin.label == WORST_CASE:
            text = f"'{WORST_CASE}' is what all attacks together are called in results; give it another 'label'."
            raise document.error(plugin.path, text)
    labels = [plugin.label for plugin in monitored]
    for plugin in monitored:
        if taken := owner_of(plugin.label, labels):
            raise document.error(
                plugin.path,
                f"the label '{plugin.label}' is the name of a column {taken} in rounds.csv; give it another 'label'.",
            )
    columns = ("train", "server", "group", *experiment.metric_columns)
    for label in labels:
        if label in columns:
            raise document.error(
                _MONITORED, f"'{label}' would name two things in rounds.csv; give the evaluator another 'label'."
            )


def defined_modifiers(registry: Registry, trainer: entries.TrainerEntry) -> tuple[str, ...]:
    """Names of the loss modifiers that a method composes with, whichever side says so; none where it brings its own."""
    if not trainer.modifiers:
        return ()
    offered = (modifier for modifier, _ in registry.offers(entries.ModifierEntry))
    also = (m.name for m in offered if trainer.name in m.methods and m.name not in trainer.modifiers)
    return (*trainer.modifiers, *also)


def _with_preset(document: Document, registry: Registry) -> Document:
    """Fill keys that the recipe leaves out with the defaults of the trainer's preset."""
    trainer = document.get(("calfat", "trainer"))
    given = trainer if isinstance(trainer, Mapping) else {}
    try:
        entry, _ = registry.find(entries.TrainerEntry, given.get("name", "calfat"))
        preset = entry.presets[given["preset"]]
    except (PluginError, KeyError, TypeError):  # whoever reads the trainer says what is wrong with it
        return document
    named, dataset = f"preset '{given['preset']}'", document.get(("data_args", "dataset"))
    who = f"local trainer '{entry.name}' ({registry.provider(entries.TrainerEntry, entry.name)})"
    with attribute_errors_to(who, entry.config):
        made = preset.recipe(dataset if isinstance(dataset, str) else "digits")
        defaults = returned.mapping(made, f"the recipe of its {named} returned")
    at = document.place(("calfat", "trainer", "preset"))
    for key, value in defaults.items():
        path = tuple(key.split("."))
        parent = document.get(path[:-1])
        if not document.has(path) and (parent is None or isinstance(parent, Mapping)):
            document = document.with_value(path, value, f"{at}, {named} of '{entry.name}'")
    return document
