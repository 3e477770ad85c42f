"""Writes a run directory while the run lasts: rows and checkpoints each round, results at the end."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calfat_plugin import __version__
from calfat_plugin.disk import put_in_place, reporting_disk_errors
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import EvaluationResult, RoundRecord, RunResult
from calfat_plugin.runs.checkpoints import named_files, write_checkpoint
from calfat_plugin.runs.client_states import ClientStates, Named
from calfat_plugin.runs.directory import CHECKPOINTS, RunDirectory
from calfat_plugin.runs.rounds import RoundsFile, alarms_of

NATURAL = "natural"
CONVENTIONS = {
    "accuracy": "share of examples whose final point is classified correctly (CalFAT release)",
    "accuracy_strict": "share classified correctly both clean and under attack",
}


class _UnderWay(NamedTuple):
    """A round on its way to the disk: its end, the checkpoints, and the files of client states that they name."""

    done: Future[None]
    checkpoints: list[str]
    named: Named


class RunWriter:
    """Keeps a run directory up to date. A context manager, which waits at its end for the round that is under way.

    A round is written at once, but forced to disk and put in its place in a thread, while the next one trains: so the
    rounds do not wait for the disk, and at most the last of them is made again after a crash.

    Args:
        directory: where.
        experiment: what runs.
        best: notes of the checkpoint that the run resumes from: which rounds were best so far.
        resume_from: the snapshot of that checkpoint.

    Attributes:
        client_states: what clients keep, for the runtime to read and to change.
    """

    def __init__(
        self,
        directory: RunDirectory,
        experiment: Experiment,
        best: Mapping[str, Mapping[str, Any]] | None = None,
        resume_from: Snapshot | None = None,
    ) -> None:
        self.directory, self.experiment = directory, experiment
        labels = [pick.label for pick in experiment.monitor_evaluators]
        self._rounds = RoundsFile(directory.rounds, labels, experiment.num_clients)
        robust = [label for label in labels if label != NATURAL]
        # The last attack of the list counts as the robust one: recipes list them from weak to strong.
        self._selectors = {"best-natural": NATURAL} if NATURAL in labels else {}
        if robust:
            self._selectors["best-robust"] = robust[-1]
        self.best: dict[str, Mapping[str, Any]] = dict(best or {})
        self.client_states = _client_states(directory, resume_from)
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: _UnderWay | None = None

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._disk:
            self.settle()

    def round_finished(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Row first, ``last`` checkpoint last: after a crash the row of an unfinished round is made again.

        Args:
            record: of the round.
            snapshot: at its end; with ``client_states`` of this writer where clients keep theirs in this process.

        Raises:
            RunError: the disk refuses this round, or refused the one before.
        """
        self.settle()
        self._rounds.append(record)
        checkpoints = {**self._selected(record), "last": {"best": self.best}}
        for name, notes in checkpoints.items():
            write_checkpoint(self.directory.checkpoint(name), snapshot, notes)
        states = self.client_states
        done = self._disk.submit(self._put_in_place, [*checkpoints], states.take_written())
        self._under_way = _UnderWay(done, [*checkpoints], dict(states.named))
        states.round = record.round + 1
        if record.round == self.experiment.num_rounds:  # what follows may take hours
            self.settle()

    def settle(self) -> None:
        """Wait until the round that was written last is on disk, and remove the clients' states that it replaces.

        Raises:
            RunError: the disk refused it.
        """
        if self._under_way is not None:
            done, checkpoints, named = self._under_way
            wait([done])  # Ctrl-C may end this, but not the round that is under way
            self._under_way = None
            done.result()
            self.client_states.saved(checkpoints, named)

    def _selected(self, record: RoundRecord) -> dict[str, dict[str, Any]]:
        """Name of each checkpoint whose best round is this one, to its notes."""
        better = {}
        for name, label in self._selectors.items():
            accuracy = record.accuracy(label)
            if accuracy is not None and accuracy > self.best.get(name, {}).get("accuracy", -1.0):
                self.best[name] = {"round": record.round, "evaluator": label, "accuracy": accuracy}
                better[name] = {"selected_on": f"test split, {label} (test-selected)", **self.best[name]}
        return better

    def _put_in_place(self, checkpoints: list[str], states: list[Path]) -> None:
        """What waits for the disk; in a thread of its own, which touches nothing but files."""
        paths = [self.directory.checkpoint(name) for name in checkpoints]
        with reporting_disk_errors(paths[-1]):
            put_in_place(paths, also=[self.directory.rounds, self.directory.path, *states])

    def run_finished(self, result: RunResult) -> None:
        """Write ``results.json``; its presence says that the run is finished."""
        alarms = (*find_alarms(result.evaluations), *alarms_of(self.directory.rounds))
        self.directory.write_json(
            self.directory.results,
            {
                "recipe": self.experiment.recipe.name,
                "seed": self.experiment.seed,
                "trainer": self.experiment.trainer.name,
                "aggregator": self.experiment.aggregator.name,
                "rounds": result.num_rounds,
                "seconds": result.seconds,
                "model": "global model after the final round",
                "conventions": CONVENTIONS,
                "evaluations": [evaluation_as_json(evaluation) for evaluation in result.evaluations],
                "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
                "test_selected": {
                    name: dict(facts, checkpoint=str(self.directory.checkpoint(name).relative_to(self.directory.path)))
                    for name, facts in self.best.items()
                },
                "calfat_plugin": __version__,
                "citations": [dataclasses.asdict(citation) for citation in self.experiment.citations()],
            },
        )
        shutil.rmtree(self.directory.evaluation, ignore_errors=True)  # only now is it of no use


def _client_states(directory: RunDirectory, resume_from: Snapshot | None) -> ClientStates:
    """The states at the end of the round to continue from; files that a killed process left are removed."""
    done, kept = (0, {}) if resume_from is None else (resume_from.round, resume_from.client_states)
    checkpoints = {name: named_files(directory.checkpoint(name)) for name in CHECKPOINTS} if done else {}
    states = ClientStates(directory.client_states, checkpoints, done)
    for client in kept.keys() - states.keys():  # a checkpoint of format 1 has them within
        states[client] = kept[client]
    states.round = done + 1
    return states


def evaluation_as_json(evaluation: EvaluationResult) -> dict[str, Any]:
    """A result, ready for strict JSON: nan and infinity, which JSON lacks, become null.

    Raises:
        RunError: naming evaluator and key, when an evaluator hands over something that JSON cannot hold.
    """
    return {
        field.name: _as_json(getattr(evaluation, field.name), f"evaluator '{evaluation.label}': {field.name}")
        for field in dataclasses.fields(evaluation)
    }


def _as_json(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(
        f"{where} is a {type(value).__name__}, which results.json cannot hold; expected numbers, texts, lists and "
        "mappings of them. Fix it in the plugin: the run can be resumed for its final evaluation."
    )
