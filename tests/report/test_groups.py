"""Runs that differ in their seed only belong together, and groups are named by what tells them apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from calfat_plugin.report.comparison import differences, group_runs, results_tables
from calfat_plugin.report.labels import problem_names, setting_names
from calfat_plugin.report.scores import problem_of
from calfat_plugin.run_files import read_suite
from calfat_plugin.stored_run import Run
from tests.report.made import made_run


def runs(folder: Path, *settings: tuple[str, ...]) -> list[Run]:
    """A finished run for each tuple of ``--set`` values."""
    return [
        Run.load(made_run(folder / str(index), *overrides, final={"natural": 0.5 + 0.1 * index}))
        for index, overrides in enumerate(settings)
    ]


def test_seeds_of_one_recipe_are_one_group_with_mean_and_sample_deviation(tmp_path: Path) -> None:
    (group,) = group_runs(runs(tmp_path, *[(f"common_args.random_seed={seed}",) for seed in (2, 0, 1)]))
    assert [run.experiment.seed for run in group.runs] == [0, 1, 2]
    score = group.score("natural")
    assert score.mean == pytest.approx(0.6)
    assert score.std == pytest.approx(0.1)
    assert group.score("pgd20").mean is None


def test_loggers_and_devices_do_not_part_runs(tmp_path: Path) -> None:
    first, second = ("common_args.random_seed=0",), ("common_args.random_seed=1", "calfat.loggers=[tensorboard]")
    same = ("device_args.using_gpu=true", "calfat.evaluation.evidence_mb=1", "calfat.runtime.threads=1")
    assert len(group_runs(runs(tmp_path, first, (*second, *same)))) == 1


def test_data_sets_in_memory_are_parted_by_their_content(tmp_path: Path) -> None:
    first, second = runs(tmp_path, (), ())
    for run, digest in ((first, "a"), (second, "b")):
        recipe = yaml.safe_load((run.directory / "recipe.yaml").read_text())
        recipe["data_args"]["dataset"], recipe["calfat"]["dataset"] = "memory", {"sha256": digest * 64}
        (run.directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert len(group_runs([Run.load(run.directory) for run in (first, second)])) == 2


def with_plugin(folder: str, digest: str, seed: int = 0) -> tuple[str, str]:
    plugin = f"calfat.plugins.my_fat={{file: {folder}/my_fat.py, sha256: '{digest * 64}'}}"
    return plugin, f"common_args.random_seed={seed}"


def test_a_plugin_file_parts_runs_by_its_content_and_not_by_its_place(tmp_path: Path) -> None:
    moved = runs(tmp_path / "moved", with_plugin("/here", "a"), with_plugin("/there", "a", seed=1))
    assert len(group_runs(moved)) == 1
    changed = group_runs(runs(tmp_path / "changed", with_plugin("/here", "a"), with_plugin("/here", "b")))
    assert [group.name for group in changed] == [f"calfat.plugins.my_fat.sha256 {digest * 64}" for digest in "ab"]
    others = group_runs(runs(tmp_path / "others", with_plugin("/here", "a"), ("calfat.trainer=fedpgd",)))
    assert [group.name for group in others] == [
        "calfat.trainer calfat · calfat.aggregator.weights uniform",
        "calfat.trainer fedpgd · calfat.aggregator.weights examples",
    ]


def test_of_runs_with_one_seed_the_last_finished_one_counts(tmp_path: Path) -> None:
    first, second = runs(tmp_path, (), ())
    unfinished = Run.load(made_run(tmp_path / "z"))
    (group,) = group_runs([first, second, unfinished])
    assert [run.directory for run in group.runs] == [second.directory]


def test_names_tell_settings_apart(tmp_path: Path) -> None:
    alpha, clients = "data_args.partition_alpha=0.3", "train_args.client_num_in_total=3"
    found = runs(tmp_path, (), (alpha,), (clients,), ("calfat.trainer.scale=5", alpha))
    assert [group.name for group in group_runs(found)] == [
        f"data_args.partition_alpha {alpha} · train_args.client_num_in_total {clients} · "
        f"train_args.client_num_per_round {clients} · calfat.trainer.scale {scale}"
        for alpha, clients, scale in ((0.1, 2, 10.0), (0.3, 2, 10.0), (0.1, 3, 10.0), (0.3, 2, 5.0))
    ]


def test_names_say_all_that_differs_or_that_they_do_not(tmp_path: Path) -> None:
    """A method with another learning rate is no comparison of two methods, and its name shows it."""
    faster = ("calfat.trainer=fedpgd", "train_args.learning_rate=0.05", "calfat.aggregator.weights=uniform")
    (tmp_path / "two").mkdir()
    assert [group.name for group in group_runs(runs(tmp_path / "two", (), faster))] == [
        "calfat.trainer calfat · train_args.learning_rate 0.01",
        "calfat.trainer fedpgd · train_args.learning_rate 0.05",
    ]
    more = (*faster, "train_args.momentum=0.5", "train_args.epochs=2", "train_args.weight_decay=0")
    names = [group.name for group in group_runs(runs(tmp_path, (), more))]
    assert names == [
        "calfat.trainer calfat · train_args.epochs 1 · train_args.learning_rate 0.01 · train_args.momentum 0.9 · …",
        "calfat.trainer fedpgd · train_args.epochs 2 · train_args.learning_rate 0.05 · train_args.momentum 0.5 · …",
    ]


def test_names_that_would_be_the_same_are_longer(tmp_path: Path) -> None:
    long = "train_args.epochs=2", "train_args.learning_rate=0.05", "train_args.momentum=0.5", "train_args.batch_size=8"
    found = runs(tmp_path, (), (*long, "train_args.weight_decay=0"), (*long, "train_args.weight_decay=0.1"))
    names = [group.name for group in group_runs(found)]
    assert [name.rpartition(" · ")[2] for name in names] == [f"train_args.weight_decay {x}" for x in (0.0002, 0.0, 0.1)]
    again = setting_names([found[0], found[0]])  # two cells of a suite may be one setting
    assert again == [f"calfat.trainer calfat · {found[0].directory}"] * 2
    measured = "calfat.monitor.max_examples=32"
    both = group_runs(runs(tmp_path / "both", (), (measured,), ("calfat.trainer.scale=5",)))
    assert [group.name for group in both] == [
        f"calfat.trainer.scale {scale} · calfat.monitor.max_examples {most}"
        for scale, most in (("10.0", "null"), ("10.0", "32"), ("5.0", "null"))
    ]


def test_what_measures_a_model_is_no_part_of_its_name_unless_nothing_else_differs(tmp_path: Path) -> None:
    (tmp_path / "methods").mkdir()
    plain, fgsm = "calfat.aggregator.weights=examples", "calfat.monitor.evaluators=[natural, fgsm, pgd20]"
    found = runs(tmp_path / "methods", (plain,), (plain, "calfat.trainer=fedpgd", fgsm))
    assert [group.name for group in group_runs(found)] == ["calfat.trainer calfat", "calfat.trainer fedpgd"]
    same = group_runs(runs(tmp_path, (), ("calfat.monitor.max_examples=32",)))
    assert [group.name for group in same] == ["calfat.monitor.max_examples null", "calfat.monitor.max_examples 32"]


def test_differences_lists_the_settings_that_differ_and_no_others(tmp_path: Path) -> None:
    groups = group_runs(runs(tmp_path, (), ("train_args.learning_rate=0.1", "common_args.random_seed=9")))
    assert differences(groups) == [["train_args.learning_rate", "0.01", "0.1"]]


def test_accuracies_compare_only_on_one_problem(tmp_path: Path) -> None:
    groups = group_runs(
        runs(tmp_path, (), ("calfat.trainer=fedpgd",), ("data_args.partition_alpha=0.5",), ("calfat.threat.eps=0.2",))
    )
    assert problem_names([problem_of(group.runs[0].settings) for group in groups]) == [
        f"data_args.partition_alpha {alpha} · calfat.threat.eps {eps}"
        for alpha, eps in ((0.1, 0.1), (0.1, 0.1), (0.5, 0.1), (0.1, 0.2))
    ]


def test_a_suite_names_orders_and_reports(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    for cell, trainer in (("calfat", "calfat"), ("fedpgd", "fedpgd")):
        for seed in (0, 1):
            made_run(
                suite / cell / str(seed),
                f"calfat.trainer={trainer}",
                f"common_args.random_seed={seed}",
                final={"natural": 0.5},
            )
    cells = [
        {
            "name": name,
            "source": "arXiv:2205.14926, Table 1",
            "scores": {
                "natural": {"reported": 0.4696},
                "pgd20": {"reported": None},
            },
            "runs": [{"seed": seed, "directory": f"runs/suites/suite/{name.lower()}/{seed}"} for seed in (0, 1)],
        }
        for name in ("FedPGD", "CalFAT")
    ]
    (suite / "suite.json").write_text(
        json.dumps({"title": "Table 1", "cells": cells, "tolerance_points": {"natural": 4}})
    )
    found = [Run.load(path.parent) for path in sorted(suite.rglob("recipe.yaml"))]
    groups = group_runs(found, suite)
    assert [(group.name, len(group.runs)) for group in groups] == [("FedPGD", 2), ("CalFAT", 2)]
    assert groups[0].reported == pytest.approx({"natural": 46.96})
    table, _ = results_tables(groups, read_suite(suite))
    assert [(row[2].beside[-1], row[2].beyond) for row in table.cells] == [("(46.96, +4.04!)", True)] * 2
    assert groups[0].source == "arXiv:2205.14926, Table 1"


def test_per_class_accuracy_is_the_mean_over_seeds(tmp_path: Path) -> None:
    (group,) = group_runs(runs(tmp_path, ("common_args.random_seed=0",), ("common_args.random_seed=1",)))
    found = group.mean_per_class("natural")
    first, second = (run.evaluations[0].per_class for run in group.runs)
    assert found == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert group.mean_per_class("cw") == []
