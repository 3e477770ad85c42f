"""A run that is killed anywhere and resumed ends as if nothing had happened: same model, same rows, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from calfat_plugin.rounds import read_rounds
from tests.runs.processes import RECIPE, TIMEOUT, WarmServer, cold, environment, sabotage
from tests.runs.remains import everything, read_rows, rows

ALL = ("--set", "train_args.client_num_per_round=5")
SOME = ("--set", "train_args.client_num_per_round=3")
AVERAGED = (*SOME, "--set", "calfat.ema.decay=0.7", "--set", "calfat.trainer.awp.warmup=5")


@pytest.fixture(scope="module")
def whole(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """Uninterrupted runs of nine rounds, by participation."""
    runs = {}
    for participation in (ALL, AVERAGED):
        folder = tmp_path_factory.mktemp("whole")
        (folder / "tiny.yaml").write_text(RECIPE)
        done = warm.run("run", "tiny.yaml", *participation, "--run-dir", "run", cwd=folder)
        assert (done.code, done.err) == (0, "")
        runs[participation] = folder / "run"
    return runs


@pytest.mark.parametrize(
    ("participation", "at", "round", "rows_left"),
    [(AVERAGED, "training", 7, 6), (ALL, "training", 1, 0), (ALL, "row", 7, 7), (ALL, "evaluation", 9, 9)],
    ids=["mid-round 7, moving average and perturbed weights", "mid-round 1", "before the checkpoint", "evaluation"],
)
def test_killed_and_resumed_equals_uninterrupted(
    warm: WarmServer,
    whole: dict[tuple[str, ...], Path],
    recipe: Path,
    participation: tuple[str, ...],
    at: str,
    round: int,
    rows_left: int,
) -> None:
    run = recipe.parent / "run"
    arguments = ("run", "tiny.yaml", *participation, "--run-dir", "run")

    killed = warm.run(*arguments, cwd=recipe.parent, **sabotage(at, round))
    assert killed.code == -9
    assert (len(rows(run)) if (run / "rounds.csv").exists() else 0) == rows_left
    assert not (run / "results.json").exists()

    resumed = warm.run(*arguments, "--resume", cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    assert (run / "results.json").exists()
    assert everything(run) == everything(whole[participation])


def test_killed_in_round_7_as_a_user_starts_it(
    warm: WarmServer, whole: dict[tuple[str, ...], Path], recipe: Path
) -> None:
    """The same with the command itself, started cold, and without naming the run directory."""
    arguments = ("run", "tiny.yaml", *ALL)
    killed = cold(*arguments, cwd=recipe.parent, env=environment(recipe.parent / "home") | sabotage("training", 7))
    assert killed.code == -9
    (run,) = (recipe.parent / "runs" / "tiny").iterdir()
    assert len(rows(run)) == 6

    resumed = warm.run(*arguments, "--resume", cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    # Round 6 may still have been on its way to the disk, and is then made again.
    said = [f"tiny: resuming at round {round} of 9 rounds in {run.relative_to(recipe.parent)}" for round in (6, 7)]
    assert resumed.out.splitlines()[0] in said
    assert everything(run) == everything(whole[ALL])


def killed_and_resumed(warm: WarmServer, folder: Path, at: str, round: int, *words: str) -> tuple[Path, Path]:
    """(a run that was killed there and resumed, the same without an interruption), which have to end alike."""
    arguments = ("run", "tiny.yaml", *words)
    assert warm.run(*arguments, "--run-dir", "whole", cwd=folder).code == 0
    assert warm.run(*arguments, "--run-dir", "run", cwd=folder, **sabotage(at, round)).code == -9
    assert warm.run(*arguments, "--run-dir", "run", "--resume", cwd=folder).code == 0
    assert everything(folder / "run") == everything(folder / "whole")
    return folder / "run", folder / "whole"


def test_killed_in_the_middle_of_a_schedule(warm: WarmServer, recipe: Path) -> None:
    """Adam's moments and the passes over the data begin anew with each round, and the rate is the round's."""
    asked = ("client_optimizer=adamw", "lr_schedule=cosine", "warmup_rounds=2", "local_steps=3", "comm_round=5")
    words = (word for each in asked for word in ("--set", f"train_args.{each}"))
    run, _ = killed_and_resumed(warm, recipe.parent, "training", 4, *words)
    rates = [float(row["learning_rate"]) for row in rows(run)]
    assert rates == pytest.approx([0.05 / 3, 0.1 / 3, 0.05, 0.0375, 0.0125])


def test_killed_with_groups_and_attackers(warm: WarmServer, recipe: Path) -> None:
    """And with an attack of training that clients remember something of."""
    groups = (
        "[{share: 0.2, attacker: gaussian_noise}, {smallest: 1, attacker: label_flip, epochs: 2}, "
        "{largest: 1, trainer: standard, threat: {eps: 0.05}}]"
    )
    asked = (f"calfat.clients={groups}", "train_args.comm_round=5", "calfat.threat.inner=sora")
    words = (*SOME, *(word for each in asked for word in ("--set", each)))
    run, whole = killed_and_resumed(warm, recipe.parent, "training", 3, *words)
    assert (run / "partition.json").read_text() == (whole / "partition.json").read_text()
    kept = [load_file(path) for path in (run / "checkpoints" / "clients").iterdir()]
    assert any("inner/alignment" in state for state in kept)


@pytest.mark.parametrize(("at", "round"), [("training", 2), ("row", 1)])
def test_killed_with_many_clients(warm: WarmServer, recipe: Path, at: str, round: int) -> None:
    """Their values are in a file of their own, which ends with the round of the checkpoint, too."""
    asked = ("train_args.client_num_in_total=11", "train_args.client_num_per_round=6", "train_args.comm_round=3")
    run, whole = killed_and_resumed(
        warm, recipe.parent, at, round, *(word for each in asked for word in ("--set", each))
    )
    of_clients = (run / "clients.csv").read_text()
    assert of_clients == (whole / "clients.csv").read_text()
    assert len({line.split(",")[1] for line in of_clients.splitlines()[1:]}) > 6


def test_the_seconds_of_earlier_processes_count(warm: WarmServer, recipe: Path) -> None:
    run = recipe.parent / "run"
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=3", "--run-dir", "run")
    assert warm.run(*arguments, cwd=recipe.parent, **sabotage("training", 3)).code == -9
    first, second, *_ = read_rounds(run / "rounds.jsonl")
    kept = (run / "rounds.jsonl").read_text()
    (run / "rounds.jsonl").write_text(kept.replace(f'"seconds": {first.seconds},', '"seconds": 5000.5,', 1))
    assert warm.run(*arguments, "--resume", cwd=recipe.parent).code == 0
    seconds = json.loads((run / "results.json").read_text())["seconds"]
    assert 5000.5 + second.seconds < seconds < 5000.5 + TIMEOUT


def test_more_rounds_than_before_extend_a_finished_run(
    warm: WarmServer, whole: dict[tuple[str, ...], Path], recipe: Path
) -> None:
    arguments = ("run", "tiny.yaml", *ALL, "--run-dir", "run")
    assert warm.run(*arguments, "--set", "train_args.comm_round=4", cwd=recipe.parent).code == 0
    extended = warm.run(*arguments, "--resume", cwd=recipe.parent)
    assert (extended.code, extended.err) == (0, "")
    assert extended.out.splitlines()[0] == "tiny: resuming at round 5 of 9 rounds in run"
    assert everything(recipe.parent / "run") == everything(whole[ALL])
    assert "comm_round: 9" in (recipe.parent / "run" / "recipe.yaml").read_text()


def test_a_finished_run_keeps_its_results_until_more_rounds_are_there(warm: WarmServer, recipe: Path) -> None:
    """Whatever stops an extension before its first round has ended; and the recipe is that of the results."""
    words = ("run", "tiny.yaml", "--run-dir", "run", "--set")
    kept = [recipe.parent / "run" / name for name in ("results.json", "recipe.yaml")]
    assert warm.run(*words, "train_args.comm_round=1", cwd=recipe.parent).code == 0
    before = [path.read_bytes() for path in kept]
    extension = (*words, "train_args.comm_round=2", "--resume")
    stopped = warm.run(*extension, cwd=recipe.parent, **sabotage("training", 2, "SIGTERM"))
    assert stopped.err.endswith(
        "stopped. Finished rounds are kept in run. Resume with:\n"
        "  calfat run tiny.yaml --set train_args.comm_round=2 --resume --run-dir run\n"
    )
    assert [path.read_bytes() for path in kept] == before
    assert warm.run(*extension, cwd=recipe.parent, **sabotage("row", 2)).code == -9
    assert not kept[0].exists()
    assert "comm_round: 2" in kept[1].read_text()
    assert warm.run(*extension, cwd=recipe.parent).code == 0


def test_a_resumed_run_leaves_behind_what_an_uninterrupted_one_does(warm: WarmServer, recipe: Path) -> None:
    """Down to the bytes of checkpoints; a rate that makes accuracies rise and fall gives a best round in the middle."""
    words = (*SOME, "--set", "train_args.learning_rate=2.0", "--set", "train_args.comm_round=6")
    run, whole = (everything(each) for each in killed_and_resumed(warm, recipe.parent, "training", 6, *words))
    best = {found["round"] for found in whole["results.json"]["test_selected"].values()}  # type: ignore[index]
    assert min(best) < 6
    assert run == whole


def test_a_resumed_run_names_clients_by_the_rounds_behind_it(warm: WarmServer, recipe: Path) -> None:
    """The tenth round is the first with a median of ten; it is the first of the resumed process."""
    groups = "calfat.clients=[{ids: 0, attacker: {name: sign_flip, scale: 4}}]"
    split = "calfat.partition.seed=2021"
    words = ("run", "tiny.yaml", "--set", groups, "--set", split, "--run-dir", "run", "--set")
    assert warm.run(*words, "train_args.comm_round=9", cwd=recipe.parent).code == 0
    assert warm.run(*words, "train_args.comm_round=10", "--resume", cwd=recipe.parent).code == 0
    *before, last = read_rows(recipe.parent / "run" / "rounds.csv")
    assert not any("client 0" in row["alarms"] for row in before)
    assert "update of client 0 has the norm" in last["alarms"]
    assert (before[-1]["attackers_named"], last["attackers_named"]) == ("0.0", "1.0")
