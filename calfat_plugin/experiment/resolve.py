"""Recipe and registry become an experiment: structure, types and units checked, names resolved, defaults filled in.

Then the keys are checked beside each other: what is good by itself, and not with the rest of the recipe.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from calfat_plugin import returned
from calfat_plugin.entries import TrainerEntry, kind_of
from calfat_plugin.errors import OptionError, PluginError, RecipeError, did_you_mean, listed
from calfat_plugin.experiment.building import check_class
from calfat_plugin.experiment.experiment import Experiment, members_of, some_choose_by_size
from calfat_plugin.experiment.implausible import implausible
from calfat_plugin.experiment.reading import RecipeReader, read_groups
from calfat_plugin.options import describe
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_sections import read_host_sections, refuse_misplaced
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.recipe.training import TrainArgs, useless
from calfat_plugin.registry import Registry
from calfat_plugin.results import WORST_CASE
from calfat_plugin.returned import attribute_errors_to
from calfat_plugin.rounds_csv import owner_of

_NAME: KeyPath = ("calfat", "name")
_FOLDER = re.compile(r"[^/\\\x00-\x1f]+")  # what a folder may be called
_NO_FOLDER = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # what it is better not: some is no UTF-8, too
_MONITORED: KeyPath = ("calfat", "monitor", "evaluators")
_PATIENCE: KeyPath = ("train_args", "patience")


def assemble(document: Document, registry: Registry, *, trains: bool = True, finished: bool = False) -> Experiment:
    """Resolve a recipe.

    Args:
        document: the recipe.
        registry: where its plugins are looked up.
        trains: whether it will run as it is, so that warnings about training and the monitor matter.
        finished: whether it is that of a run that is only looked at: a plugin that is not there has untyped options.
    """
    document.check_norm()
    written, document = document, _with_preset(document, registry)
    warnings: list[str] = []
    host_sections = read_host_sections(document, warnings)
    _check_calfat_section(document)
    warnings += _useless_keys(document, host_sections["train_args"])

    reader = RecipeReader(document, registry, finished)
    values: dict[str, Any] = {}
    for section, content in host_sections.items():
        values[schema.HOST_ATTRIBUTES[section]] = content
    name = _name(document)
    calfat = reader.section(("calfat",), schema.CalfatSection)
    for key in schema.CALFAT_KEYS:
        values[key] = getattr(calfat, key)
    values["name"] = name
    experiment = Experiment(document=document, registry=registry, **values)
    # The second pass: what a group trains by is the whole recipe with the keys of the group.
    experiment = dataclasses.replace(experiment, clients=read_groups(experiment, reader))

    _check_together(experiment, finished)
    for group in experiment.clients:
        group_experiment = experiment.trained_by(group)
        warnings += _useless_keys(group_experiment.document, group_experiment.train)
        if not finished:
            warnings += _misfits(group_experiment)
    if not finished:
        warnings += _misfits(experiment)
        warnings += implausible(experiment, written, trains)
    return dataclasses.replace(experiment, warnings=tuple(dict.fromkeys(warnings)))


def _check_calfat_section(document: Document) -> None:
    """Refuse a recipe without the section ``calfat``, or with a key in it that there is not."""
    if "calfat" not in document.data:
        raise RecipeError(f"{document.file}: there is no section 'calfat', such as calfat: {{trainer: calfat}}.")
    for name in document.section(("calfat",)):
        if name not in schema.CALFAT_KEYS:
            refuse_misplaced(document, ("calfat", name))
            hint = did_you_mean(name, schema.CALFAT_KEYS) or f" Known: {listed(schema.CALFAT_KEYS)}."
            raise document.error(("calfat", name), f"unknown key.{hint}")


def _useless_keys(document: Document, train: TrainArgs) -> Iterator[str]:
    """A warning for each key of ``train_args`` that others make useless."""
    for name, needed in useless(train):
        path = ("train_args", name)
        yield f"{document.place(path)}: {dotted(path)}: this key has no effect here: it needs {needed}."


def _misfits(experiment: Experiment) -> Iterator[str]:
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
    name = document.get(_NAME)
    if name is None:
        stem = _NO_FOLDER.sub("_", Path(document.file).stem)  # a file's name may have any sign
        if not stem.strip(". "):
            return "recipe"
        return stem
    if not isinstance(name, str) or name.strip(". ") == "" or not _FOLDER.fullmatch(name):
        raise document.error(
            _NAME, f"got {describe(name)}, expected a name for the folder of its runs, such as calfat_digits."
        )
    return name


def _with_preset(document: Document, registry: Registry) -> Document:
    """Fill keys that the recipe leaves out with the defaults of the trainer's preset."""
    trainer = document.get(("calfat", "trainer"))
    if not isinstance(trainer, Mapping):
        return document
    try:
        entry, _ = registry.find(TrainerEntry, trainer.get("name", "calfat"))
        preset = entry.presets[trainer["preset"]]
    except (PluginError, KeyError, TypeError):  # whoever reads the trainer says what is wrong with it
        return document
    dataset = document.get(("data_args", "dataset"))
    if not isinstance(dataset, str):
        dataset = schema.DataArgs.dataset
    named = f"preset '{trainer['preset']}'"
    who = f"local trainer '{entry.name}' ({registry.provider(TrainerEntry, entry.name)})"
    with attribute_errors_to(who, entry.config):
        defaults = returned.mapping(preset.recipe(dataset), f"the recipe of its {named} returned")
    place = f"{document.place(('calfat', 'trainer', 'preset'))}, {named} of '{entry.name}'"
    for key, value in defaults.items():
        path = tuple(key.split("."))
        parent = document.get(path[:-1])
        if not document.has(path) and (parent is None or isinstance(parent, Mapping)):
            document = document.with_value(path, value, place)
    return document


def recipe_of_own_model(source: str, values: Iterable[tuple[KeyPath, Any, str]]) -> Document:
    """A recipe to evaluate it by, with defaults for all but these values.

    Args:
        source: what errors name where no value has a place.
        values: (key, value, place that errors name) each.
    """
    trainer: tuple[KeyPath, Any, str] = (("calfat", "trainer"), "standard", source)  # it leaves every model as it is
    return Document(source, {}).with_values([trainer, *values])


# --- keys beside each other -------------------------------------------------------------------------------------------


def _check_together(experiment: Experiment, finished: bool) -> None:
    """Refuse keys that do not go together; of a ``finished`` run only what whoever looks at it needs."""
    try:
        experiment.silo.check_clients(experiment.num_clients)
    except OptionError as error:
        raise experiment.document.error(("calfat", "silo", *error.at), str(error)) from None
    if finished:
        return
    _check_patience(experiment)
    for plugin in experiment.picked:
        _check_plugin(experiment, plugin, experiment, plugin.path)
    _check_aggregator(experiment)
    for trained in experiment.everyone:
        trained.check_method(trained.trainer.entry.build)
        _check_clean_rounds(trained)
    _refuse_twin_columns(experiment)
    _check_groups(experiment)


def _check_patience(experiment: Experiment) -> None:
    """Refuse to stop early by accuracies that the run is reported by, or by none at all."""
    patience = experiment.train.patience
    if patience is None:
        return
    if experiment.data.monitored_split != "validation":
        raise experiment.document.error(
            _PATIENCE,
            f"got {patience}, but there is no validation split, and to stop by the test images would make the results "
            "on them too high. Set data_args.validation_share, such as 0.1, or remove the key.",
        )
    if experiment.selecting_label is None:
        raise experiment.document.error(
            _PATIENCE,
            f"got {patience}, but nothing is measured during the run (calfat.monitor.evaluators is empty). Name an "
            "evaluator there, such as pgd20, or remove the key.",
        )


def _check_plugin(experiment: Experiment, plugin: Plugin[Any], beside: Recipe, at: KeyPath) -> None:
    """Let a plugin check its options beside the rest of the recipe; ``at``: the key that its errors name."""
    try:
        with experiment.attribute_errors_to(plugin):
            check_class(plugin.entry.build, plugin.entry)
            plugin.entry.check(plugin.options, beside)
    except (OptionError, PluginError) as error:
        raise experiment.document.error(at, str(error)) from None


def _check_aggregator(experiment: Experiment) -> None:
    """Refuse an aggregator and a local trainer, the run's or a group's, of which one says that they do not fit."""
    aggregator = experiment.aggregator.entry
    trainers = [trained.trainer.entry for trained in experiment.everyone]
    # A trainer that the aggregator takes beside others is refused only where no client trains by another one.
    are_alone = all(trainer.name in aggregator.beside_others for trainer in trainers)
    for trainer in trainers:
        reason = trainer.conflicts.get(aggregator.name) or aggregator.conflicts.get(trainer.name)
        if reason is not None and (are_alone or trainer.name not in aggregator.beside_others):
            raise experiment.document.error(
                experiment.aggregator.path,
                f"aggregator '{aggregator.name}' and local trainer '{trainer.name}' cannot work together: {reason}",
            )


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
    document = experiment.document
    for plugin in experiment.evaluators:
        if plugin.label == WORST_CASE:
            text = f"'{WORST_CASE}' is what all attacks together are called in results; give it another 'label'."
            raise document.error(plugin.path, text)
    monitored = experiment.monitor.evaluators
    labels = [plugin.label for plugin in monitored]
    for plugin in monitored:
        taken = owner_of(plugin.label, labels)
        if taken:
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


def _check_groups(experiment: Experiment) -> None:
    """Refuse groups that no run could have."""
    group_of: dict[int, str] = {}
    for group in experiment.clients:
        for client in group.ids or ():
            if client in group_of:
                text = f"client {client} is in the group '{group_of[client]}', too."
                raise experiment.document.error((*group.path, "ids"), text)
            group_of[client] = group.name
    for group in experiment.clients:
        _check_group(experiment, group)
    if not some_choose_by_size(experiment):
        members_of(experiment, ())  # for its errors


def _check_group(experiment: Experiment, group: ClientGroup) -> None:
    """Refuse what a group has of its own and the run cannot have."""
    document = experiment.document
    if group.attacker is not None and experiment.common.training_type != "simulation":
        raise document.error(
            (*group.path, "attacker"),
            "attackers exist in simulations only: across silos each party is what it is. Remove the key, or set "
            "common_args.training_type: simulation.",
        )
    if experiment.partition.entry.name == SILO and (group.options.smallest or group.options.largest):
        raise document.error(
            group.path, "with partition_method: silo no party knows how many examples the others have; use ids."
        )
    only_one_has = _reshaping(experiment) ^ _reshaping(group.recipe)
    if only_one_has:  # one model is averaged
        raise document.error(
            (*group.path, "trainer"),
            f"'{min(only_one_has)}' changes the model's tensors, so either all clients train with it or none does.",
        )
    # What a group trains by is checked beside the run's, of which it has its own train_args and threat.
    beside = dataclasses.replace(experiment, train=group.recipe.train, threat=group.recipe.threat)
    for plugin in (group.recipe.trainer, group.recipe.modifier, group.recipe.threat.inner):
        _check_plugin(experiment, plugin, beside, group.path)


def _reshaping(recipe: Recipe) -> set[str]:
    """The names of the trainer and the loss modifier, of those that change the model's tensors."""
    return {plugin.entry.name for plugin in (recipe.trainer, recipe.modifier) if plugin.entry.reshapes}
