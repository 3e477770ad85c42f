"""How accuracies were measured: what must be equal before two of them share a column or a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from calfat_plugin.report.numbers import counted
from calfat_plugin.report.reading import NATURAL, RunFiles, label_of
from calfat_plugin.report.words import listing, option_words, plain

_ALL = "all"
_DATA = "data set"
_EXAMPLES = "examples"
_SPLIT, _VALIDATION = "split", "validation split"
_BUDGET = ("norm", "eps")
_NOT_THE_NUMBER = ("label", "max_examples", "batch_size", "seed")  # options that say nothing about the attack


@dataclass(frozen=True)
class Measure:
    """One way to measure accuracy.

    Attributes:
        label: the evaluator's.
        facts: term to value: the data set, the split if it is not the test split, how many of its examples, and the
            attack's options.
    """

    label: str
    facts: tuple[tuple[str, str], ...]

    @property
    def attack(self) -> dict[str, str]:
        """The facts apart from the examples."""
        return {term: value for term, value in self.facts if term not in (_EXAMPLES, _SPLIT)}

    def on_any_data(self) -> Measure:
        """The same for tables, which name the data set elsewhere."""
        return Measure(self.label, tuple(fact for fact in self.facts if fact[0] != _DATA))


def monitored(run: RunFiles, label: str) -> Measure:
    """How a column of ``rounds.csv`` was measured."""
    pick = _pick(run, label, "monitor", "evaluators")
    limits = (run.value("calfat", "monitor", "max_examples"), pick.get("max_examples"))
    examples = plain(min((limit for limit in limits if limit is not None), default=_ALL))
    return _measure(run, label, pick, examples, split=_VALIDATION if run.monitored_split == "validation" else None)


def final(run: RunFiles, evaluation: Mapping[str, Any]) -> Measure:
    """How an entry of the final evaluation was measured."""
    label, number = str(evaluation["label"]), evaluation.get("num_examples")
    pick = _pick(run, label, "evaluators")
    limited = number is not None and (number < _most(run) or number == pick.get("max_examples"))
    return _measure(run, label, pick, f"{number:,}" if limited else _ALL)


def on_examples(found: Iterable[tuple[str, Iterable[tuple[RunFiles, Mapping[str, Any]]]]]) -> str:
    """``natural and fgsm on all 359 test examples, pgd20 on 32 of 359 test examples``.

    Args:
        found: heading to (run, entry of its final evaluation) of all that it is about.
    """
    alike: dict[str, list[str]] = {}
    for heading, evaluations in found:
        alike.setdefault(listing(list(dict.fromkeys(_examples(*one) for one in evaluations))), []).append(heading)
    return ", ".join(f"{listing(headings)} on {examples}" for examples, headings in alike.items())


def _examples(run: RunFiles, evaluation: Mapping[str, Any]) -> str:
    number, most = evaluation.get("num_examples") or 0, _most(run)
    return f"{'all' if number == most else f'{number:,} of'} {counted(most, 'test example')}"


def _most(run: RunFiles) -> int:
    """Test examples that at least one evaluator measured; natural accuracy is of all of them."""
    return max((int(other.get("num_examples") or 0) for other in run.evaluations), default=0)


def without_curve(bars: Measure, runs: Iterable[RunFiles], headings: Mapping[str, str]) -> str:
    """Why the curves of a page show another attack than its bars, a sentence; empty where they show the same.

    Args:
        bars: how the bars were measured.
        runs: whose curves are on the page.
        headings: label to what the page calls it, where it is something else.
    """
    curves = [monitored(run, label) for run in runs for label in run.monitored if len(run.curve(label)) > 1]
    attacks = [measure for measure in curves if measure.label != NATURAL]
    same = any(measure.label == bars.label and measure.attack == bars.attack for measure in attacks)
    if bars.label == NATURAL or not curves or same:
        return ""
    named = titles([bars, *attacks], lambda label: headings.get(label, label))
    found = listing([name for measure, name in named.items() if measure != bars]) or "no attack"
    return f" The curves show {found}: calfat.monitor.evaluators says what is measured after a round."


def accuracy_title(label: str, headings: Mapping[str, str]) -> str:
    """``Natural accuracy``, ``Accuracy under PGD-20``."""
    heading = headings.get(label, label)
    return f"{heading[:1].upper()}{heading[1:]} accuracy" if label == NATURAL else f"Accuracy under {heading}"


def titles(measures: Iterable[Measure], title: Callable[[str], str]) -> dict[Measure, str]:
    """Each measure's title, with what sets it apart from others of its label: ``PGD-20 (32 examples)``.

    Args:
        measures: all that a reader sees together.
        title: of a label.
    """
    found = list(dict.fromkeys(measures))
    return {measure: title(measure.label) + _apart(measure, found) for measure in found}


def with_examples(named: Mapping[Measure, str]) -> dict[Measure, str]:
    """Titles of columns side by side: those that are not of all test examples say of how many, ``(64 examples)``."""
    found = {}
    for measure, title in named.items():
        number = dict(measure.facts).get(_EXAMPLES, _ALL)
        words = _words(_EXAMPLES, number)
        found[measure] = title if number == _ALL or words in title else f"{title} ({words})"
    return found


def _apart(measure: Measure, among: Iterable[Measure]) -> str:
    alike = [dict(other.facts) for other in among if other.label == measure.label]
    own = [term for term, value in measure.facts if any(other.get(term) != value for other in alike)]
    facts = dict(measure.facts)
    return f" ({', '.join(_words(term, facts[term]) for term in own)})" if own else ""


def _words(term: str, value: str) -> str:
    if term == _EXAMPLES:
        return f"{value} test examples" if value == _ALL else f"{value} examples"
    return value if term in (_DATA, _SPLIT, "name") else option_words(term, value)


def _pick(run: RunFiles, label: str, *section: str) -> Mapping[str, Any]:
    """An evaluator as the recipe picks it."""
    picks = run.value("calfat", *section) or ()
    return next((pick for pick in picks if isinstance(pick, Mapping) and label_of(pick) == label), {})


def _measure(run: RunFiles, label: str, pick: Mapping[str, Any], examples: str, split: str | None = None) -> Measure:
    threat = run.value("calfat", "threat") or {}
    options = {key: value for key, value in pick.items() if key not in _NOT_THE_NUMBER}
    budget = {} if label == NATURAL else dict.fromkeys(_BUDGET)
    attack = {key: threat.get(key) if value is None else value for key, value in {**budget, **options}.items()}
    known = {_DATA: run.value("data_args", "dataset"), _SPLIT: split, _EXAMPLES: examples, **attack}
    return Measure(label, tuple((term, plain(value)) for term, value in known.items() if value is not None))
