"""Recipe and registry become an experiment: structure, types and units checked, names resolved, defaults filled in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calfat_plugin import returned
from calfat_plugin.entries import TrainerEntry, kind_of
from calfat_plugin.errors import PluginError, RecipeError, did_you_mean, listed
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.experiment.groups import read_groups
from calfat_plugin.experiment.implausible import implausible
from calfat_plugin.experiment.reading import RecipeReader
from calfat_plugin.experiment.together import check_together
from calfat_plugin.options import describe
from calfat_plugin.plugin_errors import attribute_errors_to
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.host_sections import read_host_sections, refuse_misplaced
from calfat_plugin.recipe.training import TrainArgs, useless
from calfat_plugin.registry import Registry

_NAME: KeyPath = ("calfat", "name")
_FOLDER = re.compile(r"[^/\\\x00-\x1f]+")  # what a folder may be called
_NO_FOLDER = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # what it is better not: some is no UTF-8, too


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
    of_host = read_host_sections(document, warnings)
    _check_calfat_section(document)
    warnings += _useless_keys(document, of_host["train_args"])

    reader = RecipeReader(document, registry, finished)
    values: dict[str, Any] = {schema.HOST_ATTRIBUTES[name]: section for name, section in of_host.items()}
    name = _name(document)
    calfat = reader.section(("calfat",), schema.CalfatSection)
    values |= {key: getattr(calfat, key) for key in schema.CALFAT_KEYS}
    values["name"] = name
    experiment = Experiment(document=document, registry=registry, **values)
    # The second pass: what a group trains by is the whole recipe with the keys of the group.
    experiment = dataclasses.replace(experiment, clients=read_groups(experiment, reader))

    check_together(experiment, finished)
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
        return stem if stem.strip(". ") else "recipe"
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
