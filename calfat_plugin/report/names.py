"""Names of settings: the values in which they differ, and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calfat_plugin.experiment.compare import PLUGIN_PLACE, comparable
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.reading import RunFiles
from calfat_plugin.report.words import aggregator, method, option_words, plain

_NOT_A_SETTING = (
    "common_args.random_seed",
    "data_args.data_cache_dir",
    "calfat.dataset.download",
    "calfat.loggers",
    "calfat.name",
    "calfat.reported.",
    "calfat.runtime.",
    "device_args.",
    "tracking_args.",
)
# Named only where nothing else differs: what changes no model, which columns name, and the digest of a plugin file.
_NAMED_LAST = ("calfat.evaluators", "calfat.evaluation.", "calfat.monitor.", "calfat.plugins.")
_PROBLEM = (
    "data_args.",
    "model_args.",
    "train_args.client_num_in_total",
    "calfat.dataset.",
    "calfat.model.",
    "calfat.partition.",
    "calfat.threat.",
)
_FIRST: Mapping[str, Callable[[Any], str]] = {  # said before all others
    "data_args.dataset": plain,
    "data_args.partition_method": plain,
    "data_args.partition_alpha": lambda value: f"β {plain(value)}",
    "train_args.client_num_in_total": lambda value: _several(value, "client"),
    "model_args.model": plain,
    "train_args.comm_round": lambda value: _several(value, "round"),
    "calfat.threat.eps": lambda value: f"ε {plain(value)}",
}
_PARTICIPANTS = ("train_args.client_num_per_round", "train_args.client_num_in_total")
_MOST = 3  # further values in a name; more are listed under "What differs"
MORE = "…"


def settings_of(run: RunFiles) -> dict[str, Any]:
    """Dotted key to value, for all that parts runs into settings."""
    return _settings(run.recipe)


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    found = comparable(recipe).items()
    return {key: value for key, value in found if not (key.startswith(_NOT_A_SETTING) or PLUGIN_PLACE.fullmatch(key))}


def problem_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before accuracies compare, of a recipe as run: data, partition, model, clients and threat."""
    return {key: value for key, value in _settings(recipe).items() if key.startswith(_PROBLEM)}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not all equal, those that are known best first."""
    keys = dict.fromkeys((*_FIRST, *(key for values in settings for key in values)))
    return [key for key in keys if len({plain(values.get(key)) for values in settings}) > 1]


def problem_names(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each problem all values in which it is unlike another one; one alone needs no name."""
    keys = differing(problems)
    return [" · ".join(_words(key, values.get(key)) for key in keys) for values in problems]


def setting_names(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run, unlike all others: method, aggregator, and the values in which the runs differ.

    A name that says less than all differences ends in an ellipsis.
    """
    settings = [settings_of(run) for run in runs]
    methods, aggregators = list(map(method, runs)), list(map(aggregator, runs))
    keys = [key for key in differing(settings) if not key.startswith(_NAMED_LAST) and not _follows(key, settings)]
    first = [key for key in keys if key in _FIRST]
    names = []
    for index, values in enumerate(settings):
        # What only one method or aggregator has is said by its name.
        others = [key for key in keys if key not in _FIRST and not _is_name(key)]
        others = [key for key in others if _differs_within(key, index, settings, methods, aggregators)]
        parts = [methods[index], *([aggregators[index]] if len(set(aggregators)) > 1 else [])]
        parts += [_words(key, values.get(key)) for key in (*first, *others[:_MOST])]
        names.append(" · ".join([*parts, *([MORE] if len(others) > _MOST else [])]))
    return _told_apart(names, runs, settings)


def _is_name(key: str) -> bool:
    return key in ("calfat.trainer.name", "calfat.aggregator.name", "calfat.trainer.loss.name")


def _follows(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a value differs only because another one does, which is said: all clients take part."""
    per_round, total = _PARTICIPANTS
    return key == per_round and all(values.get(key) in (None, values.get(total)) for values in settings)


def _differs_within(
    key: str, index: int, settings: Sequence[Mapping[str, Any]], methods: Sequence[str], aggregators: Sequence[str]
) -> bool:
    whose = (
        methods if key.startswith("calfat.trainer.") else aggregators if key.startswith("calfat.aggregator.") else ()
    )
    if not whose:
        return True
    return len({plain(values.get(key)) for of, values in zip(whose, settings, strict=True) if of == whose[index]}) > 1


def _told_apart(names: Sequence[str], runs: Sequence[RunFiles], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same names, with as many further values as it takes until no two are equal; in the end, with the path."""
    names = list(names)
    for key in dict.fromkeys(key for values in settings for key in values):
        for same in {name for name in names if names.count(name) > 1}:
            members = [index for index, name in enumerate(names) if name == same]
            written = [plain(settings[index].get(key)) for index in members]
            if len(set(written)) > 1:
                for index in members:
                    names[index] += f" · {_words(key, settings[index].get(key))}"
    return [name if names.count(name) == 1 else f"{name} · {run.path}" for name, run in zip(names, runs, strict=True)]


def _words(key: str, value: Any) -> str:
    if value is not None and key in _FIRST:
        return _FIRST[key](value)
    return option_words(key.rpartition(".")[2], plain(value))


def _several(value: Any, one: str) -> str:
    """``5 clients``; a recipe that was edited by hand may say anything."""
    return counted(value, one) if isinstance(value, int) else f"{plain(value)} {one}s"
