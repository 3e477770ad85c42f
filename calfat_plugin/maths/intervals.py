"""The numbers of tables: means over seeds with their intervals, paired differences, which one is bold, and tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import NamedTuple

from calfat_plugin.maths.metrics import mean_std

CONFIDENCE = 0.95
_QUANTILE = (1 + CONFIDENCE) / 2  # two-sided
_FEWEST_EQUAL = 4  # values that have an interval although all are equal; of fewer it may be a coincidence
_ROUNDING = 1e-9  # differences of decimals are not exact: 0.3112 - 0.2912 > 0.02


class Interval(NamedTuple):
    """From ``low`` to ``high``, in the unit of what it is about."""

    low: float
    high: float


class Difference(NamedTuple):
    """One setting minus another, paired over the seeds that both have."""

    mean: float  # a fraction for accuracies
    interval: Interval | None  # Student's, of that mean; None where :func:`student` gives none
    seeds: int


class Rival(NamedTuple):
    """What a setting is compared with, and how."""

    name: str  # of the best setting; for the best itself of the next best
    difference: Difference | None  # to the rival; None where they share no seed
    is_clear_best: bool = False  # the interval of its difference to each other one excludes zero: others may vary more


def wilson(share: float, number: int) -> Interval:
    """Wilson's score interval of a share of ``number`` examples: what others of the same kind would have given.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    z = NormalDist().inv_cdf(_QUANTILE)
    centre = share + z * z / (2 * number)
    half = z * math.sqrt(share * (1 - share) / number + (z / (2 * number)) ** 2)
    scale = 1 + z * z / number
    low = max(0.0, (centre - half) / scale)
    high = min(1.0, (centre + half) / scale)
    # Rounding must not leave a share of 0 or 1 outside.
    return Interval(min(low, share), max(high, share))


def student(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's t interval of the mean that values of several seeds estimate.

    None for fewer than two values, and for two or three that are equal: that tells little of their spread, and an
    interval without width would make any difference certain.
    """
    if len(values) < 2:
        return None
    mean, std = mean_std(values)
    assert std is not None  # of two values or more
    if std < _ROUNDING and len(values) < _FEWEST_EQUAL:
        return None
    from scipy.special import stdtrit  # here, not above: recipes are checked without it

    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * std / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def of_accuracy(values: Sequence[float], num_examples: int | None) -> Interval | None:
    """The interval of a mean accuracy, within [0, 1]: Student's over seeds, Wilson's for one run, or None."""
    if len(values) == 1:
        if not num_examples:
            return None
        return wilson(values[0], num_examples)
    interval = student(values)
    if interval is None:
        return None
    return Interval(max(0.0, interval.low), min(1.0, interval.high))


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """``one`` minus ``other`` over the seeds that both have; None where they share none."""
    differences = _differences(one, other)
    if not differences:
        return None
    return Difference(mean_std(differences).mean, student(differences), len(differences))


def _differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """``one`` minus ``other``, seed to value, for each seed that both have."""
    return [value - other[seed] for seed, value in one.items() if seed in other]


def rivals(settings: Mapping[str, Mapping[int, float]]) -> dict[str, Rival]:
    """Each setting (name to seed to value) compared with the best one, and the best with the next; more is better."""
    means = {}
    for name, by_seed in settings.items():
        if by_seed:
            means[name] = mean_std(list(by_seed.values())).mean
    if len(means) < 2:
        return {}
    best, *others = sorted(means, key=lambda name: -means[name])  # of equals the first
    rival_of = {}
    is_clear_best = True
    for name in others:
        rival_of[name] = Rival(best, paired(settings[name], settings[best]))
        lead = paired(settings[best], settings[name])
        is_certain = lead is not None and lead.interval is not None and lead.interval.low > _ROUNDING
        is_clear_best = is_clear_best and is_certain
    lead_over_next = paired(settings[best], settings[others[0]])
    rival_of[best] = Rival(others[0], lead_over_next, is_clear_best)
    return rival_of


@dataclass(frozen=True)
class Score:
    """What one setting measured with one evaluator: a number of a table, of suites and of pages alike."""

    by_seed: dict[int, float]  # accuracies are fractions in [0, 1], of a run that was lost 0
    num_examples: int | None = None  # what one value is a share of; None where it is no share of examples
    is_accuracy: bool = True  # False for a figure of a plugin (``pgd20/ece``), which is shown as it is
    reported: float | None = None  # the published number
    release: Sequence[float] = ()  # the values by the release's convention, with which the published number compares
    tolerance: float | None = None  # difference from it that passes unmarked, a fraction too; None: none is given
    rival: Rival | None = None  # the best score of the same problem, or the next best for the best itself
    not_run: Mapping[int, str] = field(default_factory=dict)  # seed to why its attack did not run: it has no value

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self.by_seed.values())

    @property
    def mean(self) -> float | None:
        if not self.values:
            return None
        return mean_std(self.values).mean

    @property
    def std(self) -> float | None:
        """Sample standard deviation (ddof 1); None for fewer than two seeds."""
        if not self.values:
            return None
        return mean_std(self.values).std

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean: Student's over seeds; of a single accuracy Wilson's, over its test examples."""
        if self.is_accuracy:
            return of_accuracy(self.values, self.num_examples)
        return student(self.values)

    @property
    def is_clear_best(self) -> bool:
        """Whether it is bold: the best, and the interval of its paired difference to each other score excludes zero."""
        return self.rival is not None and self.rival.is_clear_best

    @property
    def release_mean(self) -> float | None:
        if not self.release:
            return None
        return mean_std(self.release).mean

    @property
    def difference(self) -> float | None:
        """Measured minus reported, both by the release's convention, which papers' tables follow."""
        if self.release_mean is None or self.reported is None:
            return None
        return self.release_mean - self.reported

    @property
    def beyond(self) -> bool | None:
        """Whether the difference exceeds the tolerance; None where there is nothing to compare."""
        if self.difference is None or self.tolerance is None:
            return None
        return abs(self.difference) > self.tolerance + _ROUNDING


def with_rivals(scores: Mapping[str, Score]) -> dict[str, Score]:
    """The scores of settings that were measured alike on one problem, by name, each with its rival."""
    settings = {name: score.by_seed for name, score in scores.items()}
    rival_of = rivals(settings)
    scores_with_rivals = {}
    for name, score in scores.items():
        scores_with_rivals[name] = replace(score, rival=rival_of.get(name))
    return scores_with_rivals


def paired_p_value(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Two-sided p-value of the paired t test that ``one`` and ``other``, seed to value, have equal means.

    None where the differences have no interval (:func:`student`): for fewer than two pairs, and for two or three
    that differ by the same amount. Of more such pairs 1 where they are equal, else 0.
    """
    from scipy.stats import ttest_1samp

    differences = _differences(one, other)
    if student(differences) is None:
        return None
    mean, std = mean_std(differences)
    assert std is not None  # of two differences or more
    if std < _ROUNDING:
        return float(abs(mean) < _ROUNDING)
    return float(ttest_1samp(differences, 0).pvalue)


def mcnemar(only_one: int, only_other: int) -> float:
    """Exact two-sided p-value that two models are right about equally many of the same images (McNemar 1947)."""
    from scipy.stats import binomtest

    number = only_one + only_other
    if number == 0:
        return 1.0
    return float(binomtest(only_one, number).pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for their number: one below 0.05 may be called significant with all others like it.

    None stands for a test that was planned and not made, which counts as 1.
    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    """
    known = []
    for index, p in enumerate(p_values):
        if p is not None:
            known.append((p, index))
    known.sort()
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[index] = highest
    return adjusted


def is_level(one: Mapping[int, float], other: Mapping[int, float], margin: float) -> bool:
    """Whether two one-sided paired t tests at 5 % (TOST) reject a difference of ``margin`` or more in either direction.

    Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the equivalence
    of average bioavailability", J. Pharmacokinetics and Biopharmaceutics 15 (1987). Where the differences have no
    interval (:func:`student`), nothing is rejected.
    """
    interval = student(_differences(one, other), 0.90)
    return interval is not None and -margin < interval.low and interval.high < margin
