"""The study of robustness per pass: its tables and figures are made of its records, by the rules of its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from calfat_plugin.experiment import assemble, same_but_rounds
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import read_record
from studies import pages
from studies.passes import seconds, tables
from tests.studies.figures import check_figure


def test_the_tables_are_what_the_records_say() -> None:
    text = tables.PAGE.read_text(encoding="utf-8")
    assert pages.with_tables(text, "passes", tables.TABLES) == text, "python -m studies.passes.tables writes them anew"
    assert all(f"<!-- passes: {name}" in text for name in tables.TABLES)


@pytest.mark.parametrize("name", tables.figures())
def test_the_figures_are_what_the_records_say(name: str, tmp_path: Path) -> None:
    tables.draw(*tables.figures()[name], tmp_path / name)
    check_figure(tables.HERE / name, tmp_path / name)
    assert f"]({name})" in tables.PAGE.read_text(encoding="utf-8")


def test_what_the_text_says_follows_from_the_records() -> None:
    """The bytes, and the row that reaches the most."""
    said = " ".join(tables.PAGE.read_text(encoding="utf-8").split())
    sent = [f"{tables.megabytes_a_round(data):.2f} MB" for data in tables.DATA]
    assert f"send {sent[0]} a round on digits and {sent[1]} on" in said
    reached, share = [], []
    for data, rounds in tables.DATA.items():
        of = tables.rows(data)
        best = max(of.values(), key=lambda row: row.mean("autoattack"))
        assert best.name == f"FedPGD/free, 4 replays/{rounds} rounds"
        reached.append(f"{100 * best.mean('autoattack'):.1f}")
        share.append(f"{best.cost('passes') / of[f'FedPGD/PGD-10/{rounds} rounds'].cost('passes'):.2f}")
    assert f"on both data sets, {reached[0]} and {reached[1]} %. It takes {share[0]} of the passes" in said
    assert share[0] == share[1]


def test_the_recommended_recipe_is_that_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond which images, and what is measured; and every row of the record is of a run that the suite has today."""
    best = next(each for each in tables.candidates() if not each.collapsed)
    row = tables.rows("fmnist")[f"{best.method}/{best.attack}/30 rounds"]
    file = pages.ROOT / "recipes" / f"{best.method}_{best.attack}_fmnist.yaml".lower()
    assert f"`{file.relative_to(pages.ROOT)}`" in tables.PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    record = tables.HERE / "passes_fmnist.csv"
    suite = load_suite(tables.HERE / "passes_fmnist.yaml", record=record)
    plan = make_plan(suite, registry := Registry.load(entry_points=False))
    known = {run.key for run in (*plan.choosing.runs, *plan.runs) if run.recorded is not None}
    assert known == set(read_record(record))
    trained = next(run.experiment for run in plan.runs if run.cell.name == row.name)
    shipped = assemble(read_document(file), registry)
    measured = ("calfat.evaluators", "calfat.monitor.", "calfat.partition.seed", "data_args.max_test_examples")
    other = same_but_rounds(shipped.as_run(), trained.as_run())
    assert [key for key in other if not key.startswith((*measured, "common_args.random_seed"))] == []
    assert shipped.train.comm_round == trained.train.comm_round
    assert row.rate == f"{trained.train.learning_rate:g}"


def test_pgd_10_on_fashion_mnist_is_the_short_studys() -> None:
    """What the plan says under Changed: the same recipes, pairs and values, and the passes of its rule."""
    study = read_record(tables.HERE.parent / "short" / "study_fmnist_runs.csv")
    record = read_record(tables.HERE / "passes_fmnist.csv")
    for cell, named, an_image in (("0.1/FedPGD", "FedPGD", 11), ("0.1/CalFAT, the paper's constants", "CalFAT", 12)):
        rows = {key: row for key, row in record.items() if key[0] == f"{named}/PGD-10/30 rounds"}
        assert len(rows) == 5 * 3 + 8
        for (_, tried, seed), row in rows.items():
            theirs, own = study[cell, tried, seed], dict(row.values)
            assert tried or own.pop("passes") == an_image * 4800 * 30
            assert own == {metric: theirs.values[metric] for metric in own}
            assert (row.recipe, row.processor) == (theirs.recipe, theirs.processor)


def made(method: str, attack: str, passes: float, robust: float, natural: float = 0.9) -> tables.Row:
    """A row of 40 rounds and eight pairs."""
    runs = pd.DataFrame({"passes": passes, "autoattack": robust, "natural": natural}, index=range(8))
    return tables.Row(method, attack, 40, "0.1", runs, passes / 1000)


def test_rules_of_the_plan_on_hand_made_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front, and the rows of a quarter of the passes, of which one collapsed."""
    rows = [
        made("FedPGD", "PGD-10", 1000, 0.5),
        made("FedPGD", "N-FGSM", 250, 0.4),
        made("FedPGD", "ATAS", 240, 0.45, natural=0.15),
        made("FedPGD", "RS-FGSM", 260, 0.6),
        made("CalFAT", "PGD-10", 1100, 0.5),
    ]
    found = {row.name: row for row in rows}
    monkeypatch.setattr(tables, "rows", lambda data: found)
    monkeypatch.setattr(tables, "DATA", {"digits": 40})
    assert [row.attack for row in tables.front("digits", "passes")] == ["ATAS", "RS-FGSM"]
    assert [(each.attack, each.collapsed) for each in tables.candidates()] == [("ATAS", 8), ("N-FGSM", 0)]
    assert [(each.method, each.difference is None) for each in tables.tests()] == [("FedPGD", False), ("CalFAT", True)]
    assert tables.tests()[0].fewer == 4
    assert not tables.tests()[0].excludes_a_point


@pytest.mark.usefixtures("no_page")
def test_seconds_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny rounds, one method and one attack."""
    monkeypatch.setattr(seconds, "FIRST", 1)
    monkeypatch.setattr(seconds, "ROUNDS", 2)
    suite = seconds.suite_of("digits")
    monkeypatch.setattr(seconds, "suite_of", lambda data: suite)
    for axis, label in (("method", "FedPGD"), ("attack", "N-FGSM")):
        suite["axes"][axis] = {label: suite["axes"][axis][label]}
    few = ("data_args.max_train_examples=200", "data_args.max_test_examples=20")
    options = [word for each in few for word in ("--set", each)]
    seconds.main(["--data", "digits", "--json", str(tmp_path / "seconds.json"), *options])
    (numbers,) = json.loads((tmp_path / "seconds.json").read_text())["numbers"]["digits"].values()
    assert numbers["median"] == numbers["values"][0] > 0
