"""What is on a page: the numbers, what a paper reports beside them, alarms; and nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from calfat_plugin.report import charts, write_comparison, write_run_report
from calfat_plugin.results import EvaluationResult
from tests.report.made import FINAL, REPORTED, change_json, draw_nothing, drawn, full_run, made_run
from tests.report.made import evaluation as result_of
from tests.report.pages import Page


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run."""
    return write_run_report(full_run(tmp_path_factory.mktemp("page") / "made" / "0-x"))


@pytest.fixture(scope="module")
def bare_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that reports nothing, whose command has a secret, and whose classes have nasty names."""
    path = tmp_path_factory.mktemp("bare") / "a"
    classes = ["<script>alert(1)</script>", "&amp;", *"cdefghij"]
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        return write_run_report(made_run(path, final=FINAL, classes=classes))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two methods with two seeds each."""
    root = tmp_path_factory.mktemp("comparison") / "study"
    for trainer in ("calfat", "fedpgd"):
        for seed in (0, 1):
            full_run(root / f"{trainer}-{seed}", f"calfat.trainer={trainer}", f"common_args.random_seed={seed}")
            better = 0.1 + 0.02 * seed if trainer == "calfat" else 0.015 * seed
            path = root / f"{trainer}-{seed}" / "results.json"
            text = path.read_text()
            for number in (0.6431, 0.6531):  # natural accuracy in both counts
                text = text.replace(str(number), str(number + better))
            path.write_text(text)
    return write_comparison([root])


PAGES = pytest.mark.parametrize("which", ["run_page", "comparison"])


@pytest.fixture
def page(which: str, request: pytest.FixtureRequest) -> Page:
    """One of the two pages, parsed."""
    return Page.read(request.getfixturevalue(which))


@PAGES
def test_a_page_is_well_formed_and_fetches_and_runs_nothing(page: Page) -> None:
    assert page.errors == []
    assert page.source.startswith("<!doctype html>\n<html")
    assert len(page.ids) == len(set(page.ids))
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.all("script") == []
    assert [key for _, attributes in page.tags for key in attributes if key.startswith("on")] == []
    outside = [found for found in page.references if not found.startswith("#") and found != "data:,"]
    assert [found for found in outside if not found.startswith("data:image/svg+xml;base64,")] == []
    for figure in page.figures:
        assert ElementTree.fromstring(figure).tag == "{http://www.w3.org/2000/svg}svg"
        assert "<script" not in figure
        found = re.findall(r"""(?:href|src)="([^"]*)"|url\(([^)]*)\)|@import""", figure)
        addresses = [address for pair in found for address in pair if address]
        assert [a for a in addresses if not a.startswith(("#", "data:image/png;base64,"))] == []


@PAGES
def test_figures_are_named_for_those_who_do_not_see_them(page: Page) -> None:
    figures = page.all("figure")
    names = [image["alt"] for image in page.all("img")]
    assert len(figures) == len(names) == len(page.all("figcaption")) >= 5
    assert all(len(name) > 20 for name in names)
    assert len(set(names)) == len(names)
    assert page.all("svg") == []


@PAGES
def test_tables_are_named_and_their_headings_have_a_scope(page: Page) -> None:
    boxes = [attributes for attributes in page.all("div") if attributes.get("class") == "scroll"]
    assert len(boxes) == len(page.all("table")) >= 2
    assert all(box["aria-label"] and (box["role"], box["tabindex"]) == ("region", "0") for box in boxes)
    assert {heading.get("scope") for heading in page.all("th")} == {"col", "row"}


@PAGES
def test_figures_lie_beside_the_page_too(page: Page, which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which).parent / "figures"
    names = sorted(file.name for file in folder.iterdir())
    assert len(names) == 3 * len(page.all("figure"))
    for name in names:
        content = (folder / name).read_bytes()
        if name.endswith(".svg"):
            assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        elif name.endswith(".pdf"):
            assert content.startswith(b"%PDF-")
            assert b"/CreationDate" not in content
            assert b"/Subtype /Type3" not in content  # publishers refuse such fonts
        else:
            assert content.startswith(b"\x89PNG\r\n\x1a\n")


def test_measured_stands_beside_reported(run_page: Path) -> None:
    text = Page.read(run_page).text
    assert "natural 64.31 [59.2, 69.1] 65.31 64.69 +0.62 359 1.5" in text
    assert "fgsm linf, eps 1/10 35.01 [30.3, 40.1] 36.01 \N{EN DASH} \N{EN DASH} 359 1.5" in text
    assert "pgd20 linf, eps 1/10 31.23 [26.7, 36.2] 32.23 31.12 +1.11 359 1.5" in text
    assert "Reported: arXiv:2205.14926, Table 1; difference: release minus reported, in percentage points." in text


def test_where_the_time_went_and_the_peak_of_memory_are_there(run_page: Path, bare_page: Path) -> None:
    text = Page.read(run_page).text
    assert "a round of calfat, mean of 4 rounds seconds share calls training 1.5000 75.0 % 2" in text
    assert "attack 1.0000 50.0 % 10" in text
    assert "everything else: host, messages, waiting 0.5000 25.0 %" in text
    assert "s² seconds peak memory, MB 1 20.00 10.00 11.00 17.00 1.00 7.00 0.5 2 812.5" in text
    assert "Where the time went" not in Page.read(bare_page).text


def test_without_reported_numbers_there_is_no_column_for_them(bare_page: Path) -> None:
    text = Page.read(bare_page).text
    assert (
        "evaluator accuracy % 95 % interval release % examples seconds natural 64.31 [59.2, 69.1] 65.31 359 1.5" in text
    )
    assert "eported" not in text.partition("What was run")[0]


def test_worst_classes_and_clients_are_in_a_table_of_their_own(run_page: Path) -> None:
    """Classes lie 2 points apart around the mean; by its labels, client 0 is 3 points below it."""
    text = Page.read(run_page).text
    assert (
        "evaluator accuracy % worst class % class worst clients % clients natural 64.31 55.31 zero 61.31 0 "
        "fgsm 35.01 26.01 zero 32.01 0 pgd20 31.23 22.23 zero 28.23 0 The worst class"
    ) in text
    assert "round natural % pgd20 % natural, worst class % natural, worst clients % pgd20, worst class %" in text


@pytest.mark.usefixtures("no_figures")
def test_across_silos_nothing_is_known_of_clients(tmp_path: Path) -> None:
    text = Page.read(write_run_report(made_run(tmp_path / "a", final={"natural": 0.5}, counts=()))).text
    assert "worst clients % clients natural 50.00 41.00 zero \N{EN DASH} \N{EN DASH} The worst class" in text
    assert "natural, worst class %" in text
    assert "natural, worst clients %" not in text


def test_alarms_stand_on_top(run_page: Path) -> None:
    page = Page.read(run_page)
    assert "2 alarms about these numbers aa-above-pgd: AutoAttack <above> PGD." in page.text
    assert "flattened-logits: attacks/best-robust.json: CW leaves fewer." in page.text
    assert page.source.index("2 alarms") < page.source.index("<main>")


def test_what_calfat_attack_found_is_there(run_page: Path) -> None:
    text = Page.read(run_page).text
    assert (
        "Further attacks attacks/best-robust.json Checkpoint best-robust, after round 3; it was selected on the "
        "test split, pgd20 (test-selected), so these are no fair results."
    ) in text
    assert (
        "natural 80.00 [75.6, 83.8] 81.00 359 2.0 cw20 linf, eps 0.05 61.00 [55.9, 65.9] 62.00 359 2.0 "
        "cw20 linf, eps 0.1 43.21 [38.2, 48.4] 44.21"
    ) in text
    assert text.index("attacks/best-robust.json Checkpoint") < text.index("attacks/best-robust-2.json Checkpoint")
    assert "Accuracy under attack over eps, attacks/best-robust.json" in text
    assert (run_page.parent / "figures" / "attacks_best-robust.png").is_file()


def test_a_curve_over_eps_is_of_one_norm() -> None:
    """Eps 2 in l1, 0.5 in l2 and 8/255 in linf are no points of one axis."""

    def attacked(*balls: str) -> list[EvaluationResult]:
        results = [result_of("natural", 0.9)]
        for number, ball in enumerate(balls):
            label, norm, eps = ball.split()
            settings = {"norm": norm, "eps": eps}
            results.append(dataclasses.replace(result_of(label, number / 10), settings=settings))
        return results

    assert charts.eps_chart("attacks", attacked("far l1 2", "near l2 0.5", "pgd20 linf 8/255")) is None
    sweep = attacked("far l1 2", "pgd20 linf 0.1", "far l1 2", "pgd20 linf 0.2", "fgsm linf 0.1")
    axes, lines = drawn(charts.eps_chart("attacks", sweep))
    assert lines == {"pgd20": [(0.0, 90.0), (0.1, 10.0), (0.2, 30.0)], "fgsm": [(0.0, 90.0), (0.1, 40.0)]}
    assert axes.get_xlabel() == "eps (linf, fraction of the pixel range)"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.1", "0.2"]
    assert [*axes.get_xticks()] == [0.0, 0.1, 0.2]


def test_what_was_run_and_what_is_owed(run_page: Path) -> None:
    text = Page.read(run_page).text
    assert "calfat with fedavg on digits (dirichlet): 2 clients, 4 rounds, seed 0" in text
    assert "calfat.threat.eps 0.1 calfat.threat.step_size eps/2 calfat.threat.steps 2" in text
    assert "@inproceedings{chen2022calfat" in text
    assert "cpu, 1 thread, 2 cores" in text
    assert "torch 2.13.0" in text
    assert "mpi4py" not in text


def test_secrets_stay_in_the_run_directory(bare_page: Path) -> None:
    source = bare_page.read_text()
    assert "hunter2" not in source
    assert "tracking_args.wandb_key=…" in source


@pytest.mark.usefixtures("no_figures")
def test_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    text = Page.read(write_run_report(made_run(tmp_path / "a", "train_args.comm_round=9"))).text
    assert "This run is not finished. 4 of 9 rounds are done; the final evaluation is not there yet." in text
    assert "80.0 % natural, round 4" in text


def test_a_run_of_which_nothing_is_known_still_has_a_page(tmp_path: Path) -> None:
    path = made_run(tmp_path / "a")
    for name in ("rounds.jsonl", "rounds.csv", "environment.json", "partition.json"):
        (path / name).unlink()
    page = Page.read(write_run_report(path))
    assert page.errors == []
    assert page.all("figure") == []
    assert "0 of 4 rounds are done" in page.text


def test_many_clients_and_classes_stay_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 clients, 100 classes: totals instead of a panel each, bars without names; and a page of sane size."""
    monkeypatch.setattr("calfat_plugin.report.charts.FORMATS", {})  # files beside the page: not looked at
    path = made_run(
        tmp_path / "a",
        "train_args.client_num_in_total=100",
        counts=[[client * label % 7 for label in range(100)] for client in range(100)],
        classes=[f"class {label}" for label in range(100)],
        final=FINAL,
    )
    content = json.loads((path / "results.json").read_text())
    for evaluation in content["evaluations"]:
        evaluation["per_class"] = [0.01 * label for label in range(100)]
    (path / "results.json").write_text(json.dumps(content))
    page = write_run_report(path)
    assert page.stat().st_size < 1_500_000


def test_means_over_seeds_beside_reported_and_the_best_in_bold(comparison: Path) -> None:
    page = Page.read(comparison)
    assert "calfat 2 75.31 ± 1.41 [62.6, 88.0] (64.69, +11.62)" in page.text
    assert "fedpgd 2 65.06 ± 1.06 [55.5, 74.6] (64.69, +1.37)" in page.text
    assert '<span class="best">75.31</span>' in page.source
    assert '<span class="best">65.06</span>' not in page.source


def test_differences_are_paired_over_seeds(comparison: Path) -> None:
    """Seeds of a setting lie 2 or 1.5 points apart, the differences half a point: only paired ones are so narrow."""
    text = Page.read(comparison).text.partition("Differences, paired over seeds")[2]
    assert "calfat 2 +10.25 [+7.07, +13.43]" in text
    assert "fedpgd 2 \N{MINUS SIGN}10.25 [\N{MINUS SIGN}13.43, \N{MINUS SIGN}7.07]" in text


def test_a_comparison_says_what_differs_and_what_is_common(comparison: Path) -> None:
    text = Page.read(comparison).text
    assert text.index("study") < text.index("2 settings, 4 runs") < text.index("What differs")
    assert "key calfat.trainer calfat calfat.trainer fedpgd calfat.trainer.name calfat fedpgd calfat.trainer." in text
    assert "calfat.trainer.scale 1.0 \N{EN DASH} " in text
    assert "data_args.dataset digits" in text.partition("What is common")[2]
    assert "calfat.trainer calfat, seed 1: AutoAttack <above> PGD." in text


def test_a_page_is_the_same_twice(run_page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no files beside it, either; those are compared in ``test_write.py``."""
    monkeypatch.setattr("calfat_plugin.report.charts.FORMATS", {})
    again = shutil.copytree(run_page.parent, tmp_path / run_page.parent.name)
    assert write_run_report(again).read_bytes() == run_page.read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_an_attack_that_did_not_run_has_no_number_on_any_page(tmp_path: Path) -> None:
    rounds = [{"natural": 0.5, "pgd20": None}, {"natural": 0.6, "pgd20": None}]
    run = made_run(tmp_path / "suite/a/seed-0", rounds=rounds, final={"natural": 0.64, "fgsm": 0.3, "pgd20": None})
    text = Page.read(write_run_report(run)).text
    why = "its loss needs 4 classes, and there are 3"
    assert "64.0 % natural 30.0 % fgsm not run pgd20" in text  # the tiles
    assert "pgd20 linf, eps 1/10 not run \N{EN DASH} \N{EN DASH} 0 0.0" in text
    assert f"pgd20 did not run: {why}." in text
    assert f"not-run: pgd20 did not run, so it has no number: {why}." in text
    compared = Page.read(write_comparison([run])).text
    assert f"seed 0: pgd20 did not run ({why}), so it has no number." in compared
    assert "natural fgsm pgd20 calfat.trainer calfat 1 64.00 [58.9, 68.8] 30.00 [25.5, 34.9] not run" in compared


@pytest.mark.usefixtures("no_figures")
def test_the_accuracy_as_the_release_counts_has_a_column_where_it_is_another_one(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", REPORTED, final=FINAL)
    results = json.loads((run / "results.json").read_text())
    for evaluation in results["evaluations"]:
        evaluation["accuracy_release"] = evaluation["accuracy"]
    change_json(run / "results.json", evaluations=results["evaluations"])
    text = Page.read(write_run_report(run)).text
    assert "evaluator accuracy % 95 % interval reported % difference examples seconds" in text
    assert "natural 64.31 [59.2, 69.1] 64.69 \N{MINUS SIGN}0.38 359 1.5" in text
    assert "and gives the same numbers here" in text
    assert "difference: accuracy minus reported, in percentage points." in text
