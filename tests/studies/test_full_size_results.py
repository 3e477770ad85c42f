"""The study at full size: results.md shows what its records say, in the words that its plan allows."""

from __future__ import annotations

import dataclasses
import re

import pandas as pd
import pytest
from scipy import stats

from studies import pages
from studies.full_size import tables
from studies.full_size.curves import HEAD
from studies.full_size.tables import FLOOR, NAMES, PAPER, REFERENCE, STANDARD, Study

WORST = ("natural:worst-class", "pgd20:worst-class")
SUITE = {
    "seeds": range(4),
    "set": {"calfat.evaluators": ["natural"]},
    "axes": {"beta": {"0.1": {}, "IID": {}}, "method": dict.fromkeys([PAPER, REFERENCE, STANDARD])},
}


def made(*rows: tuple[str, list[float], list[float]], curves: pd.DataFrame | None = None, **changed: object) -> Study:
    """A study of four pairs: cell, natural and AutoAttack accuracies."""
    runs = pd.concat(
        pd.DataFrame({"cell": cell, "seed": range(len(natural)), "natural": natural, "autoattack": robust})
        for cell, natural, robust in rows
    )
    runs[[*WORST, "pgd20"]] = 0.5
    runs["verdict"] = ""
    no_curves = pd.DataFrame(columns=HEAD)
    return Study({**SUITE, **changed}, runs.set_index(["cell", "seed"]), {}, no_curves if curves is None else curves)


def skewed(robust: list[float], standard: list[float], natural: float = 0.15) -> Study:
    return made(
        (f"0.1/{PAPER}", [0.8, 0.8, 0.81, 0.82], robust),
        (f"0.1/{REFERENCE}", [0.7, 0.7, natural, 0.72], [0.5] * 4),
        (f"0.1/{STANDARD}", [0.9] * 4, standard),
    )


def test_every_number_of_a_table_is_that_of_its_record() -> None:
    page, readme = (path.read_text(encoding="utf-8") for path in (tables.PAGE, tables.README))
    for text in (page, readme):
        written = "python -m studies.full_size.tables writes them anew"
        assert pages.with_tables(text, "full", tables.TABLES) == text, written
    with_rows = [name for name in NAMES if (of := tables.study(name)) is not None and of.cells]
    published, shown = (re.findall(r"<!-- full: (.*) -->", text) for text in (page, readme))
    assert {"hypotheses", *(f"accuracies {name}" for name in with_rows)} <= set(published)
    assert shown == ["skewed digits"]
    head, *rows = tables.skewed("digits")[1]
    assert [*head][:2] == ["method", "n"]
    assert [[*row][:2] for row in rows] == [[row, "61"] for row in (FLOOR, PAPER, REFERENCE, STANDARD)]


def test_endpoints_of_hand_made_pairs() -> None:
    """The exchange: a point of AutoAttack is worth (0.9 - 0.7) / (0.5 - 0.1) points natural in pair 1."""
    of = skewed([0.50, 0.49, 0.50, 0.51], [0.1] * 4)
    found = {each.endpoint: each for each in of.comparisons()}
    gain = [0.1, 0.1 - 0.01 * 0.2 / 0.4, 0.66, 0.1 + 0.01 * 0.18 / 0.4]
    equal = found[tables.AT_EQUAL]
    assert list(of.at_equal()) == pytest.approx(gain)
    assert equal.p_value == pytest.approx(stats.ttest_1samp(gain, 0).pvalue)
    fell = found[tables.FELL]
    assert (fell.difference.mean, fell.difference.interval, fell.p_value) == (-0.25, None, 1.0)
    assert (found["autoattack"].word, found[WORST[0]].word) == ("level", "not clear")
    assert tables.LEAD not in found
    assert of.claim(tables.LEAD) == "not run yet"


def test_a_family_is_corrected_for_all_that_was_planned_in_it() -> None:
    """Six tests, of which the last was not run."""
    found = {each.endpoint: each for each in skewed([0.50, 0.49, 0.50, 0.51], [0.1] * 4, 0.7).comparisons()}
    equal = found[tables.AT_EQUAL]
    assert equal.p_value is not None
    assert equal.p_value < 0.001
    assert equal.adjusted == pytest.approx(6 * equal.p_value)
    assert equal.word == "clear"
    rows = ((f"0.1/{row}", [0.8, 0.9, 0.7], [0.5, 0.6, 0.4]) for row in (PAPER, REFERENCE, STANDARD))
    assert {each.word for each in made(*rows).comparisons()} == {"not all pairs yet"}


def with_both_floors(seeds: range) -> Study:
    """Both rows of CalFAT, FedPGD and standard FL, of these pairs."""
    count = len(seeds)
    rows = ((FLOOR, 0.60), (PAPER, 0.50), (REFERENCE, 0.62), (STANDARD, 0.10))
    values = ((f"0.1/{row}", [0.9] * count, [robust + 0.001 * pair for pair in range(count)]) for row, robust in rows)
    axes = {"beta": {"0.1": {}}, "method": dict.fromkeys([FLOOR, PAPER, REFERENCE, STANDARD])}
    of = made(*values, axes=axes, seeds=seeds)
    return dataclasses.replace(of, runs=of.runs.rename(index=dict(enumerate(seeds)), level="seed"))


def test_the_floor_of_one_example_is_compared_with_fedpgd_and_with_the_former_floor() -> None:
    """Eight tests, and the three of the former floor are of no hypothesis; as published first, that row has five."""
    of = with_both_floors(range(4))
    assert of.main == FLOOR
    against = {(each.cell, each.endpoint): each for each in of.comparisons()}
    assert len(against) == 8
    assert against[f"0.1/{REFERENCE}", "autoattack"].difference.mean == pytest.approx(-0.02)
    assert against[f"0.1/{PAPER}", "autoattack"].difference.mean == pytest.approx(0.1)
    assert of.claim("autoattack").startswith("-2.0")
    assert [each.cell for each in of.comparisons(PAPER)] == [f"0.1/{REFERENCE}"] * 5
    assert of.comparisons(PAPER)[2].difference.mean == pytest.approx(-0.12)


def test_pairs_of_the_pilot_are_left_out_of_what_nobody_had_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "study", lambda _: with_both_floors(range(4005, 4012)))
    _, (_, *rows) = tables.unseen("digits")
    assert {row[0] for row in rows} == {REFERENCE, PAPER}
    assert {row[2] for row in rows} == {"3"}  # 4009 to 4011


def test_a_pair_in_which_standard_training_is_as_robust_leaves_the_fourth_undone() -> None:
    of = skewed([0.50, 0.49, 0.50, 0.51], [0.1, 0.1, 0.1, 0.5])
    found = {each.endpoint: each for each in of.comparisons()}
    assert (found[tables.AT_EQUAL].p_value, found[tables.AT_EQUAL].difference.pairs) == (None, 3)
    assert of.claim(tables.AT_EQUAL).endswith("not tested: 1 pairs without a rate of exchange")
    assert found[tables.FELL].adjusted is not None


@pytest.mark.parametrize(
    ("robust", "level", "equal"),
    [
        ([0.7, 0.71, 0.7, 0.69], "clear: not level", "clear"),
        ([0.3, 0.29, 0.3, 0.31], "clear: not level", "not clear"),
        ([0.485, 0.484, 0.485, 0.486], "clear: level all the same", "clear"),
        ([0.1, 0.09, 0.1, 0.11], "clear: not level", "clear: the opposite"),
    ],
)
def test_a_clear_difference_says_what_it_means_for_its_hypothesis(robust: list[float], level: str, equal: str) -> None:
    of = skewed(robust, [0.1] * 4, 0.7)
    assert of.claim("autoattack").rpartition(", ")[2] == level
    assert of.claim(tables.AT_EQUAL).rpartition(", ")[2] == equal


@pytest.mark.parametrize(("collapsed", "word"), [(REFERENCE, "clear"), (PAPER, "clear: the opposite")])
def test_a_row_that_collapses_more_often_is_the_opposite_of_what_was_expected(collapsed: str, word: str) -> None:
    seeds = range(12)
    rows = ((f"0.1/{row}", [0.1 if row == collapsed else 0.8] * 12, [0.5] * 12) for row in (PAPER, REFERENCE, STANDARD))
    assert made(*rows, seeds=seeds).claim(tables.FELL).rpartition(", ")[2] == word


def test_the_lead_is_compared_between_skew_and_an_even_split() -> None:
    naturals = {"0.1": ([0.8, 0.81, 0.8, 0.79], [0.6, 0.6, 0.61, 0.6]), "IID": ([0.9] * 4, [0.8, 0.8, 0.8, 0.81])}
    rows = (
        (f"{beta}/{row}", of[place], [0.5] * 4)
        for beta, of in naturals.items()
        for place, row in ((0, PAPER), (1, REFERENCE))
    )
    (found,) = (each for each in made(*rows).comparisons() if each.endpoint == tables.LEAD)
    assert found.difference.mean == pytest.approx(0.1975 - 0.0975)
    assert found.word == "clear"


@pytest.mark.parametrize(("rose", "claim"), [(0.012, "4 pairs, not trained to the end"), (0.009, None)])
def test_a_row_says_how_long_it_was_trained_and_is_no_result_where_that_was_not_enough(
    rose: float, claim: str | None
) -> None:
    values = (
        ("0.1_calfat-the-paper-s-constants", seed, number, value, 10.0 * number)
        for seed in (0, 1, 6001)  # the last is no pair of the suite
        for number, value in ((40, 0.5), (50, 0.499 + rose + 0.002 * seed))
    )
    rounds = pd.DataFrame(values, columns=["cell", "seed", "round", "pgd20", "steps"])
    of = made(*((f"0.1/{row}", [0.8] * 4, [0.5] * 4) for row in (PAPER, REFERENCE)), curves=rounds)
    assert of.training(f"0.1/{PAPER}") == (500, pytest.approx(rose), 2)
    assert of.training(f"0.1/{REFERENCE}") is None
    claims = [of.claim("autoattack"), of.claim(tables.FELL)]
    assert claims == [claim, claim] if claim else not any("trained" in each for each in claims)
    assert of.claim(tables.AT_EQUAL) == "not run yet"


@pytest.mark.parametrize(("robust", "word"), [(0.7, "agrees"), (0.3, "disagrees"), (None, "not clear")])
def test_statements_of_the_paper(robust: float | None, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CIFAR-10, whose cells are methods alone."""
    ours = [0.3, 0.7, 0.4, 0.6] if robust is None else [robust, robust + 0.01, robust, robust - 0.01]
    axes = {"method": dict.fromkeys([PAPER, REFERENCE])}
    for pairs, said in ((3, "not all pairs yet"), (4, word)):
        of = made((PAPER, [0.8] * 4, ours), (REFERENCE, [0.7] * pairs, [0.5] * pairs), axes=axes)
        monkeypatch.setattr(tables, "study", lambda _, of=of: of)
        (row,) = (row for row in tables.agreements("cifar10")[1] if row[1] == "more under AutoAttack")
        assert (row[2], row[-1]) == (str(pairs), said)


def test_the_anchor_is_paired_over_its_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {PAPER: 0.6, REFERENCE: 0.5, "CalFAT, PGD-10": 0.9, "FedPGD, PGD-10": 0.6}
    of = made(
        *((f"0.1/{row}", [natural, natural + 0.01, natural, 0.1], [0.5] * 4) for row, natural in rows.items()),
        set={},
        metrics={"natural": "natural", "autoattack": "AA", "passes": "passes"},
    )
    runs = of.runs.rename(index=dict(enumerate((4001, 4002, 4003, 4006))), level="seed")
    monkeypatch.setattr(tables, "study", lambda _: dataclasses.replace(of, runs=runs))
    head, *found = tables.anchor("fmnist")[1]
    assert [*head] == ["difference", "n", "natural", "AA"]
    assert [row[:3] for row in found] == [
        ["CalFAT minus FedPGD, PGD-10", "3", "+30.0"],
        ["CalFAT minus FedPGD, free", "3", "+10.0"],
        ["CalFAT, PGD-10 minus free", "3", "+30.0"],
        ["FedPGD, PGD-10 minus free", "3", "+10.0"],
    ]


def test_what_is_said_of_the_anchor_follows_from_the_records() -> None:
    recorded = tables.study("fmnist")
    assert recorded is not None
    of = dataclasses.replace(recorded, suite={**recorded.suite, "seeds": tables.ANCHORED})
    for row in (PAPER, REFERENCE):
        trained, dear = of.training(of.cell(row)), of.training(of.cell(f"{row.partition(',')[0]}, PGD-10"))
        assert trained is not None
        assert dear is not None
        assert dear[1] < 0.01 <= trained[1]
        assert trained[0] / dear[0] == pytest.approx(4, rel=0.01)
    dear, free, *more = tables.anchor("fmnist")[1][1:]
    ends = re.compile(r"\[(\S+), (\S+)\]")
    low, high = (float(end) for end in ends.findall(dear[3])[0])
    assert low > 0
    for row, column in ((dear, 6), (free, 6), (free, 3)):
        low, high = (float(end) for end in ends.findall(row[column])[0])
        assert low < 0 < high
    assert all(row[6].startswith("-") for row in more)


def test_the_readme_shows_the_skewed_rows_by_their_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ((f"{beta}/{PAPER}", [0.8] * 4, [0.5] * 4) for beta in ("0.1", "IID"))
    of = made(*rows, metrics={"natural": "natural", "passes": "passes"})
    monkeypatch.setattr(tables, "study", lambda _: of)
    assert [*map(list, tables.skewed("digits")[1])] == [
        ["method", "n", "natural"],
        [PAPER, "4", "80.00 ± 0.00 [80.0, 80.0]"],
    ]
