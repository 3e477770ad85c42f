"""The record of a suite: a row for each finished run in one CSV file, which can be committed and continued elsewhere.

A run that has a row counts as finished, whether its directory is on this machine or not.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from calfat_plugin.disk import TRY_AGAIN, locked, read_whole, reporting_disk_errors, write_text
from calfat_plugin.errors import RunError
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.options import Tag, describe_options
from calfat_plugin.recipe.document import Document, dotted, flat
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.recipe.tagged_keys import has_tag
from calfat_plugin.registry import Registry
from calfat_plugin.report.table import csv_text
from calfat_plugin.results import RESULTS_FORMAT, WORST_CASE, evaluator_of
from calfat_plugin.run_files import TrustResults, read_results
from calfat_plugin.stored_run import RunPaths
from calfat_plugin.typed_json import read_typed
from calfat_plugin.version import __version__

#: A cell's name, what its choice run tries (empty for a run of the table), and the seed.
Key = tuple[str, str, int]
#: Defaults that are null today and were not: a digest keeps the meaning that it had when rows were recorded.
_DEFAULTS_THEN = {"calfat.partition.seed": 2021, "calfat.trainer.delta": 1e-6, "calfat.trainer.loss.delta": 1e-6}
CHOICE = "choice"  # the metric of a choice run: what the suite's ``choose.metric`` measured
GUESS = "guess"  # beside it, what one answer to all images would have had; rows of earlier versions have none
_HEAD = ("cell", "tried", "seed", "state", "recipe", "seconds", "processor", "calfat_plugin", "format", "verdict")
_LARGEST = 32_000_000  # bytes: a hundred thousand runs
_MOST_TRIED = 5000  # choices of evaluators that may have been added: all of a dozen
_FIRST = 4  # of these; every version of a record begins with them


@dataclass(frozen=True)
class Recorded:
    """One row."""

    state: Literal["finished", "lost"]  # lost: a choice run that failed, and any run whose training diverged
    recipe: str  # digest of what was run (:func:`digest`)
    values: Mapping[str, float]  # metric to value as measured; of a choice run only CHOICE and GUESS
    seconds: str = ""
    processor: str = ""
    calfat_plugin: str = __version__
    format: str = str(RESULTS_FORMAT)  # of the run's ``results.json``, which says how accuracies count
    verdict: str = ""  # of ``calfat trust`` (:func:`verdict_of`)

    def without(self, labels: Collection[str]) -> Recorded:
        """The row without what these evaluators measure: whatever it has under their names is not of them.

        Nor is its worst case, which is to be over their examples, too.
        """
        if not labels:
            return self
        without_number = {*labels, WORST_CASE}
        values = {}
        for metric, value in self.values.items():
            evaluator, _, _ = evaluator_of(metric).partition("/")  # pgd20 of pgd20:tail and of pgd20/ece
            if evaluator not in without_number:
                values[metric] = value
        return replace(self, values=values)


def digest(experiment: Experiment) -> str:
    """Twelve hexadecimal digits that change with what is run.

    The seed does not count, nor what a resumed run may change, nor where a plugin file lies, nor an option that others
    make useless, nor a value that equals its default: so a key that a later version adds changes no digest.
    """
    return Digests.of(experiment).now


@dataclass(frozen=True)
class Digests:
    """The digest of a recipe, and those that it had before evaluators were added to it."""

    names: Mapping[str, Any]  # the plugins that it picks (:func:`_names`)
    not_default: Mapping[str, Any]  # dotted key to each value that is not the default

    @classmethod
    def of(cls, experiment: Experiment) -> Digests:
        names = _names(experiment)
        settings = _settings(experiment.as_run())
        defaults = _defaults(names, experiment.registry)
        for plugin in experiment.picked:
            for name in plugin.entry.idle(plugin.options):
                settings.pop(dotted((*plugin.path, name)), None)
        not_default = {}
        for key, value in settings.items():
            if key not in defaults or defaults[key] != value:
                not_default[key] = value
        return cls(json.loads(names), not_default)

    @property
    def now(self) -> str:
        """The digest."""
        return self._without(())

    def added_since(self, then: str) -> tuple[str, ...] | None:
        """Labels of the evaluators that were added since the recipe had the digest ``then``; None: it never had it.

        A digest does not say which evaluators there were, so all that may have been added are tried, few before many.
        """
        labels = [_label(pick) for pick in self.names["calfat"]["evaluators"]]
        tried = 0
        for number in range(len(labels) + 1):
            for added in itertools.combinations(labels, number):
                if tried == _MOST_TRIED:
                    return None
                tried += 1
                if self._without(added) == then:
                    return added
        return None

    def _evaluator_of_key(self, key: str) -> str:
        """The label of the evaluator that a dotted key is about; empty for other keys. Labels may have dots, too."""
        longest = ""
        for pick in self.names["calfat"]["evaluators"]:
            label = _label(pick)
            if key.startswith(f"calfat.evaluators.{label}.") and len(label) > len(longest):
                longest = label
        return longest

    def _without(self, labels: Collection[str]) -> str:
        """The digest of the recipe without these evaluators."""
        section = self.names["calfat"]
        picks = [pick for pick in section["evaluators"] if _label(pick) not in labels]
        names = {**self.names, "calfat": {**section, "evaluators": picks}}
        values = {key: value for key, value in self.not_default.items() if self._evaluator_of_key(key) not in labels}
        text = json.dumps([json.dumps(names, sort_keys=True), values], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _label(pick: Mapping[str, Any]) -> str:
    return str(pick.get("label", pick["name"]))


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """Dotted key to value of what a digest is about; evaluators by their labels, also in ``recipe`` itself."""
    section = recipe["calfat"]
    for lists in (section, section["monitor"]):
        lists["evaluators"] = {pick.get("label", pick["name"]): pick for pick in lists["evaluators"]}
    return {key: value for key, value in flat(recipe).items() if not has_tag(key, Tag.NO_DIGEST)}


def _names(experiment: Experiment) -> str:
    """A recipe, as JSON, that picks the same plugins and says nothing else but the options that have no default."""
    recipe = experiment.as_run()
    section = recipe["calfat"]
    data = recipe["data_args"]
    picks: dict[str, Any] = {
        "trainer": _named(experiment.trainer, section["trainer"]),
        "aggregator": _named(experiment.aggregator, section["aggregator"]),
        "evaluators": list(map(_named, experiment.evaluators, section["evaluators"])),
        "monitor": {"evaluators": list(map(_named, experiment.monitor.evaluators, section["monitor"]["evaluators"]))},
    }
    loss = section["trainer"].get("loss")
    if loss is not None:
        picks["trainer"]["loss"] = _named(experiment.modifier, loss)
    for kind in ("dataset", "partition", "model"):
        options = _without_default(getattr(experiment, kind), section[kind])
        if options:
            picks[kind] = options
    names = {
        "data_args": {"dataset": data["dataset"], "partition_method": data["partition_method"]},
        "model_args": {"model": recipe["model_args"]["model"]},
        "calfat": picks,
    }
    return json.dumps(names, sort_keys=True)


def _named(plugin: Plugin[Any], pick: Mapping[str, Any]) -> dict[str, Any]:
    """Of a pick, its name, its label, and the options that have no default."""
    names = {key: pick[key] for key in ("name", "label") if key in pick}
    return names | _without_default(plugin, pick)


def _without_default(plugin: Plugin[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a plugin's options, those that a recipe has to give."""
    return {info.name: options[info.name] for info in describe_options(plugin.entry.config) if info.required}


@lru_cache(maxsize=256)
def _defaults(names: str, registry: Registry) -> Mapping[str, Any]:
    """The values of all keys where a recipe says nothing but names.

    Nobody runs that recipe, so it does not matter whether anybody could: Bulyan wants more clients than the default.
    """
    unchecked = assemble(Document("defaults", json.loads(names)), registry, finished=True)
    defaults = _settings(unchecked.as_run())
    for key, value in _DEFAULTS_THEN.items():
        if defaults.get(key, value) is None:
            defaults[key] = value
    return defaults


def verdict_of(directory: Path, experiment: Experiment) -> str | None:
    """What ``calfat trust`` says of a run's model, with the run's budget; empty where it was not asked, or stopped.

    None: what it says is about another budget, or another model than that of the last round. A run may have been judged
    before it was given more rounds, or by its checkpoint of the best round.
    """
    paths, threat = RunPaths(directory), experiment.threat
    trust = read_typed(TrustResults, paths.trust)
    if trust is None:
        return ""
    results = read_results(paths.results)
    rounds = experiment.num_rounds
    if results is not None and results.rounds is not None:  # fewer where training stopped early
        rounds = results.rounds
    is_of_last = (Path(trust.checkpoint).name, trust.round) == (paths.last_checkpoint.name, rounds)
    if not is_of_last or (trust.threat.norm, trust.threat.eps) != (threat.norm, exact_text(threat.eps)):
        return None
    if not trust.finished:
        return ""
    if not trust.verdict.usable:
        return f"{trust.verdict.text}, no usable number"
    return trust.verdict.text


def read_record(path: Path) -> dict[Key, Recorded]:
    """All rows; none where there is no file."""
    try:
        text = read_whole(path, _LARGEST).decode()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: cannot be read ({reason}). Restore it from a copy.") from None
    return dict(_parsed(path, text))


@lru_cache(maxsize=4)  # a plan looks at its record again for each value that each cell tries
def _parsed(path: Path, text: str) -> Mapping[Key, Recorded]:
    rows: dict[Key, Recorded] = {}
    reader = csv.DictReader(text.splitlines())
    try:
        if text and tuple(reader.fieldnames or ())[:_FIRST] != _HEAD[:_FIRST]:
            raise RunError(
                f"{path}: is there already, and calfat suite did not write it: its first line does not begin with "
                f"{','.join(_HEAD[:_FIRST])}. It is not overwritten: name another file with --record."
            )
        for row in reader:
            number = int(row["format"])
            if number != RESULTS_FORMAT:
                raise RunError(
                    f"{path}:{reader.line_num}: its format is {number}, and this version's is {RESULTS_FORMAT}, so its "
                    "numbers cannot stand in one table with new ones. Move the file away, and run the suite again."
                )
            rest: dict[str, Any] = {name: row.pop(name) for name in _HEAD[3:]}
            key = (row.pop("cell"), row.pop("tried"), int(row.pop("seed")))
            if key in rows:
                raise ValueError("a second row of its run")
            if rest["state"] not in ("finished", "lost"):
                raise ValueError(f"the state '{rest['state']}'")
            values = {name: float(text) for name, text in row.items() if text}
            if not all(map(math.isfinite, values.values())):
                raise ValueError("a value that is not finite")
            if key[1] and rest["state"] == "finished" and CHOICE not in values:
                raise ValueError(f"a choice run without a value of '{CHOICE}'")
            rows[key] = Recorded(values=values, **rest)
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise RunError(f"{path}:{reader.line_num}: damaged row: {error}. Restore the file from a copy.") from None
    return rows


def add_to_record(path: Path, rows: Mapping[Key, Recorded], gone: Iterable[Key] = ()) -> None:
    """Add rows, or replace those of the same runs, and remove those of ``gone``; several processes may do so."""
    path = path.resolve()  # a link stays one, and whoever has another to the same file locks the same folder
    with reporting_disk_errors(path, TRY_AGAIN):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            before = read_record(path)
            after = {**before, **rows}
            for key in gone:
                after.pop(key, None)
            if after != before:
                write_text(path, _as_csv(after), TRY_AGAIN)


def _as_csv(rows: Mapping[Key, Recorded]) -> str:
    metrics: dict[str, None] = {}  # each once, in order
    for row in rows.values():
        metrics.update(dict.fromkeys(row.values))
    lines: list[list[Any]] = [[*_HEAD, *metrics]]
    for key, row in sorted(rows.items()):
        line: list[Any] = list(key)
        for name in _HEAD[len(key) :]:
            line.append(getattr(row, name))
        for metric in metrics:
            text = ""
            if metric in row.values:
                text = repr(row.values[metric])
            line.append(text)
        lines.append(line)
    return csv_text(lines)
