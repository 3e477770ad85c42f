"""95 % intervals, against scipy's own and by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from scipy import stats

from calfat_plugin.maths.intervals import (
    Difference,
    Interval,
    Rival,
    holm,
    is_level,
    of_accuracy,
    paired,
    paired_p_value,
    rivals,
    student,
    wilson,
)
from calfat_plugin.maths.metrics import mean_std
from calfat_plugin.results import EvaluationResult, evaluation_as_json
from calfat_plugin.typed_json import from_json


@pytest.mark.parametrize(
    ("right", "number"), [(0, 1), (1, 1), (0, 359), (359, 359), (213, 359), (7, 32), (5000, 10000)]
)
def test_wilsons_interval_is_that_of_scipy(right: int, number: int) -> None:
    expected = stats.binomtest(right, number).proportion_ci(0.95, method="wilson")
    found = wilson(right / number, number)
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= found.low <= right / number <= found.high <= 1


def test_a_result_has_the_interval_of_its_accuracy_also_in_results_json() -> None:
    """30 of 40 right, by hand with z^2 = 3.8415: (p + z^2/2n +- z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n).

    That is (0.75 + 0.048018 +- 1.959964 * 0.072717) / 1.096036. By the release's convention 35 are right, which counts
    for nothing here.
    """
    result = EvaluationResult("pgd", 40, 0.75, 0.875, (0.5, 1.0), (0.75, 1.0), {}, "by hand", 1.0)
    assert result.interval == pytest.approx((0.598061, 0.858129), abs=1e-6)
    row = json.loads(json.dumps(evaluation_as_json(result)))
    assert row["interval"] == pytest.approx([0.598061, 0.858129], abs=1e-6)
    assert from_json(EvaluationResult, row) == result
    not_run = EvaluationResult.without_number("pgd", "there are 3 classes", settings={}, implementation="by hand")
    assert not_run.interval is None
    assert "interval" not in evaluation_as_json(not_run)


@pytest.mark.parametrize("values", [(0.5, 0.25), (0.61, 0.64, 0.7), (0.2,) * 4, (0.1, 0.4, 0.2, 0.3, 0.9)])
def test_students_interval_is_that_of_scipy(values: tuple[float, ...]) -> None:
    mean, error = sum(values) / len(values), stats.sem(values)
    low, high = stats.t.interval(0.95, len(values) - 1, mean, error) if error else (mean, mean)
    assert student(values) == pytest.approx((low, high), abs=1e-12)


def test_two_or_three_equal_values_have_no_interval() -> None:
    """Nor have differences that are equal but for rounding; what is no test is neither clear nor level."""
    one, other = {1: 0.8, 2: 0.9, 3: 0.3}, {1: 0.7, 2: 0.8, 3: 0.2}
    assert len({one[seed] - other[seed] for seed in one}) > 1
    for seeds in ((1, 2), (1, 2, 3)):
        some = {seed: one[seed] for seed in seeds}
        assert paired(some, other) == Difference(pytest.approx(0.1), None, len(seeds))  # type: ignore[arg-type]
        assert paired_p_value(some, other) is None
        assert not is_level(some, other, 0.2)
        assert not any(rival.is_clear_best for rival in rivals({"one": some, "other": other}).values())
    assert student((0.5,) * 2) is student((0.5,) * 3) is None
    assert student((0.5,) * 4) == (0.5, 0.5)
    assert student((0.5,)) is student(()) is None


def test_an_accuracy_has_the_interval_of_its_seeds_or_else_of_its_examples_and_stays_an_accuracy() -> None:
    assert of_accuracy((0.5,), 32) == wilson(0.5, 32)
    assert of_accuracy((0.5,), None) is None
    assert of_accuracy((0.5,), 0) is None
    assert of_accuracy((), 32) is None
    assert of_accuracy((0.1, 0.9), 32) == Interval(0.0, 1.0)
    assert of_accuracy((0.5, 0.5625, 0.625), 32) == student((0.5, 0.5625, 0.625))


def test_differences_are_paired_over_the_seeds_that_both_have() -> None:
    """0.25 and 0.75: mean 0.5, 12.706 standard errors of 0.25 to each side."""
    found = paired({0: 0.5, 1: 1.0, 2: 0.9}, {1: 0.25, 0: 0.25, 7: 0.0})
    assert found == Difference(0.5, pytest.approx((0.5 - 12.7062 / 4, 0.5 + 12.7062 / 4), abs=1e-4), 2)  # type: ignore[arg-type]
    assert paired({0: 0.5}, {0: 0.25}) == Difference(0.25, None, 1)
    assert paired({0: 0.5}, {1: 0.25}) is None


def test_each_setting_is_compared_with_the_best_and_the_best_with_the_next_best() -> None:
    settings: dict[str, dict[int, float]] = {  # by name, the lowest is first
        "lowest": dict.fromkeys(range(4), 0.25),
        "top": dict.fromkeys(range(4), 0.75),
        "none": {},
        "second": dict.fromkeys(range(4), 0.5),
    }
    assert rivals(settings) == {
        "lowest": Rival("top", Difference(-0.5, Interval(-0.5, -0.5), 4)),
        "top": Rival("second", Difference(0.25, Interval(0.25, 0.25), 4), True),
        "second": Rival("top", Difference(-0.25, Interval(-0.25, -0.25), 4)),
    }
    assert [name for name, rival in rivals(settings).items() if rival.is_clear_best] == ["top"]


@pytest.mark.parametrize(
    "third",
    [
        {0: 0.45, 1: 0.60, 2: 0.70, 3: 0.56},  # 57.75 %: 2.25 points less, from -15 to 19
        {0: 0.5},  # one seed
        {7: 0.5, 8: 0.5},  # nothing to pair
    ],
)
def test_the_best_is_clear_only_where_it_is_beside_every_other(third: Mapping[int, float]) -> None:
    settings = {"best": {0: 0.60, 1: 0.61, 2: 0.59, 3: 0.60}, "next": {0: 0.58, 1: 0.589, 2: 0.571, 3: 0.58}}
    assert rivals(settings)["best"].is_clear_best
    found = rivals({**settings, "third": third})["best"]
    assert (found.name, found.difference) == ("next", rivals(settings)["best"].difference)
    assert not found.is_clear_best
    last = dict.fromkeys(range(4), 0.1)  # clearly worse
    assert rivals({**settings, "last": last})["best"].is_clear_best
    assert not rivals({**settings, "third": third, "last": last})["best"].is_clear_best


@pytest.mark.parametrize("settings", [{}, {"one": {0: 0.5}}, {"one": {0: 0.5}, "none": {}}])
def test_one_setting_has_no_rival(settings: Mapping[str, Mapping[int, float]]) -> None:
    assert rivals(settings) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({0: 0.5}, {0: 0.25}),  # one seed
        ({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}),  # no difference
        ({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.75}),  # one that chance explains
        ({0: 0.5, 1: 0.75}, {2: 0.25, 3: 0.25}),  # nothing to pair
        ({0: 0.25, 1: 0.25, 2: 1.0}, {0: 0.5, 1: 0.5}),  # the best mean, but worse wherever both were run
    ],
)
def test_no_setting_is_clearly_the_best(one: Mapping[int, float], other: Mapping[int, float]) -> None:
    found = rivals({"one": one, "other": other})
    assert (found["one"].name, found["other"].name) == ("other", "one")
    assert not any(rival.is_clear_best for rival in found.values())


ONE = {1: 0.61, 2: 0.64, 3: 0.70, 4: 0.55, 9: 0.1}
OTHER = {4: 0.50, 3: 0.62, 2: 0.63, 1: 0.60, 7: 0.9}


def test_the_paired_t_test_is_that_of_scipy_over_common_seeds() -> None:
    expected = stats.ttest_rel([ONE[seed] for seed in (1, 2, 3, 4)], [OTHER[seed] for seed in (1, 2, 3, 4)])
    assert paired_p_value(ONE, OTHER) == pytest.approx(expected.pvalue, abs=1e-12)
    assert paired_p_value({1: 0.5}, {1: 0.4}) is None
    four = {1: 0.5, 2: 0.25, 3: 0.8, 4: 0.3}
    assert paired_p_value(four, dict(four)) == paired_p_value(four, {1: 0.5, 2: 0.25, 3: 0.8, 4: 0.1 + 0.2}) == 1
    assert paired_p_value(four, {seed: value - 0.1 for seed, value in four.items()}) == 0


def test_holms_adjustment_is_stepwise_in_any_order() -> None:
    """Of four tests: 4 x 0.01, 3 x 0.015, 2 x 0.03, and 0.04, which may not be below the one before it."""
    assert holm([0.04, 0.01, 0.03, 0.015]) == pytest.approx([0.06, 0.04, 0.06, 0.045])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm([None, 0.01, None, 0.02]) == [None, pytest.approx(0.04), None, pytest.approx(0.06)]


def test_level_is_the_90_percent_interval_within_the_margin() -> None:
    """TOST by scipy: two one-sided tests against the two margins."""
    differences = [ONE[seed] - OTHER[seed] for seed in (1, 2, 3, 4)]
    for margin in (0.01, 0.04, 0.05, 0.07, 0.08, 0.09, 0.1, 0.2):
        above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
        below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
        assert is_level(ONE, OTHER, margin) == is_level(OTHER, ONE, margin) == (max(above, below) < 0.05)
    assert not is_level({1: 0.5}, {1: 0.5}, 0.1)


def test_mean_and_standard_deviation() -> None:
    assert mean_std([2.0, 4.0, 9.0]) == pytest.approx((5.0, 13**0.5))
    assert mean_std([0.3]) == (0.3, None)
    with pytest.raises(ValueError, match=r"^no values to average$"):
        mean_std([])
