"""Evaluators that look at clients, in whole runs: killed and resumed, in workers, and where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import calfat_plugin
from calfat_plugin.errors import OptionError
from calfat_plugin.testing.tiny import TinyModel, tiny_images
from tests.runs.processes import RECIPE, WarmServer, sabotage
from tests.runs.remains import read_rows
from tests.snapshot import TextSnapshot

INSIDE = (
    *("--set", "calfat.evaluators=[natural, internal2, {name: personalised, steps: 2, epochs: 2}]"),
    *("--set", "calfat.monitor.evaluators=[natural, {name: personalised, steps: 2, max_examples: 100}]"),
    *("--set", "train_args.comm_round=2", "--set", "train_args.client_num_per_round=3"),
    *("--set", "calfat.trainer={name: fedpgd}", "--set", "calfat.aggregator=scaffold"),
    *("--set", "calfat.clients=[{ids: 4, attacker: sign_flip}]"),
)


def found(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """What was measured: at the end, and after the rounds."""
    evaluations = json.loads((directory / "results.json").read_text())["evaluations"]
    for evaluation in evaluations:
        evaluation.pop("seconds")
    rows = read_rows(directory / "rounds.csv")
    return evaluations, [{name: row[name] for name in row if name.startswith("personalised")} for row in rows]


@pytest.fixture(scope="module")
def whole(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(RECIPE)
    done = warm.run("run", "tiny.yaml", *INSIDE, "--run-dir", "run", cwd=folder)
    assert (done.code, done.err) == (0, "")
    return folder / "run"


def test_what_a_run_says(whole: Path) -> None:
    """Metrics are columns and in results.json; details name the round's clients; the report was drawn of them."""
    (_, internal, personalised, _), rows = found(whole)
    clients = [int(client) for client in read_rows(whole / "rounds.csv")[-1]["clients"].split()]
    assert internal["details"]["clients"] == clients
    assert len(internal["details"]["matrix"]) == len(clients)
    assert internal["metrics"].keys() == {"worst", "mean"}
    assert [int(client) for client in personalised["details"]["clients"]] == [c for c in clients if c != 4]
    assert len(personalised["metrics"]) == 8
    assert [len(row) for row in rows if all(row.values())] == [13, 13]
    last = load_file(whole / "checkpoints" / "last.safetensors")
    assert {name.split("/")[1] for name in last if name.startswith("sent/")} == set(map(str, clients))


@pytest.mark.parametrize(("at", "round"), [("evaluation", 2), ("training", 2), ("row", 2)])
def test_killed_and_resumed_measures_the_same(warm: WarmServer, whole: Path, recipe: Path, at: str, round: int) -> None:
    """Also between the last round and the final evaluation, when no client trains any more."""
    arguments = ("run", "tiny.yaml", *INSIDE, "--run-dir", "run")
    assert warm.run(*arguments, cwd=recipe.parent, **sabotage(at, round)).code == -9
    resumed = warm.run(*arguments, "--resume", cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    assert found(recipe.parent / "run") == found(whole)


def test_workers_measure_the_same(warm: WarmServer, whole: Path, recipe: Path) -> None:
    done = warm.run("run", "tiny.yaml", *INSIDE, "--workers", "2", "--run-dir", "run", cwd=recipe.parent)
    assert (done.code, done.err) == (0, "")
    assert found(recipe.parent / "run") == found(whole)


def test_a_finished_run_and_a_model_have_no_clients(warm: WarmServer, whole: Path, snapshot: TextSnapshot) -> None:
    refused = warm.run("attack", "run", "--attacks", "internal", cwd=whole.parent)
    assert (refused.code, refused.out) == (2, "")
    snapshot(refused.err)
    assert warm.run("attack", "run", "--attacks", "fgsm", cwd=whole.parent).code == 0
    with snapshot.raises(OptionError):
        calfat_plugin.evaluate(TinyModel().eval(), tiny_images(), None, "personalised", eps=0.1)
