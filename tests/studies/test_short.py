"""The short study: results.md and README.md show what its records say, in the words that its plan allows."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import read_record
from studies import pages
from studies.full_size.tables import anchor
from studies.full_size.tables import study as full_size
from studies.one_step import tables as one_step
from studies.short import tables
from studies.short.tables import NAMES, PAPER, REFERENCE, STANDARD, study
from tests.studies.figures import check_figure

WORST = "natural:worst-class"


def test_every_number_of_a_table_is_that_of_its_record() -> None:
    text = tables.PAGE.read_text(encoding="utf-8")
    assert pages.with_tables(text, "short", tables.TABLES) == text, "python -m studies.short.tables writes them anew"


def test_every_table_is_published() -> None:
    shown = re.findall(r"<!-- short: (.*) -->", tables.PAGE.read_text(encoding="utf-8"))
    both = [f"{kind} {name}" for name in NAMES for kind in ("accuracies", "comparisons", "fresh")]
    assert set(shown) == {"hypotheses", *both, "choice", "rounds"}


def test_the_figure_is_what_the_records_say(tmp_path: Path) -> None:
    tables.draw(tmp_path / "study.svg")
    check_figure(tables.FIGURE, tmp_path / "study.svg")


@pytest.mark.parametrize("name", NAMES)
def test_a_record_continues_its_suite(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is of a run that the suite has today, with the recipe that it has today."""
    monkeypatch.chdir(tmp_path)
    record = tables.HERE / f"study_{name}_runs.csv"
    suite = load_suite(tables.HERE / f"study_{name}.yaml", record=record)
    plan = make_plan(suite, Registry.load(entry_points=False))
    known = {run.key for run in (*plan.choosing.runs, *plan.runs) if run.recorded is not None}
    assert known == set(read_record(record))
    chosen = {row[1] if row[0] == "0.1" else None: row[2] for row in tables.accuracies(name)[1][1:]}
    for cell in plan.cells:
        if cell.labels[0] == "0.1" and cell.labels[1] in chosen:
            assert cell.experiment is not None
            assert f"{cell.experiment.train.learning_rate:g}" == chosen[cell.labels[1]]


@pytest.mark.parametrize("name", NAMES)
def test_fresh_pairs_lie_where_the_published_ones_predict(name: str) -> None:
    """At least nine of ten, in each accuracy, as the study says."""
    for heading in ("natural", "AA"):
        counts = [int(row[-1].partition(" ")[0]) for row in tables.after_publication(name)[1] if row[1] == heading]
        assert sum(counts) >= 9


def made(**rows: tuple[list[float], list[float]]) -> tables.Study:
    """A study of four pairs: row to natural and AutoAttack accuracies."""
    methods = {"CalFAT": PAPER, "FedPGD": REFERENCE, "standard": STANDARD}
    runs = pd.concat(
        pd.DataFrame(
            {"cell": f"0.1/{methods[row]}", "seed": range(len(natural)), "natural": natural, "autoattack": robust}
        )
        for row, (natural, robust) in rows.items()
    )
    runs[[WORST, "pgd20:worst-class"]] = 0.5
    suite = {"seeds": range(4), "axes": {"beta": {"0.1": {}}, "method": dict.fromkeys(methods.values())}}
    return tables.Study(suite, runs.set_index(["cell", "seed"]), {})


def test_endpoints_of_hand_made_pairs() -> None:
    """In pair 1, 0.10 more natural and 0.01 less robust accuracy; one point of it is worth 0.2 / 0.5 points natural."""
    rows = {
        "CalFAT": ([0.8, 0.8, 0.81, 0.82], [0.50, 0.49, 0.50, 0.51]),
        "FedPGD": ([0.7, 0.7, 0.15, 0.72], [0.5] * 4),
        "standard": ([0.9] * 4, [0.0] * 4),
    }
    of = made(**rows)
    found = {each.endpoint: each for each in of.family("0.1")}
    gain = [0.1, 0.1 - 0.01 * 0.2 / 0.5, 0.66, 0.1 + 0.01 * 0.18 / 0.5]
    assert found[tables.AT_EQUAL].difference.mean == pytest.approx(sum(gain) / 4)
    assert found[tables.AT_EQUAL].p_value == pytest.approx(stats.ttest_1samp(gain, 0).pvalue)
    fell = found[tables.FELL]
    assert (fell.difference.mean, fell.difference.interval, fell.p_value) == (-0.25, None, 1.0)
    assert (found["autoattack"].word, found[WORST].word) == ("level", "not clear")
    assert of.exchanged().mean == pytest.approx(sum(gain) / 4)  # where standard training has no robustness
    fewer = made(**{row: (natural[:3], robust[:3]) for row, (natural, robust) in rows.items()})
    assert {each.word for each in fewer.family("0.1")} == {"not all pairs yet"}  # one is left to run


def test_what_the_text_claims_follows_from_the_records() -> None:
    """Whatever results.md and README.md say with an interval outside a table."""
    fmnist, digits = map(study, NAMES)
    standard = [of.mean(STANDARD, "autoattack") for of in (fmnist, digits)]
    exchanged = digits.exchanged()
    finished = full_size("digits")
    assert finished is not None
    former = {compared.endpoint: compared.difference.text() for compared in finished.comparisons(PAPER)}
    worst, robust, equal = (former[endpoint] for endpoint in (WORST, "autoattack", tables.AT_EQUAL))
    against_fedpgd = [of for of in finished.comparisons() if of.cell == finished.cell(REFERENCE)]
    (today,) = (of for of in against_fedpgd if of.endpoint == "autoattack")
    *_, ahead = one_step.described("")[1]
    _, dear, free, *_ = anchor("fmnist")[1]
    claims = {
        tables.PAGE: [
            f"it is {standard[0]} % on Fashion-MNIST and {standard[1]} % on digits. With the accuracy that it has, the "
            f"differences are {fmnist.exchanged().text()} on Fashion-MNIST and, over the {exchanged.pairs} pairs in "
            f"which it has less than FedPGD, {exchanged.text()} on digits."
        ],
        pages.ROOT / "README.md": [
            f"clearly behind under AutoAttack, {today.difference.text()} points, but by less than the three points",
            f"worst class, natural {worst}; under AutoAttack {robust}; natural accuracy at equal AutoAttack {equal}.",
            f"On Fashion-MNIST the worst class of CalFAT's model keeps {fmnist.mean(PAPER, WORST)} % natural accuracy, "
            f"that of FedPGD's {fmnist.mean(REFERENCE, WORST)} %: {fmnist.claim(WORST)}. Under AutoAttack: "
            f"{fmnist.claim('autoattack')}.",
            f"CalFAT minus FedPGD ({dear[1]} pairs; described, not tested): with PGD-10, worst class natural {dear[3]} "
            f"and AutoAttack {dear[6]}; with free adversarial training, four times the steps and still rising, "
            f"{free[3]} and {free[6]}.",
            f"of Fashion-MNIST: CalFAT is ahead of FedPGD, by {ahead[2]} points natural and {ahead[5]} under "
            f"AutoAttack ({ahead[1]} pairs; described, not tested).",
        ],
    }
    for page, said in claims.items():
        text = " ".join(re.sub(r"^\|.*\n", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE).split())
        for claim in said:
            assert claim in text
            text = text.replace(claim, "")
        assert re.findall(r"[+-]?\d+\.\d+ \[[^]]*\]", text) == []
    assert (today.word, today.is_level, today.difference.mean < 0) == ("clear", True, True)
    assert [of.word for of in against_fedpgd if of is not today] == ["not clear"] * 4
    behind = {compared.endpoint: compared for compared in finished.comparisons(PAPER)}
    for endpoint in (WORST, "autoattack", tables.AT_EQUAL):
        assert (behind[endpoint].word, behind[endpoint].difference.mean < 0) == ("clear", True)
    assert not behind["autoattack"].is_level
    assert fmnist.claim(WORST).endswith(", clear")
    clear = {(each.cell.partition("/")[2], each.endpoint) for each in digits.comparisons() if each.word == "clear"}
    endpoints = (*tables.COMPARED, tables.AT_EQUAL)
    assert clear == {("CalFAT, the release's constants", endpoints[1]), *(("FedRBN", each) for each in endpoints)}
    assert all(each.difference.mean < 0 for each in digits.comparisons() if each.word == "clear")
