"""Recipe and registry become an experiment: names resolved, options typed, defaults and presets filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from calfat_plugin import entries, returned
from calfat_plugin.errors import OptionError, PluginError, did_you_mean, listed
from calfat_plugin.evaluators.gradient import PGDOptions
from calfat_plugin.experiment.experiment import Experiment, Pick
from calfat_plugin.options import describe_options, parse_options
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.parse import parse_recipe
from calfat_plugin.recipe.schema import Choice, Recipe
from calfat_plugin.recipe.sections import failing_at
from calfat_plugin.registry import Registry

E = TypeVar("E", bound=entries.Entry)


def assemble(document: Document, registry: Registry, *, trains: bool = True) -> Experiment:
    """Resolve a recipe.

    Args:
        document: the recipe.
        registry: the plugins.
        trains: whether it will run as it is, so that warnings about training and the monitor matter.

    Raises:
        RecipeError, PluginError: with place, key path, what was found, what was wanted and the nearest right spelling.
    """
    recipe = parse_recipe(_with_preset(document, registry))
    trainer = _pick(recipe, registry, entries.TrainerEntry, recipe.trainer, also=("name", "preset", "loss"))
    aggregator = _pick(recipe, registry, entries.AggregatorEntry, recipe.aggregator)
    _refuse_conflict(recipe, trainer.entry, aggregator.entry)
    experiment = Experiment(
        recipe=recipe,
        registry=registry,
        trainer=trainer,
        modifier=_pick_modifier(recipe, registry, trainer),
        aggregator=aggregator,
        dataset=_pick(recipe, registry, entries.DatasetEntry, recipe.dataset, name_at=("data_args", "dataset")),
        model=_pick_model(recipe, registry),
        partition=_pick(
            recipe, registry, entries.PartitionEntry, recipe.partition, name_at=("data_args", "partition_method")
        ),
        evaluators=tuple(_pick(recipe, registry, entries.EvaluatorEntry, choice) for choice in recipe.evaluators),
        monitor_evaluators=tuple(
            _pick(recipe, registry, entries.EvaluatorEntry, choice) for choice in recipe.monitor_evaluators
        ),
        loggers=tuple(_pick(recipe, registry, entries.LoggerEntry, choice) for choice in recipe.loggers),
    )
    _refuse_twin_columns(experiment)
    warnings = (
        *recipe.warnings,
        *_unused_alpha(document, experiment.partition.entry),
        *_former_names(experiment),
        *_bad_steps(experiment, trains),
    )
    return dataclasses.replace(experiment, recipe=dataclasses.replace(recipe, warnings=warnings))


def _refuse_twin_columns(experiment: Experiment) -> None:
    """Refuse two measurements under one name in ``rounds.csv``; labels alone are checked where they are read."""
    labels = [pick.label for pick in experiment.monitor_evaluators]
    columns = [*experiment.metric_columns, *labels]
    for column in {"train", "server"}.intersection(labels).union(c for c in columns if columns.count(c) > 1):
        raise experiment.recipe.document.error(
            ("calfat", "monitor", "evaluators"),
            f"'{column}' would name two things in rounds.csv; give the evaluator another 'label'.",
        )


def _unused_alpha(document: Document, partition: entries.PartitionEntry) -> Iterator[str]:
    """A note if the recipe sets a concentration that its partition does not use.

    None where an override (``--set``, a suite) replaces the partition that a file had chosen with this concentration.
    """
    method, alpha = ("data_args", "partition_method"), ("data_args", "partition_alpha")
    in_file = f"{document.file}:"
    replaced = document.place(alpha).startswith(in_file) and not document.place(method).startswith(in_file)
    if document.has(alpha) and not partition.uses_alpha and not replaced:
        yield (
            f"{document.place(alpha)}: {dotted(alpha)}: this key has no effect here: the partition "
            f"'{partition.name}' does not use it."
        )


def _former_names(experiment: Experiment) -> Iterator[str]:
    """A note for every plugin that the recipe calls by a former name."""
    recipe = experiment.recipe
    found: list[tuple[Choice, Pick[Any]]] = [
        (recipe.trainer, experiment.trainer),
        (recipe.trainer.loss or Choice("plain", {}, (), label="plain"), experiment.modifier),
        (recipe.aggregator, experiment.aggregator),
        (recipe.dataset, experiment.dataset),
        (recipe.model_choice, experiment.model),
        (recipe.partition, experiment.partition),
        *zip(recipe.evaluators, experiment.evaluators, strict=True),
        *zip(recipe.monitor_evaluators, experiment.monitor_evaluators, strict=True),
        *zip(recipe.loggers, experiment.loggers, strict=True),
    ]
    for choice, pick in found:
        if choice.name in pick.entry.former_names:
            yield (
                f"{recipe.document.place((*choice.path, 'name'))}: {dotted(choice.path)}: the {pick.entry.kind} "
                f"'{choice.name}' is now called '{pick.entry.name}'; the old name still works, with the same results."
            )


def _bad_steps(experiment: Experiment, trains: bool) -> Iterator[str]:
    """A warning for each way in which steps do not fit eps, with all whom it is about: training and evaluators."""
    recipe = experiment.recipe
    found: dict[str, tuple[KeyPath, list[str]]] = {}
    picked = [*zip(recipe.evaluators, experiment.evaluators, strict=True)]
    if trains:
        picked += zip(recipe.monitor_evaluators, experiment.monitor_evaluators, strict=True)
        if experiment.training_step_problem:
            found[experiment.training_step_problem] = ("calfat", "threat"), ["training"]
    for choice, pick in picked:
        problem = pick.options.threat(recipe.threat).step_problem() if isinstance(pick.options, PGDOptions) else ""
        if problem:
            names = found.setdefault(problem, (choice.path, []))[1]
            names += [pick.label] if pick.label not in names else []
    for problem, (path, names) in found.items():
        yield f"{recipe.document.place(path)}: {dotted(path)}: {', '.join(names)}: {problem}"


def _pick(
    recipe: Recipe,
    registry: Registry,
    kind: type[E],
    choice: Choice,
    *,
    name_at: KeyPath | None = None,
    also: tuple[str, ...] = ("name", "preset", "label"),
) -> Pick[E]:
    """Look a choice up and type its options. ``name_at``: where its name is written, if not at the choice itself."""
    document = recipe.document
    try:
        entry, named = registry.find(kind, choice.name)
    except PluginError as error:
        named_here = (*choice.path, "name")
        where = name_at or (named_here if document.has(named_here) else choice.path)
        raise document.error(where, str(error)) from None
    known = {info.name for info in describe_options(entry.config)}
    clash = [name for name in named if choice.options.get(name, named[name]) != named[name]]
    if clash:
        raise document.error(
            (*choice.path, clash[0]),
            f"'{choice.name}' already sets {clash[0]} = {named[clash[0]]}; keep one of the two.",
        )
    preset: Mapping[str, Any] = {}
    if choice.preset is not None:
        if choice.preset not in entry.presets:
            known_presets = f" Known: {listed(entry.presets)}." if entry.presets else " It has none."
            hint = did_you_mean(choice.preset, entry.presets) or known_presets
            raise document.error(
                (*choice.path, "preset"), f"{kind.kind} '{entry.name}' has no preset '{choice.preset}'.{hint}"
            )
        preset = entry.presets[choice.preset].options
    options: Any = parse_options(
        entry.config,
        {**preset, **named, **choice.options},
        owner=f"{kind.kind} '{entry.name}'",
        fail=failing_at(document, choice.path),
        also=tuple(key for key in also if name_at is None and key not in known),
    )
    who = f"{kind.kind} '{choice.name}' ({registry.provider(kind, entry.name)})"
    try:
        with returned.naming(who, entry.config):
            entry.check(options, recipe)
    except (OptionError, PluginError) as error:
        raise document.error(choice.path, str(error)) from None
    name = entry.name if choice.name in entry.former_names else choice.name
    label = name if choice.label in ("", choice.name) else choice.label
    return Pick(entry, options, name, label)


def _refuse_conflict(recipe: Recipe, trainer: entries.TrainerEntry, aggregator: entries.AggregatorEntry) -> None:
    names = (trainer.name, *trainer.former_names)
    reasons = (trainer.conflicts.get(aggregator.name), *(aggregator.conflicts.get(name) for name in names))
    reason = next((text for text in reasons if text is not None), None)
    if reason is not None:
        raise recipe.document.error(
            recipe.aggregator.path,
            f"aggregator '{aggregator.name}' and local trainer '{trainer.name}' cannot work together: {reason}",
        )


def _pick_model(recipe: Recipe, registry: Registry) -> Pick[entries.ModelEntry]:
    """A model by name, or a user's own ``package.module:factory``, which takes no options from the recipe."""
    choice = recipe.model_choice
    if ":" not in choice.name:
        return _pick(recipe, registry, entries.ModelEntry, choice, name_at=("model_args", "model"))
    path = choice.name

    def build(**arguments: Any) -> Any:
        from calfat_plugin.models.building import factory_at

        made: Any = factory_at(path)(**arguments)
        return made

    entry = entries.ModelEntry("own", build=build, summary=f"built by {path}")
    fail = failing_at(recipe.document, choice.path)
    return Pick(entry, parse_options(entry.config, choice.options, owner=f"model '{path}'", fail=fail), path, path)


def _pick_modifier(
    recipe: Recipe, registry: Registry, trainer: Pick[entries.TrainerEntry]
) -> Pick[entries.ModifierEntry]:
    choice, entry = recipe.trainer.loss, trainer.entry
    path: KeyPath = (*recipe.trainer.path, "loss")
    if choice is None:
        return _pick(recipe, registry, entries.ModifierEntry, Choice("plain", {}, path, label="plain"))
    pick = _pick(recipe, registry, entries.ModifierEntry, choice)
    defined_for = defined_modifiers(registry, entry)
    if pick.entry.name not in defined_for:
        defined = f"It supports: {listed(defined_for)}." if defined_for else "It has its own loss; remove the key."
        raise recipe.document.error(
            path, f"local trainer '{entry.name}' does not support the loss modifier '{pick.entry.name}'. {defined}"
        )
    return pick


def defined_modifiers(registry: Registry, trainer: entries.TrainerEntry) -> tuple[str, ...]:
    """Names of the loss modifiers that a method composes with, whichever side says so; none where it brings its own."""
    if not trainer.modifiers:
        return ()
    offered = (modifier for modifier, _ in registry.offers(entries.ModifierEntry))
    also = (m.name for m in offered if trainer.name in m.methods and m.name not in trainer.modifiers)
    return (*trainer.modifiers, *also)


def _with_preset(document: Document, registry: Registry) -> Document:
    """Fill keys that the recipe leaves out with the defaults of the trainer's preset.

    Anything wrong with the names involved is left for :func:`_pick` to complain about.
    """
    trainer = document.get(("calfat", "trainer"))
    name, preset_name = (
        (trainer.get("name", "calfat"), trainer.get("preset")) if isinstance(trainer, Mapping) else (None, None)
    )
    if not isinstance(name, str) or not isinstance(preset_name, str):
        return document
    try:
        entry, _ = registry.find(entries.TrainerEntry, name)
    except PluginError:
        return document
    if preset_name not in entry.presets:
        return document
    dataset = document.get(("data_args", "dataset"))
    defaults = entry.presets[preset_name].recipe(dataset if isinstance(dataset, str) else "digits")
    at = document.place(("calfat", "trainer", "preset"))
    for key, value in defaults.items():
        path = tuple(key.split("."))
        parent = document.get(path[:-1])
        if not document.has(path) and (parent is None or isinstance(parent, Mapping)):
            document = document.with_value(path, value, f"{at}, preset '{preset_name}' of '{name}'")
    return document
