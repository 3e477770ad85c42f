"""Stands in for ``calfat run``: same arguments, same files, same words, no training.

``$FAKE_RUN`` says how trainers behave, as JSON: ``{"fedpgd": "fail"}``. Accuracies follow from trainer and seed.
``$FAKE_BEST`` says which learning rate is the best of each, on the validation split: ``{"calfat": 0.05}``; and
``$FAKE_LIMIT`` beyond which one a run diverges, ``$FAKE_FULL`` beyond which one the disk is full.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from calfat_plugin.disk import write_json
from calfat_plugin.experiment import Experiment
from calfat_plugin.recipe import read_document
from calfat_plugin.results import EvaluationResult, RoundRecord
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import checked_experiment

ACCURACY = {"calfat": {"natural": 0.80, "pgd20": 0.40}, "fedpgd": {"natural": 0.60, "pgd20": 0.30}}
ERRORS = {
    "FAKE_LIMIT": "round 1: not one client delivered a usable update.",
    "FAKE_FULL": "rounds.csv: cannot be written (No space left on device). Make room.",
}
STEP = {"calfat": 0.02, "fedpgd": 0.01}  # what one seed more adds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--workers", default="no")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--no-page", action="store_true")
    parser.add_argument("--idle", action="store_true")
    words = parser.parse_args()
    experiment = checked_experiment(read_document(words.recipe), words.set, words.seed)
    trainer = experiment.trainer.name
    behaviour = json.loads(os.environ.get("FAKE_RUN", "{}")).get(trainer, "")
    directory = RunDirectory(words.run_dir)
    if words.resume:
        directory.check_same(experiment)
        directory.write_recipe(experiment)
        print(f"resuming with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    else:
        directory = RunDirectory.create(experiment, words.run_dir)
        workers = "" if words.workers == "no" else f" and {words.workers} workers"
        idle = " at the lowest priority" if words.idle else ""
        print(f"running with {os.environ['OMP_NUM_THREADS']} threads{workers}{idle}", flush=True)
    with directory.locked():
        _rounds(directory, experiment, behaviour)
        evaluations = [
            written(label, value + STEP[trainer] * words.seed)
            for label, value in ACCURACY[trainer].items()
            if label in [pick.label for pick in experiment.evaluators]
        ]
        write_json(directory.results, {"seconds": 1.5, "evaluations": evaluations})
        if not words.no_page:
            directory.page.touch()


def written(label: str, accuracy: float | None, **beside: object) -> dict[str, object]:
    """An evaluation as a results file has it."""
    shares = {"accuracy": accuracy, "accuracy_release": accuracy, "per_class": [], "per_class_release": []}
    rest = {"num_examples": 100, "settings": {}, "implementation": "nobody", "seconds": 1.0}
    return {"label": label, **shares, **rest, **beside}


def finished_round(round: int, accuracies: Mapping[str, float], guess: float | None = None) -> RoundRecord:
    """The record of a round with these monitored accuracies, and one client."""
    evaluations = {
        label: EvaluationResult(label, 100, accuracy, accuracy, (), (), {}, "nobody", 0.1, guess=guess)
        for label, accuracy in accuracies.items()
    }
    return RoundRecord(round, (0,), {}, {0: 1.0}, {0: 1.0}, 0.0, evaluations, 0.5, 0, 0)


def _rounds(directory: RunDirectory, experiment: Experiment, behaviour: str) -> None:
    rounds = experiment.num_rounds
    if behaviour == "fail":
        if not directory.last_checkpoint.exists():  # no round was finished
            directory.discard()
        print("error: the data set is missing. Do something.\nA hint.", file=sys.stderr)
        sys.exit(2)
    rate = experiment.train.learning_rate
    for variable, error in ERRORS.items():
        if rate > float(os.environ.get(variable, "inf")):
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    best = json.loads(os.environ.get("FAKE_BEST", "{}")).get(experiment.trainer.name, rate)
    monitored = [pick.label for pick in experiment.monitor.evaluators]
    if behaviour == "boast":
        print("round 7/9  loss 1.0  ETA 0:01", flush=True)
    file = directory.rounds_file(experiment)
    file.rewrite([])
    for round in range(1, rounds + 1):
        value = 0.5 - abs(math.log2(rate / best)) / 10
        accuracies = {label: value + 0.1 * place for place, label in enumerate(monitored)}
        file.append(finished_round(round, accuracies))
        directory.last_checkpoint.touch()
        print(f"round {round:>3}/{rounds}  loss 1.0  0.1 s  ETA 0:0{rounds - round}", flush=True)
        if behaviour == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "crash":
            raise RuntimeError("two lines\nof words")
        if behaviour in ("wait", "deaf"):
            time.sleep(60)
        while behaviour == "slow":
            time.sleep(0.1)
            print("in round 1: batch after batch", flush=True)
