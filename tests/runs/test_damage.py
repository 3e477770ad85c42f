"""Damaged run directories: every command names the file and what to do, and a digest finds what looks sound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from calfat_plugin.errors import RunError
from calfat_plugin.experiment.differences import unchanging_digest
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import checked_experiment
from calfat_plugin.tensor_files import read_tensors, write_tensors
from tests.runs.processes import RECIPE, WarmServer, sabotage

ROUNDS = ("--set", "train_args.comm_round=3")
RESUME = ("run", "tiny.yaml", *ROUNDS, "--run-dir", "run", "--resume")
REPORT = ("report", "run")
ATTACK = ("attack", "run", "--attacks", "natural", "--examples", "5", "--plain")
RESTORE = "Restore it from a copy, or remove it and make it again."
AGAIN = "Restore it from a copy, or start the run again in another directory."
FILE_AGAIN = "Restore the file from a copy, or start the run again in another directory."
LAST = "checkpoints/last.safetensors"


@pytest.fixture(scope="module")
def stopped(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was killed in its final evaluation, and one with the same run finished."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "tiny.yaml").write_text(RECIPE)
    arguments = ("run", "tiny.yaml", *ROUNDS, "--run-dir", "run")
    assert warm.run(*arguments, cwd=folder, **sabotage("evaluation", 3)).code == -9
    shutil.copytree(folder, folder / "finished")
    assert warm.run(*RESUME, cwd=folder / "finished").code == 0
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def replaced(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def flipped(path: Path) -> None:
    """Three bytes near the end: tensors in a checkpoint, text in the others."""
    content = bytearray(path.read_bytes())
    for place in (-9, -40, -60):
        content[place] ^= 0x91
    path.write_bytes(content)


def shortened(path: Path) -> None:
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, last.rpartition(",")[0], ""]))


def cut_short(path: Path) -> None:
    """At the end of a line, so that it is still good YAML."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))


def misspelt(path: Path) -> None:
    path.write_text(path.read_text().replace('{"round": 2, "clients": [', '{"round": 2, "clients": ["x", '))


def deeply_nested(path: Path) -> None:
    path.write_bytes(save({"weight": torch.zeros(1)}, {"calfat": "[" * 100_000}))


def a_list(path: Path) -> None:
    path.write_text("[]")


def linked_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE: list[tuple[tuple[str, ...], str, Callable[[Path], None], str]] = [
    (RESUME, LAST, truncated, "the checkpoint cannot be read ("),
    (RESUME, LAST, replaced, "the checkpoint cannot be read ("),
    (RESUME, LAST, deeply_nested, "the checkpoint cannot be read (maximum recursion depth exceeded "),
    (RESUME, LAST, flipped, f"the file is damaged: its content is not what was written (SHA-256). {AGAIN}\n"),
    (ATTACK, LAST, flipped, f"the file is damaged: its content is not what was written (SHA-256). {AGAIN}\n"),
    (RESUME, LAST, Path.unlink, f"no such checkpoint, but this run has finished 3 rounds. {AGAIN}\n"),
    (RESUME, "rounds.jsonl", shortened, "line 3 is damaged (Expecting ',' delimiter: "),
    (RESUME, "rounds.jsonl", misspelt, "line 2 is damaged (clients[0] is 'x' (text), expected a whole number). Res"),
    (RESUME, "rounds.jsonl", flipped, "cannot be read ('utf-8' codec can't decode byte "),
    (RESUME, "rounds.jsonl", replaced, f"cannot be read (Is a directory). {FILE_AGAIN}\n"),
    (RESUME, "rounds.jsonl", Path.unlink, "no such file, but there is rounds.csv. This version needs rounds.jsonl,"),
    *((RESUME, "rounds.jsonl", how, "the lines of rounds 1 to 3, which the checkpoint continues from, are not all")
      for how in (emptied, cut_short)),
    (RESUME, "partition.json", truncated, "cannot be read ("),
    (RESUME, "partition.json", replaced, f"cannot be read (Is a directory). {RESTORE}\n"),
    (RESUME, "environment.json", replaced, "cannot be written (Is a directory). Make room, or choose another --run-"),
    (RESUME, "log.txt", replaced, "cannot be used (Is a directory). Check this path and its permissions.\n"),
    (RESUME, "recipe.yaml", replaced, "this is a directory, expected a recipe file.\n"),
    (RESUME, "recipe.yaml", emptied, "the file is empty. Start from a recipe in recipes/, such as calfat_digits"),
    (REPORT, "partition.json", a_list, f"holds no JSON mapping; it was changed by hand. {RESTORE}\n"),
    (REPORT, "environment.json", linked_to_itself, f"cannot be read (Too many levels of symbolic links). {RESTORE}\n"),
    (REPORT, "results.json", replaced, f"cannot be read (Is a directory). {RESTORE}\n"),
    (ATTACK, "recipe.yaml", cut_short, "the file is cut short: its last line is missing. Restore it from a copy.\n"),
    (RESUME, "recipe.yaml", cut_short, "the file is cut short: its last line is missing. Restore it from a copy.\n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "name", "damage", "complaint"),
    [
        pytest.param(
            *case, marks=pytest.mark.slow if case[0] == ATTACK else (), id=f"{case[0][0]} {case[1]} {case[2].__name__}"
        )
        for case in DAMAGE
    ],
)
def test_a_damaged_file_is_named(
    warm: WarmServer, folder: Path, command: tuple[str, ...], name: str, damage: Callable[[Path], None], complaint: str
) -> None:
    damage(folder / "run" / name)
    done = warm.run(*command, cwd=folder, WITHOUT_REPORT="")
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    where, found, _ = done.err.partition(f"{name}:")
    assert found, done.err
    assert where.startswith(("error: ", "warning: "))
    assert f"{name}: {complaint}" in done.err


@pytest.mark.parametrize("at", range(0, 100, 9))
def test_no_flipped_bit_of_a_checkpoint_gets_through(folder: Path, at: int) -> None:
    """Wherever it is: in the header, in the notes or in the tensors."""
    path = folder / "run" / LAST
    content = bytearray(path.read_bytes())
    content[at * len(content) // 100 + 5] ^= 0b100
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"last\.safetensors: (the|not a) (checkpoint|file)"):
        load_checkpoint(path)


def signed(path: Path, **changes: Any) -> None:
    """Change what a checkpoint says of itself, with a digest that fits."""
    tensors, facts = read_tensors(path)
    del facts["sha256"]
    write_tensors(path, tensors, {**facts, **changes})


OTHER = "is of another run: it was made with another recipe or seed than run/recipe.yaml has"


@pytest.mark.parametrize(
    ("command", "changes", "complaint"),
    [
        (RESUME, {"notes": {"recipe": "0" * 64}}, OTHER),
        (ATTACK, {"notes": {"recipe": "0" * 64}}, OTHER),
        (ATTACK, {"notes": {}}, OTHER),
        (RESUME, {"round": 1}, "is of round 1, but run/rounds.jsonl has 3 rounds; expected 1, or 2 after a crash"),
        (ATTACK, {"round": 4}, "is of round 4, but run/rounds.jsonl has 3 rounds"),
        (RESUME, {"round": 0}, "the checkpoint cannot be read (it is of round 0, and the first round is 1)"),
        (RESUME, {"round": True}, "the checkpoint cannot be read (True is no number of a round or a client)"),
        (RESUME, {"notes": []}, "the checkpoint cannot be read (its notes are [], expected a mapping)"),
        (
            RESUME,
            {"notes": {"best": [1]}},
            "the checkpoint cannot be read (its best rounds are [1], expected a mapping)",
        ),
        (
            RESUME,
            {"notes": {"best": {"best-natural": 3}}},
            "the checkpoint cannot be read (its best round of best-natu",
        ),
        (RESUME, {"clients": ["a"]}, "the checkpoint cannot be read ('a' is no number of a round or a client)"),
    ],
)
def test_a_checkpoint_that_is_none_of_this_run_is_refused(
    warm: WarmServer, folder: Path, command: tuple[str, ...], changes: dict[str, Any], complaint: str
) -> None:
    """Its digest fits, so nothing is damaged; but who goes on from it has a model of neither run."""
    signed(folder / "run" / LAST, **changes)
    done = warm.run(*command, cwd=folder, WITHOUT_REPORT="")
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert done.err.startswith(f"error: run/{LAST}: {complaint}"), done.err


def test_a_checkpoint_of_another_seed_is_of_another_run(tmp_path: Path) -> None:
    """Not so one of a run in another place, on another host, or with more rounds: those may be continued."""
    first = RunDirectory.create(checked_experiment(parse_document(RECIPE, "tiny.yaml")), tmp_path / "first")
    assert first.recipe_digest is not None
    same = {"train_args.comm_round": 20, "common_args.host": "flower", "data_args.data_cache_dir": "elsewhere"}
    other = {"common_args.random_seed": 1, "train_args.learning_rate": 0.123, "calfat.trainer": "standard"}
    for number, (key, value) in enumerate({**same, **other}.items()):
        document = parse_document(RECIPE, "tiny.yaml").with_overrides([f"{key}={value}"])
        run = RunDirectory.create(checked_experiment(document), tmp_path / str(number))
        assert (run.recipe_digest == first.recipe_digest) == (key in same), key
    schedules = []
    for rounds in (9, 20):
        sets = [f"train_args.comm_round={rounds}", "train_args.lr_schedule=cosine"]
        document = parse_document(RECIPE, "tiny.yaml").with_overrides(sets)
        schedules.append(unchanging_digest(checked_experiment(document).as_run()))
    assert schedules[0] != schedules[1]  # every round goes by the number of rounds


def test_a_reopened_run_keeps_the_digest_that_its_checkpoints_name(tmp_path: Path) -> None:
    """Also where this version would give the recipe another one, as after a new default."""
    recipe = checked_experiment(parse_document(RECIPE, "tiny.yaml"))
    run = RunDirectory.create(recipe, tmp_path / "run")
    of_older_version = "0" * 64
    run.write_recipe(recipe, of_older_version)
    run.reopen(recipe)
    assert run.recipe_digest == of_older_version


def test_a_resumed_run_names_in_its_checkpoints_what_it_was_started_with(warm: WarmServer, folder: Path) -> None:
    run = RunDirectory(folder / "run")
    before = run.recipe_digest
    more = ("--set", "train_args.comm_round=4")
    assert warm.run("run", "tiny.yaml", *more, "--run-dir", "run", "--resume", cwd=folder).code == 0
    assert run.recipe_digest == before is not None
    for name in ("last", "best-natural"):
        assert load_checkpoint(run.checkpoint(name))[1]["recipe"] == before


def test_an_environment_that_cannot_be_read_is_reported_and_made_again(warm: WarmServer, folder: Path) -> None:
    (folder / "run" / "environment.json").write_text("[]")
    done = warm.run(*RESUME, cwd=folder)
    assert (done.code, done.err) == (
        0,
        "warning: run/environment.json: holds no JSON mapping; it was changed by hand. "
        f"{RESTORE} What it said of earlier processes is lost.\n",
    )
    assert json.loads((folder / "run" / "environment.json").read_text())["earlier"] == []
