"""Flower's engine with Ray: a whole run of `calfat run --host flower`, and what is left when something is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.flower.federation import METHODS, digest, trained_in_loops, written
from tests.flower.processes import MARK, TIMEOUT, bits, run_words, started_by, wait_for

CHANGES = (*METHODS["SCAFFOLD + FedPGD"], "calfat.flower.client_cpus=1")


def start(recipe: Path, directory: Path, *words: str) -> subprocess.Popen[str]:
    """A run in a process of its own, with a mark in its environment."""
    changes = [word for change in CHANGES for word in ("--set", change)]
    return subprocess.Popen(
        [sys.executable, *run_words(recipe, directory, *changes, *words)],
        **{"env": {**os.environ, MARK: str(directory)}, "text": True, "start_new_session": True},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )


def interrupt(process: subprocess.Popen[str]) -> str:
    """Ctrl-C as a terminal sends it, to the whole group; returns what the run says on standard error."""
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    return said


def test_a_run_on_flower(tmp_path: Path) -> None:
    recipe, experiment = written(tmp_path, CHANGES)
    directory = tmp_path / "run"
    process = start(recipe, directory, "--profile")
    _, said = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, said) == (0, "")
    wait_for(lambda: not started_by(directory))
    assert "deprecated" not in (directory / "log.txt").read_text()
    model, states = trained_in_loops(experiment)
    assert bits(directory) == digest(model)
    kept = load_checkpoint(directory / "checkpoints" / "last.safetensors")[0].client_states
    assert {client: digest(state) for client, state in kept.items()} == {
        client: digest(state) for client, state in states.items()
    }
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["host"] == "flower"
    assert "Flower 1.42" in (directory / "report.html").read_text()
    assert json.loads((directory / "profile.json").read_text())["parts"]


def called(name: str, directory: Path) -> list[psutil.Process]:
    """What the run has started under a name that begins so; a process may go while it is looked at."""
    found = []
    for each in started_by(directory):
        with suppress(psutil.Error):
            if each.name().startswith(name):
                found.append(each)
    return found


def killed_driver(directory: Path, process: subprocess.Popen[str]) -> None:
    process.kill()


def killed_workers(directory: Path, process: subprocess.Popen[str]) -> None:
    """Those that train, of which there are two: the run then says so and ends."""
    for each in called("ray::ClientApp", directory):
        with suppress(psutil.Error):
            each.kill()
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert "has not answered; Flower says: " in said
    assert "--resume" in said
    assert "Traceback" not in said


def interrupted(directory: Path, process: subprocess.Popen[str]) -> None:
    assert interrupt(process).startswith(f"stopped. Finished rounds are kept in {directory}. Resume with:\n")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("while_there_is", ["gcs_server", "ray::ClientAppActor.run"])
def test_ctrl_c_while_ray_starts_and_in_the_first_round_leaves_nothing(while_there_is: str, tmp_path: Path) -> None:
    recipe, _ = written(tmp_path, CHANGES)
    directory = tmp_path / "run"
    process = start(recipe, directory, "--set", "train_args.epochs=5000")  # no busy machine ends its round before
    wait_for(lambda: called(while_there_is, directory))
    assert interrupt(process) == "stopped. No round was finished, so nothing is kept.\n"
    wait_for(lambda: not started_by(directory))
    assert not directory.exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stop", [killed_driver, killed_workers, interrupted])
def test_a_run_that_is_stopped_leaves_nothing_and_resumes_to_the_same_bits(
    stop: Callable[[Path, subprocess.Popen[str]], None], tmp_path: Path
) -> None:
    longer = ("train_args.comm_round=12", "train_args.epochs=3")
    words = [word for change in longer for word in ("--set", change)]
    recipe, experiment = written(tmp_path, (*CHANGES, *longer))
    directory = tmp_path / "run"
    process = start(recipe, directory, *words)
    rounds = directory / "rounds.csv"
    wait_for(lambda: rounds.exists() and len(rounds.read_text().splitlines()) > 3)
    stop(directory, process)
    process.wait(TIMEOUT)
    wait_for(lambda: not started_by(directory))
    assert not (directory / "results.json").exists(), "it was too fast to be stopped"
    resumed = start(recipe, directory, *words, "--resume")
    _, said = resumed.communicate(timeout=TIMEOUT)
    assert (resumed.returncode, said) == (0, "")
    assert bits(directory) == digest(trained_in_loops(experiment)[0])
    assert len(rounds.read_text().splitlines()) == 13
    wait_for(lambda: not started_by(directory))
