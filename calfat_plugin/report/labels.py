"""Names of runs and settings on pages, in tables and on the console: recipe keys with their values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calfat_plugin.options import Tag, options_to_plain, yaml_text
from calfat_plugin.recipe.document import flat
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.tagged_keys import has_tag
from calfat_plugin.report.numbers import counted, listing
from calfat_plugin.report.scores import settings_of
from calfat_plugin.results import EvaluationResult
from calfat_plugin.stored_run import Run

# A word of a command line that may set a secret. The group is the part before the value, which stays readable.
_SECRET = re.compile(
    r"(?is)(?=.*(?:key|token|secret|password|passwd|credential)[\w.-]*\s*[=:])((?:--[\w-]+=)?[\w.-]+=).*"
)
_MOST_KEYS = 4  # in a name; more are listed under "What differs"
MORE = "…"


def named(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Keys with their values, null where there is none: ``calfat.trainer fedpgd · train_args.learning_rate 0.1``."""
    return " · ".join(f"{key.removesuffix('.name')} {yaml_text(settings.get(key))}" for key in keys)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not all equal."""
    keys: dict[str, None] = {}
    for setting in settings:
        keys.update(dict.fromkeys(setting))
    differing_keys = []
    for key in keys:
        values = {repr(setting.get(key)) for setting in settings}
        if len(values) > 1:
            differing_keys.append(key)
    return differing_keys


def problem_names(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each problem: the keys in which the problems differ. The name of a single problem is empty."""
    keys = differing(problems)
    return [named(problem, keys) for problem in problems]


def setting_names(runs: Sequence[Run]) -> list[str]:
    """A different name for each run: the keys in which the runs differ, names of plugins first.

    Options of a plugin are left out where all runs with this plugin agree on them. A name that leaves out more than
    these ends in an ellipsis.
    """
    settings = [settings_of(run.settings) for run in runs]
    all_keys = sorted(differing(settings), key=lambda key: not key.endswith(".name"))
    # A key that changes no model is in a name only where nothing else tells two settings apart.
    keys_of_models = [key for key in all_keys if not has_tag(key, Tag.NAMED_LAST)] or all_keys
    names = _names(settings, keys_of_models, _MOST_KEYS)
    if len(set(names)) < len(names):
        names = _names(settings, keys_of_models, len(keys_of_models))
    if len(set(names)) < len(names):
        names = _names(settings, all_keys, len(all_keys))
    for index, run in enumerate(runs):
        names[index] = names[index] or f"calfat.trainer {run.experiment.trainer.name}"
    unique_names = []
    for name, run in zip(names, runs, strict=True):
        if names.count(name) > 1:
            name = f"{name} · {run.directory}"
        unique_names.append(name)
    return unique_names


def _names(settings: Sequence[Mapping[str, Any]], keys: Sequence[str], most_keys: int) -> list[str]:
    """For each setting the first ``most_keys`` of the keys in which it differs from others with the same plugins."""
    names = []
    for setting in settings:
        own_keys = []
        for key in keys:
            parents = key.split(".")
            plugins = {".".join((*parents[:depth], "name")) for depth in range(1, len(parents))} - {key}
            values = set()
            for other in settings:
                if all(other.get(plugin) == setting.get(plugin) for plugin in plugins):
                    values.add(repr(other.get(key)))
            if len(values) > 1:
                own_keys.append(key)
        name = named(setting, own_keys[:most_keys])
        if len(own_keys) > most_keys:
            name += f" · {MORE}"
        names.append(name)
    return names


def difference(group: ClientGroup, run: Recipe) -> str:
    """What a group of clients has of its own, by key: ``ids [0, 3] · attacker sign_flip · attacker.scale 5.0``."""
    values = group.as_run()
    values.pop("name", None)
    values_of_group = flat(values)
    values_of_run = flat({"threat": {**options_to_plain(run.threat), "inner": run.threat.inner.as_run()}})
    keys = [key for key, value in values_of_group.items() if values_of_run.get(key) != value]
    return named(values_of_group, keys)


def on_examples(measured: Iterable[tuple[str, Iterable[tuple[Run, EvaluationResult]]]]) -> str:
    """``natural and fgsm on all 359 test examples, pgd20 on 32 of 359 test examples``."""
    headings_of: dict[str, list[str]] = {}  # by the text that says on which examples
    for heading, evaluations in measured:
        texts: dict[str, None] = {}
        for run, evaluation in evaluations:
            if evaluation.accuracy is None:
                continue
            most = max(other.num_examples for other in run.evaluations)
            share = "all"
            if evaluation.num_examples < most:
                share = f"{evaluation.num_examples:,} of"
            texts[f"{share} {counted(most, 'test example')}"] = None
        if texts:
            headings_of.setdefault(listing(list(texts)), []).append(heading)
    return ", ".join(f"{listing(headings)} on {examples}" for examples, headings in headings_of.items())


def headline(run: Run) -> str:
    """Method, data, clients, rounds and seed of a run, in a line."""
    recipe = run.experiment
    clients = counted(recipe.num_clients, "client")
    if recipe.clients:
        clients += f" ({listing(recipe.group_names)})"
    text = (
        f"{recipe.trainer.name} with {recipe.aggregator.name} on {recipe.dataset.name} ({recipe.partition.name}): "
        f"{clients}, {counted(recipe.num_rounds, 'round')}, seed {recipe.seed}"
    )
    if run.stopped_early is not None:
        text += f". Training {run.stopped_early}"
    return text


def highlights(run: Run) -> dict[str, str]:
    """What makes the model: recipe key to value, without keys that are null or empty."""
    texts = {}
    for key, value in settings_of(run.settings).items():
        if value not in (None, "", []) and not has_tag(key, Tag.NAMED_LAST):
            texts[key] = yaml_text(value)
    return texts


def command(run: Run) -> str:
    """The command line of a run, with an ellipsis for what may be a secret; empty where no file says it."""
    if run.environment is None:
        return ""
    return command_text(run.environment.command)


def command_text(words: Iterable[object]) -> str:
    """A command line, with an ellipsis for what may be a secret."""
    return " ".join(_SECRET.sub(r"\1…", str(word)) for word in words)


def budget(settings: Mapping[str, Any]) -> str:
    """The ball that an attack kept to: ``linf, eps 8/255``; empty without one."""
    norm, eps = settings.get("norm"), settings.get("eps")
    if norm is None or eps is None:
        return ""
    return f"{norm}, eps {eps}"
