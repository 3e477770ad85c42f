"""The table of a comparison: its columns, what compares, and which mean is bold; its charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.maths.intervals import Score
from calfat_plugin.report import write_comparison, write_run_report
from calfat_plugin.report.charts import Chart, Drawing, compared
from calfat_plugin.report.comparison import group_runs, results_tables
from calfat_plugin.report.run_page import trust_view
from calfat_plugin.report.scores import WORST_DEFINED, compared_alike
from calfat_plugin.run_files import SuiteFile, SuiteMetric, TrustResults
from calfat_plugin.stored_run import Run
from calfat_plugin.typed_json import from_json
from tests.report.made import drawn, experiment, made_run
from tests.report.pages import Page

FINAL = {"natural": 0.8, "fgsm": 0.5, "pgd20": 0.4}
WEIGHTS = "calfat.aggregator.weights=uniform"
SEEDS = tuple(f"common_args.random_seed={seed}" for seed in range(4))  # fewer equal values have no interval
CLEAR = (
    "Bold: the best mean, where the 95 % interval of its difference to each other one, paired over seeds, excludes zero"
)


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """Figure to (title, caption) of what a comparison would draw."""
    found: dict[str, tuple[str, str]] = {}

    def note(chart: Chart, figures: Path) -> Drawing:
        found[chart.name] = chart.title, chart.caption
        return Drawing(chart.title, chart.caption, "data:,")

    monkeypatch.setattr("calfat_plugin.report.charts.render", note)
    return found


def run(path: Path, *overrides: str, final: dict[str, float] = FINAL, attacked: int = 359, **monitored: float) -> Path:
    """A finished run that monitored these accuracies in both of its rounds, with ``attacked`` examples under PGD-20."""
    made_run(path, WEIGHTS, *overrides, final=final, rounds=[{**monitored}] * 2)
    results = path / "results.json"
    content: dict[str, Any] = json.loads(results.read_text())
    for evaluation in content["evaluations"]:
        if evaluation["label"] == "pgd20":
            evaluation["num_examples"] = attacked
    results.write_text(json.dumps(content))
    return path


def table(page: Path) -> str:
    return Page.read(page).text.partition("Results setting ")[2].partition("Round by round")[0]


def test_charts_are_one_an_evaluator(tmp_path: Path, charts: dict[str, tuple[str, str]]) -> None:
    fgsm, both = (f"calfat.monitor.evaluators=[{label}, natural]" for label in ("fgsm", "fgsm, pgd20"))
    run(tmp_path / "a", fgsm, natural=0.5, fgsm=0.9)
    run(tmp_path / "b", "calfat.trainer=fedpgd", natural=0.6, pgd20=0.3)
    run(tmp_path / "c", both, "calfat.trainer=fedtrades", natural=0.7, fgsm=0.8, pgd20=0.4)
    write_comparison([tmp_path])
    assert [(name, title) for name, (title, _) in charts.items() if not name.startswith("classes")] == [
        ("natural", "Natural accuracy"),
        ("robust", "Accuracy under fgsm"),
        ("robust_2", "Accuracy under pgd20"),
        ("heterogeneity", "Heterogeneity s²"),
    ]


def test_a_curve_is_the_mean_of_finished_runs_and_a_run_in_progress_does_not_end_it(tmp_path: Path) -> None:
    finished = [{"natural": accuracy} for accuracy in (0.2, 0.4, 0.6)]
    paths = [
        made_run(tmp_path / seed, seed, final=FINAL if len(rounds) > 1 else None, rounds=rounds)
        for seed, rounds in zip(SEEDS, (finished, finished, [{"natural": 0.9}]), strict=False)
    ]
    runs = [Run.load(path) for path in paths]
    chart = compared("natural", "", "", "natural", {"all": runs, "none finished": runs[2:]})
    assert drawn(chart)[1] == {"all": [(1, 20.0), (2, 40.0), (3, 60.0)], "none finished": [(1, 90.0)]}


def test_a_table_says_how_many_examples_it_is_about_and_compares_none_that_were_measured_otherwise(
    tmp_path: Path, charts: dict[str, tuple[str, str]]
) -> None:
    """One column a label; PGD-20 on 32 images is no rival of PGD-20 on all."""
    fewer = "calfat.evaluators=[natural, fgsm, {name: pgd20, max_examples: 32}]"
    for seed in SEEDS:
        run(tmp_path / f"a{seed[-1]}", seed)
        run(tmp_path / f"b{seed[-1]}", seed, "calfat.trainer=fedpgd", fewer, attacked=32, final={**FINAL, "pgd20": 0.9})
        run(tmp_path / f"c{seed[-1]}", seed, "calfat.trainer=fedtrades", final={**FINAL, "pgd20": 0.3})
    page = write_comparison([tmp_path])
    others = "80.00 ± 0.00 [80.0, 80.0] 50.00 ± 0.00 [50.0, 50.0]"
    rows = [
        f"calfat.trainer {name} 4 {others} {pgd20}.00 ± 0.00 [{pgd20}.0, {pgd20}.0] "
        for name, pgd20 in (("calfat", 40), ("fedpgd", 90), ("fedtrades", 30))
    ]
    assert table(page).startswith(f"seeds natural fgsm pgd20 {''.join(rows)}")
    said = "pgd20 on all 359 test examples and 32 of 359 test examples"
    assert f"in percent: natural and fgsm on all 359 test examples, {said}. ±" in table(page)
    source = page.read_text()
    assert '<span class="best">40.00</span>' in source
    assert '<span class="best">90.00</span>' not in source
    assert '<span class="best">80.00</span>' not in source  # all three are equal


def test_bold_follows_blocks_that_the_table_shows(tmp_path: Path, charts: dict[str, tuple[str, str]]) -> None:
    for index, (trainer, beta, natural) in enumerate(
        [("calfat", 0.1, 0.5), ("calfat", 0.5, 0.9), ("fedpgd", 0.1, 0.4), ("fedpgd", 0.5, 0.8)]
    ):
        overrides = (f"calfat.trainer={trainer}", f"data_args.partition_alpha={beta}")
        for seed in SEEDS:
            run(tmp_path / f"{index}{seed[-1]}", seed, *overrides, final={"natural": natural})
    page, beta = write_comparison([tmp_path]), "data_args.partition_alpha"
    assert table(page).startswith(
        f"seeds natural {beta} 0.1 calfat.trainer calfat · {beta} 0.1 4 50.00 ± 0.00 [50.0, 50.0] "
        f"calfat.trainer fedpgd · {beta} 0.1 4 40.00 ± 0.00 [40.0, 40.0] "
        f"{beta} 0.5 calfat.trainer calfat · {beta} 0.5 4 90.00 ± 0.00 [90.0, 90.0] "
        f"calfat.trainer fedpgd · {beta} 0.5 4 80.00 ± 0.00 [80.0, 80.0] "
    )
    assert f"{CLEAR}; rows compare if data, partition" in table(page)
    best = [number for number in ("50.00", "40.00", "90.00", "80.00") if f'"best">{number}<' in page.read_text()]
    assert best == ["50.00", "90.00"]


@pytest.mark.parametrize(
    ("better", "worse", "is_bold"),
    [
        ({0: 0.50}, {0: 0.25}, False),  # one seed says nothing about others
        ({0: 0.50, 1: 0.55}, {0: 0.40, 1: 0.45}, False),  # 10 points twice, which may be a coincidence
        ({0: 0.50, 1: 0.55}, {0: 0.40, 1: 0.46}, True),  # 10 and 9 points: 9.5, from 3.1 to 15.9
        ({0: 0.50, 1: 0.55}, {0: 0.40, 1: 0.54}, False),  # 10 and 1 points: 5.5, from -51.7 to 62.7
        ({0: 0.50, 1: 0.55}, {2: 0.40, 3: 0.45}, False),  # no seed in common
        ({0: 0.50, 1: 0.55, 2: 0.60}, {0: 0.45, 1: 0.49, 2: 0.55}, True),
    ],
)
def test_a_mean_is_bold_only_where_the_seeds_show_that_it_is_the_best(
    better: dict[int, float], worse: dict[int, float], is_bold: bool, tmp_path: Path, charts: dict[str, tuple[str, str]]
) -> None:
    for trainer, values in (("calfat", better), ("fedpgd", worse)):
        for seed, value in values.items():
            overrides = (f"calfat.trainer={trainer}", f"common_args.random_seed={seed}")
            run(tmp_path / f"{trainer}{seed}", *overrides, final={"natural": value})
    page = write_comparison([tmp_path])
    assert page.read_text().count('<span class="best">') == is_bold
    assert ("Differences, paired over seeds" in page.read_text()) == (len(better.keys() & worse.keys()) > 1)


def test_a_suites_page_has_every_metric_that_the_suite_declares(
    tmp_path: Path, charts: dict[str, tuple[str, str]]
) -> None:
    worst = {0: 0.1, 1: 0.3}
    for seed, accuracy in worst.items():
        path = run(tmp_path / "suite" / f"seed-{seed}", SEEDS[seed], "calfat.partition.seed=7", natural=0.5)
        content = json.loads((path / "results.json").read_text())
        content["metrics"] = {"passes": 12345.0 + seed}
        content["evaluations"][0]["per_class"][seed] = accuracy
        (path / "results.json").write_text(json.dumps(content))
    metrics = {"natural:worst-class": "worst", "passes": "cost", "pgd20": "PGD-20", "pgd20:release": "as the release"}
    listed = [{"label": label, "heading": heading} for label, heading in metrics.items()]
    content = {"title": "A study", "axes": [{"name": "method"}], "metrics": listed, "cells": []}
    (tmp_path / "suite" / "suite.json").write_text(json.dumps(content))
    text = Page.read(write_comparison([tmp_path / "suite"])).text
    row = "method seeds worst cost PGD-20 as the release natural fgsm calfat.trainer calfat 2 "
    assert f"{row}20.00 ± 14.14 [0.0, 100.0] 12,346 ± 0.7071 [12,339, 12,352] 40.00 ± 0.00 41.00 ± 0.00" in text
    assert "Accuracy of the final models in percent: PGD-20, natural and fgsm on all 359 test examples." in text
    assert f"Not in percent, but as measured: cost. {WORST_DEFINED} One partition, seeds of training alone: " in text


@pytest.mark.parametrize(
    ("evaluators", "alike"),
    [
        ("[pgd20, natural, fgsm]", True),
        ("[fgsm, pgd20]", True),
        ("[natural, fgsm, pgd20, cw20]", False),
        ("[natural, fgsm, {name: pgd20, restarts: 2}]", False),
    ],
)
def test_worst_cases_compare_where_all_attacks_are_the_same(evaluators: str, alike: bool) -> None:
    """One of more attacks is lower for that alone."""
    rows = {
        trainer: (experiment(f"calfat.trainer={trainer}", f"calfat.evaluators={listed}").as_run(), value)
        for trainer, listed, value in (("calfat", "[natural, fgsm, pgd20]", 0.5), ("fedpgd", evaluators, 0.4))
    }
    for metric in ("worst-case", "worst-case:release", "worst-case:worst-class"):
        scores = {name: (recipe, {metric: Score({0: value, 1: value})}) for name, (recipe, value) in rows.items()}
        rival = compared_alike(scores)["fedpgd"][metric].rival
        assert (None if rival is None else rival.name) == ("calfat" if alike else None)


def test_settings_do_not_compare_by_what_may_be_better_if_it_is_less(tmp_path: Path) -> None:
    for trainer, passes in (("calfat", 10.0), ("fedpgd", 20.0)):
        for seed in (0, 1):
            path = run(tmp_path / trainer / str(seed), f"calfat.trainer={trainer}", SEEDS[seed], natural=0.5)
            content = json.loads((path / "results.json").read_text())
            (path / "results.json").write_text(json.dumps({**content, "metrics": {"passes": passes + seed}}))
    groups = group_runs([Run.load(path.parent) for path in sorted(tmp_path.rglob("recipe.yaml"))])
    table, rivals = results_tables(
        groups, SuiteFile(metrics=(SuiteMetric("natural", "natural"), SuiteMetric("passes", "cost")))
    )
    shown = [(score.text, rival.text) for score, rival in zip(table.cells[1], rivals.cells[1], strict=True)]
    assert shown[2:4] == [("80.00", "+0.00"), ("20.5", "")]


def test_seeds_with_partitions_of_their_own_are_not_said_to_share_one(
    tmp_path: Path, charts: dict[str, tuple[str, str]]
) -> None:
    other = [[3] * 5 + [0] * 5, [0] * 5 + [3] * 5]
    made_run(tmp_path / "study" / "0", SEEDS[0], final=FINAL)
    made_run(tmp_path / "study" / "1", SEEDS[1], final=FINAL, counts=other)
    assert "One partition" not in Page.read(write_comparison([tmp_path / "study"])).text


def test_a_suites_page_has_its_headings_their_order_and_its_axes(
    tmp_path: Path, charts: dict[str, tuple[str, str]]
) -> None:
    cells = []
    for name, trainer in (("0.1/FedPGD", "fedpgd"), ("0.1/CalFAT", "calfat")):
        path = run(tmp_path / "suite" / trainer / "seed-0", f"calfat.trainer={trainer}", natural=0.5, pgd20=0.3)
        cells.append({"name": name, "runs": [{"seed": 0, "directory": str(path)}]})
    metrics = [{"label": label, "heading": heading} for label, heading in [("pgd20", "PGD-20"), ("natural", "Clean")]]
    axes = [{"name": "beta", "labels": ["0.1"]}, {"name": "method", "labels": ["FedPGD", "CalFAT"]}]
    content = {"title": "Two methods", "axes": axes, "metrics": metrics, "cells": cells}
    (tmp_path / "suite" / "suite.json").write_text(json.dumps(content))
    text = Page.read(write_comparison([tmp_path / "suite"])).text
    assert (
        "Results beta/method seeds PGD-20 Clean fgsm 0.1/FedPGD 1 40.00 [35.1, 45.1] 80.00 [75.6, 83.8] "
        "50.00 [44.9, 55.1] 0.1/CalFAT"
    ) in text
    assert "PGD-20, Clean and fgsm on all 359 test examples." in text
    assert charts["robust"][0] == "Accuracy under PGD-20"
    assert charts["classes_robust"][0] == "Accuracy under PGD-20, per class"
    assert (charts["natural"][0], charts["classes_natural"][0]) == ("Clean accuracy", "Clean accuracy, per class")


@pytest.mark.parametrize(("share", "split"), [("0.2", "validation"), ("0", "test")])
def test_without_a_final_evaluation_a_page_begins_with_the_last_monitored_round(
    tmp_path: Path, charts: dict[str, tuple[str, str]], share: str, split: str
) -> None:
    overrides = (f"data_args.validation_share={share}", "calfat.evaluators=[]")
    made_run(tmp_path / "a", *overrides, final={}, rounds=[{"natural": 0.25}, {"natural": 0.5}])
    write_run_report(tmp_path / "a")
    text = Page.read(tmp_path / "a" / "report.html").text
    assert f" 50.0 % natural, round 2, {split} split " in text


def test_images_that_trust_picked_have_no_interval(tmp_path: Path) -> None:
    """As on the console: they are like no others."""
    row = {"attack": "autoattack", "eps": "0.1", "accuracy": 0.96875, "left": 0.5, "examples": 32, "seconds": 1.0}
    rows = [{**row, "of": 359}, {**row, "of": 32}, row]
    verdict = {"word": "holds", "text": "holds", "sentence": "It holds.", "causes": [], "natural": 0.9}
    content: dict[str, Any] = {
        "attack": "pgd20",
        "threat": {"norm": "linf", "eps": "0.1"},
        "examples": 359,
        "finished": True,
    }
    content |= {"verdict": verdict, "checks": [{"check": "autoattack-32", "rows": rows}]}
    shown = trust_view(from_json(TrustResults, content), tmp_path)
    assert shown is not None
    assert [interval.text for _, _, interval, *_ in shown["table"].cells] == ["", "[84.3, 99.4]", "[84.3, 99.4]"]
