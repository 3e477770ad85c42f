"""The tables of docs/passes.md are made of the committed records, by the rules of its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.experiment import assemble, same_but_rounds
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.suites.record import read_record
from tests.docs import passes
from tests.docs.blocks import check_tables
from tests.docs.figures import check_figure


def test_the_tables_are_what_the_records_say(request: pytest.FixtureRequest) -> None:
    check_tables(passes.PAGE, "passes", passes.TABLES, update=request.config.getoption("--update-snapshots"))


def test_the_bytes_are_what_the_records_say() -> None:
    sent = [f"{passes.megabytes_a_round(data):.2f} MB" for data in passes.DATA]
    assert f"send {sent[0]} a round on digits and {sent[1]} on" in passes.PAGE.read_text()


@pytest.mark.parametrize("cost", passes.COSTS)
@pytest.mark.parametrize("data", passes.DATA)
def test_the_figures_are_what_the_records_say(
    data: str, cost: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    drawn = passes.figure(data, cost, tmp_path)
    update = request.config.getoption("--update-snapshots")
    check_figure(passes.PAGE, f"{cost}_{data}.svg", drawn, update=update)


def test_the_recommended_recipe_is_that_of_the_row() -> None:
    """Beyond which images, and what is measured."""
    best = next(each for each in passes.candidates() if not each.collapsed)
    row = passes.rows("fmnist")[f"{best.method}/{best.attack}/{passes.DATA['fmnist']}"]
    file = passes.ROOT / "recipes" / f"{best.method}_{best.attack}_fmnist.yaml".lower()
    assert f"`{file.relative_to(passes.ROOT)}`" in passes.PAGE.read_text()
    shipped = assemble(read_document(file), Registry.load(entry_points=False))
    other = same_but_rounds(shipped.as_run(), row.runs[0].run.experiment.as_run())
    measured = ("calfat.evaluators", "calfat.monitor.", "calfat.partition.seed", "data_args.max_test_examples")
    assert [key for key in other if not key.startswith((*measured, "common_args.random_seed"))] == []
    assert shipped.train.comm_round == row.runs[0].run.experiment.train.comm_round


def test_the_row_that_reaches_the_most_is_named() -> None:
    reached, share = [], []
    for data, all_rounds in passes.DATA.items():
        of = {name: row.scores for name, row in passes.rows(data).items()}
        best = max(of, key=lambda name: of[name]["autoattack"].mean or 0)
        assert best == f"FedPGD/free, 4 replays/{all_rounds}"
        reached.append(f"{100 * (of[best]['autoattack'].mean or 0):.1f}")
        share.append((of[best]["passes"].mean or 0) / (of[f"FedPGD/PGD-10/{all_rounds}"]["passes"].mean or 1))
    said = " ".join(passes.PAGE.read_text().split())
    assert f"on both data sets, {reached[0]} and {reached[1]} %. It takes {share[0]:.2f} of the passes" in said
    assert f"{share[0]:.2f}" == f"{share[1]:.2f}"


def test_every_row_of_the_front_is_beaten_by_nothing_cheaper() -> None:
    rows = {row.cell.name: row.scores for row in passes.rows("digits").values()}
    _, (head, *table) = passes.results("digits")
    for line in table:
        cells = dict(zip(head, line, strict=True))
        own = rows[f"{cells['method']}/{cells['attack']}/{cells['rounds']} rounds"]
        beaten = any(
            other["passes"].mean <= own["passes"].mean and other["autoattack"].mean > own["autoattack"].mean
            for other in rows.values()
        )
        assert (cells["front"] == "•") is not beaten


def test_pgd_10_on_fashion_mnist_is_the_studys() -> None:
    """What the page's plan says under Changed: the same recipes, pairs and values, and the passes of its rule."""
    folder = passes.ROOT / "docs" / "results"
    study, record = (read_record(folder / name) for name in ("study_fmnist_runs.csv", "passes_fmnist.csv"))
    for cell, named, an_image in (
        ("0.1/FedPGD", "FedPGD", 11),
        ("0.1/CalFAT, the paper's constants", "CalFAT", 12),
    ):
        rows = {key: row for key, row in record.items() if key[0] == f"{named}/PGD-10/30 rounds"}
        assert len(rows) == 5 * 3 + 8
        for (_, tried, seed), row in rows.items():
            theirs = study[cell, tried, seed]
            own = dict(row.values)
            assert tried or own.pop("passes") == an_image * 4800 * 30
            assert own == {metric: theirs.values[metric] for metric in own}
            assert (row.recipe, row.processor) == (theirs.recipe, theirs.processor)
