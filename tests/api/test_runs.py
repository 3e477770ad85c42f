"""``run``, ``load_run`` and ``load_model``: the same runs as the command line's, and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import calfat_plugin as calfat
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.rounds_csv import COST_COLUMNS
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request
from tests.api.test_notebook import RECIPE
from tests.cli.runner import calfat as command_line
from tests.report.made import draw_nothing
from tests.snapshot import TextSnapshot

SECTIONS: dict[str, Any] = parse_document(RECIPE, "small.yaml").data
TWO = {"train_args.comm_round": 2}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> calfat.Run:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        return calfat.run(SECTIONS, seed=3, set=TWO, run_dir=tmp_path_factory.mktemp("runs") / "run", progress=False)


@pytest.mark.usefixtures("no_page")
def test_it_is_the_run_of_the_command_line(done: calfat.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = ["run", "recipe.yaml", "--seed", "3", "--set", "train_args.comm_round=2", "--run-dir", "again"]
    ended = command_line(*command)
    assert (ended.code, ended.err) == (0, "")
    again = calfat.load_run(tmp_path / "again")
    assert again.recipe == done.recipe
    cost = dict.fromkeys(COST_COLUMNS)
    assert [{**row, **cost} for row in rows(again)] == [{**row, **cost} for row in rows(done)]
    for label, result in done.results.items():
        assert (again.results[label].per_class, again.results[label].settings) == (result.per_class, result.settings)
        worst = again.results[label].worst_clients
        assert worst is not None
        assert worst == result.worst_clients
        assert 0 <= worst.accuracy <= 1
        assert len(worst.ids) == 1
    assert (again.directory / "checkpoints/last.safetensors").read_bytes() == (
        done.directory / "checkpoints/last.safetensors"
    ).read_bytes()


def rows(run: calfat.Run) -> list[dict[str, Any]]:
    """The rounds as without pandas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        found = run.rounds
    assert isinstance(found, list)
    return found


def test_rounds_are_numbers_with_none_where_nothing_was_measured(done: calfat.Run) -> None:
    first, second = rows(done)
    assert (first["round"], second["round"], first["clients"], first["refused"]) == (1, 2, "0 1", "")
    assert isinstance(second["natural"], float)
    frame = done.rounds
    assert list(frame["round"]) == [1, 2]
    assert frame["natural"].dtype == float
    file = done.directory / "rounds.jsonl"
    text = file.read_text()
    try:
        file.write_text(text.replace(f'"accuracy": {second["natural"]!r},', '"accuracy": null,'))
        assert rows(done)[1]["natural"] is None
    finally:
        file.write_text(text)


def test_a_run_shows_its_results(done: calfat.Run) -> None:
    share = f"{100 * done.results['natural'].accuracy:.1f} %"
    assert repr(done).startswith(f"<Run {done.directory}: natural {share}, pgd20 ")
    # The column of the release's accuracy is there where it is another one in some row.
    release_shown = any(result.accuracy_release != result.accuracy for result in done.results.values())
    cells = f"<td>{share}</td>" * (2 if release_shown else 1)
    header = "<td>accuracy</td><td>release</td>" if release_shown else "<td>accuracy</td>"
    assert f"<table><tr><td>evaluator</td>{header}<td>examples</td></tr>" in done._repr_html_()
    assert f"<tr><td>natural</td>{cells}<td>359</td></tr>" in done._repr_html_()
    assert done.report.is_file()
    assert done.results["pgd20"].num_examples == 20


@pytest.mark.usefixtures("no_page")
def test_after_a_stop_finished_rounds_stay_and_resume_continues_them(
    done: calfat.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, folder = Server.aggregate_round, tmp_path / "run"

    def stop_in_round_two(server: Server, round: int, uploads: Any) -> Any:
        if round == 2:
            raise KeyboardInterrupt
        return finish(server, round, uploads)

    monkeypatch.setattr(Server, "aggregate_round", stop_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        calfat.run(SECTIONS, seed=3, set=TWO, run_dir=folder, progress=False)
    monkeypatch.setattr(Server, "aggregate_round", finish)
    stopped = calfat.load_run(folder)
    assert (dict(stopped.results), len(rows(stopped)), repr(stopped)) == ({}, 1, f"<Run {folder}: not finished>")
    resumed = calfat.run(SECTIONS, seed=np.arange(4)[3], set=TWO, run_dir=folder, resume=True, progress=False)
    assert resumed.results["natural"].per_class == done.results["natural"].per_class


def test_a_run_without_a_finished_round_leaves_its_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server: Server, round: int, uploads: Any) -> Any:
        raise calfat.UpdateError("no")

    monkeypatch.setattr(Server, "aggregate_round", fail)
    with pytest.raises(calfat.UpdateError):
        calfat.run(SECTIONS, run_dir=tmp_path / "run", progress=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "run" / "log.txt"]


@pytest.mark.parametrize(
    "changes",
    [
        {"set": {"comm_round": 5}},
        {"set": {"train_args.comm_round": 0}},
        {"set": {"train_args": {"comm_round": 5}}},
        {"seed": -1},
        {"set": ["train_args.comm_round=5"]},
        {"set": {"calfat.evaluators": [object]}},
        {"set": {"calfat.trainer": "fedpdg"}},
        {"recipe": {"calfat": {1: 2}}},
        {"recipe": {}},
        {"recipe": "nowhere.yaml"},
        {"workers": 0},
        {"workers": "two"},
        {"workers": 2, "set": {"common_args.training_type": "cross_silo", "comm_args.backend": "GRPC"}},
        {"set": {"comm_args.backend": "MPI"}},
        {"plugins": "margin_fat.py"},
        {"plugins": Path("margin_fat.py")},
    ],
)
def test_what_is_wrong_is_an_error_that_says_where(
    changes: dict[str, Any], snapshot: TextSnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with snapshot.raises(calfat.CalfatError):
        calfat.run(**{"recipe": SECTIONS, **changes})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The experiments of runs, each of which ends as soon as it would open its directory."""
    found: list[Experiment] = []

    def stop(request: Request) -> None:
        found.append(request.experiment)
        raise calfat.RunError("seen")

    monkeypatch.setattr(RunDirectory, "open", stop)
    return found


def test_values_are_set_and_a_plugin_takes_the_place_of_another(seen: list[Experiment]) -> None:
    ours = {"threat": {"eps": 0.1, "step_size": 0.05}, "aggregator": "sfat", "trainer": {"preset": "release"}}
    recipe = {"train_args": {"epochs": 3}, "model_args": {"model": "cnn_small"}, "calfat": ours}
    changes = {
        "train_args.comm_round": 5,
        "train_args.learning_rate": 0.2,
        "calfat.name": "mine",
        "calfat.threat.eps": 0.2,
        "calfat.trainer": {"name": "fedpgd"},
        "calfat.monitor.every": 2,
    }
    none: Any = None  # for the default, as elsewhere in Python
    with pytest.raises(calfat.RunError, match="seen"):
        calfat.run(recipe, set=changes, plugins=none)
    (found,) = seen
    train, threat = found.train, found.threat
    assert (train.comm_round, train.learning_rate, train.epochs) == (5, 0.2, 3)
    assert (float(threat.eps), float(threat.step_size)) == (0.2, 0.05)
    assert (found.name, found.trainer.name, found.monitor.every) == ("mine", "fedpgd", 2)


def test_another_norm_needs_an_eps_beside_it(seen: list[Experiment]) -> None:
    recipe = {"model_args": {"model": "cnn_small"}, "calfat": {"threat": {"norm": "linf", "eps": 0.1}}}
    with pytest.raises(calfat.RecipeError, match=r"^set calfat\.threat\.norm='l2': .* l2 needs an eps beside it; "):
        calfat.run(recipe, set={"calfat.threat.norm": "l2"})
    with pytest.raises(calfat.RunError, match="seen"):
        calfat.run(recipe, set={"calfat.threat.norm": "l2", "calfat.threat.eps": 0.5})
    assert [(each.threat.norm, float(each.threat.eps)) for each in seen] == [("l2", 0.5)]


def test_an_empty_section_is_one_where_there_was_none(seen: list[Experiment]) -> None:
    """``ema: {}`` switches the average on, with its defaults; an empty section leaves what the recipe has."""
    ours = {"trainer": {"name": "fedpgd"}, "threat": {"eps": 0.1}}
    with pytest.raises(calfat.RunError, match="seen"):
        calfat.run(
            {"model_args": {"model": "cnn_small"}, "calfat": ours},
            run_dir="run",
            set={"calfat.ema": {}, "calfat.trainer.awp": {}},
        )
    (found,) = seen
    assert found.ema is not None
    assert found.additions.awp is not None
    assert (found.trainer.name, float(found.threat.eps)) == ("fedpgd", 0.1)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_from_the_run_or_the_checkpoint(done: calfat.Run) -> None:
    models = [
        calfat.load_model(done.directory),
        calfat.load_model(str(done.directory), checkpoint="last"),
        calfat.load_model(done.directory / "checkpoints" / "last.safetensors"),
        calfat.load_model(done.directory, checkpoint="best-natural"),
    ]
    assert not any(module.training for model in models for module in model.modules())
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    first, *others = [model(x) for model in models[:3]]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"checkpoint": "best"}, "checkpoints/best.safetensors: no such checkpoint. "),
        ({"device": "gpu"}, "device gpu: expected cpu, cuda, or cuda:N such as cuda:0."),
        ({"path": "nowhere"}, "nowhere: no such checkpoint or run directory."),
    ],
)
def test_a_model_that_cannot_be_loaded(done: calfat.Run, arguments: dict[str, str], error: str) -> None:
    with pytest.raises(calfat.CalfatError) as caught:
        calfat.load_model(**{"path": done.directory, **arguments})
    assert error in str(caught.value)
