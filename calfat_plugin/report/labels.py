"""Names of runs and settings on pages, in tables and on the console: recipe keys with their values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calfat_plugin.experiment.differences import flat
from calfat_plugin.options import Tag, options_to_plain, yaml_text
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.tagged_keys import has_tag
from calfat_plugin.report.comparability import settings_of
from calfat_plugin.report.numbers import counted
from calfat_plugin.results import EvaluationResult
from calfat_plugin.stored_run import Run

# A word of a command that gives a value to what may be a secret, of a mapping all of it: what leads up to the value.
_SECRET = re.compile(
    r"(?is)(?=.*(?:key|token|secret|password|passwd|credential)[\w.-]*\s*[=:])((?:--[\w-]+=)?[\w.-]+=).*"
)
_MOST = 4  # keys in a name; more are listed under "What differs"
MORE = "…"


def listing(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def named(settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Keys with their values, null where there is none: ``calfat.trainer fedpgd · train_args.learning_rate 0.1``."""
    return " · ".join(f"{key.removesuffix('.name')} {yaml_text(settings.get(key))}" for key in keys)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not all equal."""
    keys = dict.fromkeys(key for values in settings for key in values)
    return [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]


def problem_names(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each problem the keys in which it is unlike another one; one alone needs no name."""
    keys = differing(problems)
    return [named(values, keys) for values in problems]


def setting_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run, unlike all others: the keys in which they differ, names of plugins first.

    Options of a plugin are left out where all runs with this plugin agree on them. A name that leaves out more than
    these ends in an ellipsis.
    """
    settings = [settings_of(run.settings) for run in runs]
    every = sorted(differing(settings), key=lambda key: not key.endswith(".name"))
    # What changes no model is named only where nothing else tells two settings apart.
    models = [key for key in every if not has_tag(key, Tag.NAMED_LAST)] or every
    for keys, most in ((models, _MOST), (models, len(models)), (every, len(every))):
        own = [[key for key in keys if _is_told(key, values, settings)] for values in settings]
        names = [
            named(values, told[:most]) + (f" · {MORE}" if len(told) > most else "")
            for values, told in zip(settings, own, strict=True)
        ]
        if len(set(names)) == len(names):
            break
    names = [name or f"calfat.trainer {run.experiment.trainer.name}" for name, run in zip(names, runs, strict=True)]
    unlike = []
    for name, run in zip(names, runs, strict=True):
        unlike.append(name if names.count(name) == 1 else f"{name} · {run.directory}")
    return unlike


def _is_told(key: str, values: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run differs in ``key`` from another one that has the same plugins above it."""
    parts = key.split(".")
    plugins = {".".join((*parts[:depth], "name")) for depth in range(1, len(parts))} - {key}
    alike = [other for other in settings if all(other.get(name) == values.get(name) for name in plugins)]
    return len({repr(other.get(key)) for other in alike}) > 1


def difference(group: ClientGroup, run: Recipe) -> str:
    """What a group of clients has of its own, by key: ``ids [0, 3] · attacker sign_flip · attacker.scale 5.0``."""
    written = flat({key: value for key, value in group.as_run().items() if key != "name"})
    usual = flat({"threat": {**options_to_plain(run.threat), "inner": run.threat.inner.as_run()}})
    return named(written, [key for key, value in written.items() if usual.get(key) != value])


def on_examples(measured: Iterable[tuple[str, Iterable[tuple[Run, EvaluationResult]]]]) -> str:
    """``natural and fgsm on all 359 test examples, pgd20 on 32 of 359 test examples``."""
    alike: dict[str, list[str]] = {}
    for heading, evaluations in measured:
        texts: dict[str, None] = {}
        for run, evaluation in evaluations:
            if evaluation.accuracy is None:
                continue
            number = evaluation.num_examples
            most = max(other.num_examples for other in run.evaluations)
            share = "all" if number == most else f"{number:,} of"
            texts[f"{share} {counted(most, 'test example')}"] = None
        if texts:
            alike.setdefault(listing(list(texts)), []).append(heading)
    return ", ".join(f"{listing(headings)} on {examples}" for examples, headings in alike.items())


def headline(run: Run) -> str:
    recipe = run.experiment
    in_groups = f" ({listing(recipe.group_names)})" if recipe.clients else ""
    stopped = "" if run.stopped_early is None else f". Training {run.stopped_early}"
    return (
        f"{recipe.trainer.name} with {recipe.aggregator.name} on {recipe.dataset.name} ({recipe.partition.name}): "
        f"{counted(recipe.num_clients, 'client')}{in_groups}, {counted(recipe.num_rounds, 'round')}, seed {recipe.seed}"
        f"{stopped}"
    )


def highlights(run: Run) -> dict[str, str]:
    """What makes the model: recipe key to value, without keys that are null or empty."""
    found = settings_of(run.settings).items()
    return {
        key: yaml_text(value)
        for key, value in found
        if value not in (None, "") and value != [] and not has_tag(key, Tag.NAMED_LAST)
    }


def command(run: Run) -> str:
    """The command line, with what may be a secret blotted out."""
    return command_text(() if run.environment is None else run.environment.command)


def command_text(words: Iterable[object]) -> str:
    """A command line, with what may be a secret blotted out."""
    return " ".join(_SECRET.sub(r"\1…", str(word)) for word in words)


def budget(settings: Mapping[str, Any]) -> str:
    """The ball that an attack kept to: ``linf, eps 8/255``; empty without one."""
    norm, eps = settings.get("norm"), settings.get("eps")
    return "" if norm is None or eps is None else f"{norm}, eps {eps}"
