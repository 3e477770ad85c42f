"""One-step attacks at full size and a budget by class: the plan says what its suites run."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from studies import pages
from studies.full_size.curves import HEAD
from studies.one_step import tables
from tests.cli.runner import ROOT
from tests.studies.figures import check_figure

STUDY = ROOT / "studies" / "one_step"
PLAN = " ".join((STUDY / "README.md").read_text(encoding="utf-8").split())
FULL = load_suite(ROOT / "studies" / "full_size" / "full_fmnist.yaml")


def experiments_of(name, monkeypatch, tmp_path):
    suite = load_suite(STUDY / f"{name}.yaml")
    monkeypatch.chdir(tmp_path)
    plan = make_plan(suite.model_copy(update={"choose": None}), Registry.load())
    return suite, {cell.name: cell.experiment for cell in plan.cells}


@pytest.mark.parametrize("name", ["one_step_fmnist", "longtail_fmnist"])
def test_pairs_rates_and_rounds_are_those_of_the_plan(name, monkeypatch, tmp_path):
    suite, experiments = experiments_of(name, monkeypatch, tmp_path)
    assert f"`{name}.yaml`" in PLAN
    assert list(suite.seeds) == list(FULL.seeds)[:5]
    assert list(suite.choose.seeds) == list(FULL.choose.seeds) == [5001, 5002]
    (rates,) = suite.choose.grid.values()
    assert f"grid {', '.join(map(str, rates))}," in PLAN
    assert {each.num_rounds for each in experiments.values()} == {50}
    for experiment in experiments.values():
        assert experiment.as_run()["calfat"]["partition"]["seed"] is None
        data = experiment.as_run()["data_args"]
        assert {key: data[key] for key in ("max_train_examples", "validation_share", "max_test_examples")} == {
            key: FULL.set[f"data_args.{key}"] for key in ("max_train_examples", "validation_share", "max_test_examples")
        }


def test_rows_have_the_attacks_and_budgets_of_the_plan(monkeypatch, tmp_path):
    _, rows = experiments_of("one_step_fmnist", monkeypatch, tmp_path)
    attacks = {"sora": "sora", "N-FGSM": "n-fgsm", "ATAS": "atas"}
    assert {name: each.threat.inner.name for name, each in rows.items()} == {
        f"{method}/{label}": attack for method in ("FedPGD", "CalFAT") for label, attack in attacks.items()
    }
    _, rows = experiments_of("longtail_fmnist", monkeypatch, tmp_path)
    budgets = {"plain": None, "by class": (0.3, 0.8), "warm-up alone": (0.0, 0.8)}
    for name, each in rows.items():
        by_class = each.threat.by_class
        assert (by_class and (by_class.alpha, by_class.warmup)) == budgets[name.partition("/")[2]]
        assert each.as_run()["calfat"]["partition"]["imbalance"] == 100
        assert each.as_run()["data_args"]["partition_method"] == "longtail"


METRICS = ("natural", "fgsm", "pgd20", "autoattack", "passes", "overfitted")
PARTS = {"natural:worst-class": 0.5, "natural:tail": 0.4, "autoattack:tail": 0.5}
PARTS |= {"autoattack:head": 2, "autoattack:middle": 1}
WORST = "natural:worst-class"
USUAL = (0.8, 0.5, 0.45)  # natural, FGSM, PGD-20


def written(path, cells):
    """A record of cells to their metrics by seed, with two tries of a rate, of which the second is better."""
    rows = []
    for cell, runs in cells.items():
        known = {"cell": cell, "state": "finished", "verdict": ""}
        for rate, choice in ((0.1, 0.4), (0.2, 0.5)):
            rows.append({**known, "tried": f"learning_rate {rate}", "seed": 5001, "choice": choice})
        for seed, numbers in enumerate(runs, start=4001):
            of = dict(zip(METRICS, numbers, strict=True))
            parts = {part: of[part.partition(":")[0]] * share for part, share in PARTS.items()}
            rows.append({**known, "tried": "", "seed": seed, **of, **parts})
    head = ["cell", "tried", "seed", "state", "verdict", *METRICS, *PARTS, "choice"]
    pd.DataFrame(rows, columns=head).to_csv(path, index=False)
    return path


@pytest.fixture
def records(tmp_path, monkeypatch):
    """With FedPGD sora leads N-FGSM by some 3 points, and has a sixth pair, collapsed; with CalFAT it lacks one."""
    sora = [*((*USUAL, 0.40 + 0.01 * n, 100, 0) for n in range(5)), (0.1, 0.1, 0.1, 0.1, 100, 0)]
    fgsm = [(*USUAL, 0.37 + 0.01 * n + 0.005 * (n == 2), 100, 0) for n in range(5)]
    atas = [(0.8, 0.5, pgd20, 0.2, 90, named) for pgd20, named in ((0.24, 0), (0.26, 1), (0.26, 0))]
    cells = {"FedPGD/sora": sora, "FedPGD/N-FGSM": fgsm, "FedPGD/ATAS": atas}
    cells |= {"CalFAT/sora": sora[:4], "CalFAT/N-FGSM": fgsm}
    monkeypatch.setattr(tables, "ONE_STEP", written(tmp_path / "one_step_fmnist_runs.csv", cells))
    plain = [(*USUAL, 0.30 + 0.02 * n, 50, 0) for n in range(5)]
    by_class = [(*USUAL, 0.35 + 0.021 * n, 50, 0) for n in range(5)]
    budgets = {"FedPGD/plain": plain, "FedPGD/by class": by_class}
    monkeypatch.setattr(tables, "LONG_TAIL", written(tmp_path / "longtail_fmnist_runs.csv", budgets))
    (tmp_path / "full").mkdir()
    full = {"0.1/FedPGD": [(*USUAL, 0.5, 80, 0)] * 6, "0.1/FedPGD, PGD-10": [(*USUAL, 0.49, 120, 0)] * 6}
    full |= {"0.1/CalFAT, PGD-10": [(*USUAL, 0.3, 120, 0)]}
    written(tmp_path / "full" / "fmnist_runs.csv", full)
    monkeypatch.setattr(tables, "FULL_SIZE", tmp_path / "full")
    curve = [("fedpgd_sora", 4001, number, 0, rose, 1, 1) for number, rose in ((10, 0.1), (40, 0.4), (50, 0.405))]
    curve += [("fedpgd_n-fgsm", 4001, number, 0, rose, 1, 1) for number, rose in ((40, 0.4), (50, 0.42))]
    pd.DataFrame(curve, columns=[*HEAD]).to_csv(tmp_path / "one_step_fmnist_curves.csv", index=False)
    shared = [("0.1_fedpgd", seed, number, 0, 0.3 + (number == 50) * rose, 1, 1)
              for seed, rose in ((4005, 0.004), (4006, 0.2)) for number in (40, 50)]  # fmt: skip
    pd.DataFrame(shared, columns=[*HEAD]).to_csv(tmp_path / "full" / "fmnist_curves.csv", index=False)
    for cached in (tables.rows, tables.shared):
        cached.cache_clear()
    yield
    for cached in (tables.rows, tables.shared):
        cached.cache_clear()


def test_the_page_shows_what_its_records_say(tmp_path):
    text = tables.PAGE.read_text(encoding="utf-8")
    assert pages.with_tables(text, "one-step", tables.TABLES) == text, (
        "python -m studies.one_step.tables writes them anew"
    )
    assert re.findall(r"<!-- one-step: (.*) -->", text) == [
        "attacks",
        "tested attacks",
        "budgets",
        "tested budgets",
        "described",
    ]
    assert tables.FIGURE.exists() == (tables.FIGURE.name in text)
    if tables.FIGURE.exists():
        tables.draw(tmp_path / "drawn.svg")
        check_figure(tables.FIGURE, tmp_path / "drawn.svg")


@pytest.mark.usefixtures("records")
def test_how_often_a_row_collapsed_and_overfitted_and_whether_it_was_trained_to_the_end():
    head, *rows = tables.attacks("")[1]
    table = {(row[0], row[1]): dict(zip(head, row, strict=True)) for row in rows}
    assert list(table) == [
        *(("FedPGD", attack) for attack in ("sora", "N-FGSM", "ATAS", "free, 4 replays", "PGD-10")),
        *(("CalFAT", attack) for attack in ("sora", "N-FGSM", "PGD-10")),
    ]
    sora, atas = table["FedPGD", "sora"], table["FedPGD", "ATAS"]
    assert (sora["n"], sora["rate"], sora["collapsed"], sora["overfitted"]) == (
        "6", "0.2", "1 of 6 [0.4, 64.1]", "0 of 6 [0.0, 45.9]",
    )  # fmt: skip
    assert (atas["collapsed"], atas["overfitted"]) == ("0 of 3 [0.0, 70.8]", "2 of 3 [9.4, 99.2]")
    assert (sora["last fifth"], table["FedPGD", "N-FGSM"]["last fifth"]) == ("+0.50", "+2.00 (not to the end)")
    free = table["FedPGD", "free, 4 replays"]
    assert (free["n"], free["last fifth"]) == ("5", "+0.40")  # of the five pairs, whatever others there are
    assert table["FedPGD", "PGD-10"]["last fifth"] == "-"


@pytest.mark.usefixtures("records")
def test_the_front_has_the_rows_that_nothing_cheaper_beats():
    head, *rows = tables.attacks("")[1]
    best = {(row[0], row[1]) for row in rows if row[head.index("front")]}
    assert best == {("FedPGD", "free, 4 replays"), ("CalFAT", "sora")}


def row(variant, robust, passes=80, natural=0.8, named=0, pgd20=0.45):
    """Two runs of FedPGD; ``natural``, ``named`` (by the alarm) and ``pgd20`` are those of the first."""
    values = {"natural": [natural, 0.8], "fgsm": [0.5, 0.5], "pgd20": [pgd20, 0.45], "overfitted": [named, 0]}
    runs = pd.DataFrame({**values, "autoattack": [robust - 0.1, robust + 0.1], "passes": [passes] * 2})
    return tables.Row("FedPGD", variant, "0.1", runs.drop(columns="fgsm" if variant.startswith("free") else []), {})


@pytest.mark.parametrize(
    ("best", "named"),
    [
        (row("ATAS", 0.6), "ATAS"),
        (row("ATAS", 0.6, passes=81), "sora"),
        (row("ATAS", 0.6, natural=0.15), "sora"),
        (row("ATAS", 0.6, named=1), "sora"),
        (row("ATAS", 0.6, pgd20=0.24), "sora"),
        (row("free, 4 replays", 0.6), None),
        (row("PGD-10", 0.6), None),
    ],
)
def test_what_is_recommended_is_the_best_cheap_row_whose_runs_are_all_sound(best, named):
    found = tables.recommended([row("sora", 0.55), row("N-FGSM", 0.5), row("free, 4 replays", 0.54), best])
    assert (found and found.variant) == named


def test_what_passes_recommends_follows_from_the_records():
    every = [*tables.rows(tables.ONE_STEP), *tables.shared()]
    text = " ".join((ROOT / "studies" / "passes" / "README.md").read_text(encoding="utf-8").split())
    best = tables.recommended(every)
    assert (best.method, best.variant) == ("FedPGD", "ATAS")
    assert "recommends **FedPGD with ATAS**" in text
    reached = {
        each.variant: f"{100 * each.values('autoattack').mean():.1f}" for each in every if each.method == "FedPGD"
    }
    values = [reached[name] for name in ("ATAS", "free, 4 replays", "N-FGSM", "sora")]
    said = "FedPGD has under AutoAttack {} % with ATAS, {} with free, {} with N-FGSM and {} with sora".format(*values)
    assert said in text
    assert not any(each.collapsed for each in every)
    assert not any(each.overfitted for each in every)


def test_what_is_said_of_pgd_10_follows_from_the_records():
    text = " ".join(tables.PAGE.read_text(encoding="utf-8").split())
    head, *table = tables.attacks("")[1]
    rows = {(row[0], row[1]): dict(zip(head, row, strict=True)) for row in table}
    means = {
        (each.method, each.variant): {of: each.values(of).mean() for of in ("autoattack", "passes", WORST)}
        for each in [*tables.rows(tables.ONE_STEP), *tables.shared()]
    }
    for method in tables.METHODS:
        dear = means[method, "PGD-10"]
        for other in ("ATAS", "N-FGSM", "free, 4 replays"):
            assert dear["autoattack"] < means[method, other]["autoattack"]
        assert 2 <= dear["passes"] / means[method, "N-FGSM"]["passes"] <= 3
    assert "lies below ATAS, N-FGSM and *free* in both methods" in text
    ours, theirs = means["CalFAT", "PGD-10"], means["FedPGD", "PGD-10"]
    assert abs(theirs["autoattack"] - ours["autoattack"]) == pytest.approx(0.005, abs=0.001)
    assert ours[WORST] > theirs[WORST]
    assert "CalFAT and FedPGD are half a point apart" in text
    rising = [row for row in rows.values() if row["last fifth"].endswith("(not to the end)")]
    assert (len(rising), len(rows)) == (5, 10)
    assert "Five of the ten rows still rose by a point or more" in text
    assert all(row["collapsed"].startswith("0 of") for row in rows.values())
    assert all(row["overfitted"].startswith(("0 of", "-")) for row in rows.values())


@pytest.mark.usefixtures("records")
def test_what_is_planned_is_tested_on_the_five_pairs_that_both_have():
    rows = {row[0]: row[2:] for row in tables.tested("attacks")[1][1:]}
    fedpgd, calfat = rows["FedPGD: sora minus N-FGSM"], rows["CalFAT: sora minus N-FGSM"]
    assert (fedpgd[0], fedpgd[1][:5], fedpgd[-1]) == ("5", "+2.90", "clear")
    assert (calfat[0], calfat[2:]) == ("4", ["-", "-", "not all pairs yet"])
    assert float(fedpgd[3]) == pytest.approx(2 * float(fedpgd[2]), rel=0.05)  # Holm over the two that are planned
    rows = tables.tested("budgets")[1][1:]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("FedPGD: by class minus plain", "AutoAttack", "clear"),
        ("FedPGD: by class minus plain", "AutoAttack, tail", "clear"),
    ]
    assert float(rows[0][5]) == pytest.approx(4 * float(rows[0][4]), rel=0.05)


@pytest.mark.usefixtures("records")
def test_differences_on_the_long_tail_are_paired_and_of_the_rows_that_are_there():
    head, *rows = tables.described("")[1]
    (row,) = rows  # CalFAT is not there, nor the warm-up alone
    shown = dict(zip(head, row, strict=True))
    assert (shown["difference"], shown["n"]) == ("FedPGD: by class minus plain", "5")
    assert (shown["natural"], shown["natural, tail"]) == ("+0.0 [0.0, 0.0]", "+0.0 [0.0, 0.0]")
    differences = 5.2 + 0.1 * (np.arange(5) - 2)
    half = stats.t.ppf(0.975, 4) * differences.std(ddof=1) / 5**0.5
    for part, share in (("", 1), (", head", 2), (", middle", 1), (", tail", 0.5)):
        low, high = share * (5.2 - half), share * (5.2 + half)
        assert shown[f"AutoAttack{part}"] == f"+{share * 5.2:.1f} [{low:.1f}, {high:.1f}]"


@pytest.mark.usefixtures("records")
def test_the_figure_has_a_point_for_every_row(tmp_path):
    tables.draw(tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert [drawn.count(f">{name}<") for name in ("sora", "N-FGSM", "ATAS", "PGD-10")] == [2, 2, 1, 2]
