"""How an accuracy was measured: what was measured in different ways has columns and charts of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from calfat_plugin.options import options_to_plain
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.report.labels import listing, named, plain
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.reading import NATURAL, RunFiles

_ALL = "all"
_DATA, _EXAMPLES, _SPLIT = "data_args.dataset", "examples", "split"
_NOT_THE_NUMBER = ("label", "max_examples", "batch_size", "seed")  # options that say nothing about the attack


@dataclass(frozen=True)
class Measure:
    """One way to measure accuracy."""

    label: str  # the evaluator's
    facts: tuple[tuple[str, str], ...]

    def on_any_data(self) -> Measure:
        """The same for tables, which name the data set elsewhere."""
        return Measure(self.label, tuple(fact for fact in self.facts if fact[0] != _DATA))


def monitored(run: RunFiles, label: str) -> Measure:
    """How a column of ``rounds.csv`` was measured."""
    monitor = run.recipe.monitor
    pick = _pick(monitor.evaluators, label)
    limits = (monitor.max_examples, pick.get("max_examples"))
    examples = plain(min((limit for limit in limits if limit is not None), default=_ALL))
    split = run.recipe.data.monitored_split
    return _measure(run, label, pick, examples, split=None if split == "test" else split)


def final(run: RunFiles, evaluation: Mapping[str, Any]) -> Measure:
    """How an entry of the final evaluation was measured."""
    label, number = str(evaluation["label"]), evaluation.get("num_examples")
    pick = _pick(run.recipe.evaluators, label)
    limited = number is not None and (number < _most(run) or number == pick.get("max_examples"))
    return _measure(run, label, pick, f"{number:,}" if limited else _ALL)


def on_examples(found: Iterable[tuple[str, Iterable[tuple[RunFiles, Mapping[str, Any]]]]]) -> str:
    """``natural and fgsm on all 359 test examples, pgd20 on 32 of 359 test examples``."""
    alike: dict[str, list[str]] = {}
    for heading, evaluations in found:
        texts: dict[str, None] = {}
        for run, evaluation in evaluations:
            number, most = evaluation.get("num_examples") or 0, _most(run)
            texts[f"{'all' if number == most else f'{number:,} of'} {counted(most, 'test example')}"] = None
        alike.setdefault(listing(list(texts)), []).append(heading)
    return ", ".join(f"{listing(headings)} on {examples}" for examples, headings in alike.items())


def _most(run: RunFiles) -> int:
    """Test examples that at least one evaluator measured; natural accuracy is of all of them."""
    return max((int(other.get("num_examples") or 0) for other in run.evaluations), default=0)


def accuracy_title(label: str, headings: Mapping[str, str]) -> str:
    """``Natural accuracy``, ``Accuracy under PGD-20``."""
    heading = headings.get(label, label)
    return f"{heading[:1].upper()}{heading[1:]} accuracy" if label == NATURAL else f"Accuracy under {heading}"


def titles(measures: Iterable[Measure], title: Callable[[str], str]) -> dict[Measure, str]:
    """Each measure's title, with what sets it apart from others of its label: ``PGD-20 (examples 32)``.

    It is the facts that others of the label do not share, and the number of examples unless it is all of them.
    """
    found = {measure: dict(measure.facts) for measure in measures}
    named_so = {}
    for measure, facts in found.items():
        alike = [other for each, other in found.items() if each.label == measure.label]
        own = [key for key, value in facts.items() if any(other.get(key) != value for other in alike)]
        if _EXAMPLES not in own and facts.get(_EXAMPLES, _ALL) != _ALL:
            own.append(_EXAMPLES)
        apart = f" ({', '.join(named(facts, [key]) for key in own)})" if own else ""
        named_so[measure] = title(measure.label) + apart
    return named_so


def _pick(plugins: Iterable[Plugin[Any]], label: str) -> Mapping[str, Any]:
    """An evaluator as the recipe writes it in full; empty where it is none of these."""
    return next((plugin.as_run() for plugin in plugins if plugin.label == label), {})


def _measure(run: RunFiles, label: str, pick: Mapping[str, Any], examples: str, split: str | None = None) -> Measure:
    threat = options_to_plain(run.recipe.threat)
    options = {key: value for key, value in pick.items() if key not in _NOT_THE_NUMBER}
    budget = {} if label == NATURAL else dict.fromkeys(("norm", "eps"))
    attack = {key: threat.get(key) if value is None else value for key, value in {**budget, **options}.items()}
    known = {_DATA: run.recipe.dataset.name, _SPLIT: split, _EXAMPLES: examples, **attack}
    return Measure(label, tuple((key, plain(value)) for key, value in known.items() if value is not None))
