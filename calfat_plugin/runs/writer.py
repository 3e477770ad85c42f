"""Writes a run directory while the run lasts: rows and checkpoints each round, results at the end."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from calfat_plugin.disk import put_in_place, reporting_disk_errors, write_json
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.evaluators.base import STEP_SIZE
from calfat_plugin.evaluators.evidence import read_evidence
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.outliers import alarms_of
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import EVIDENCE, NATURAL, RESULTS_FORMAT, RoundRecord, RunResult
from calfat_plugin.rounds import read_rounds
from calfat_plugin.rounds_csv import columns_of
from calfat_plugin.run_files import Partition, Results, Selected
from calfat_plugin.runs.checkpoints import ClientStates, Named, named_files, write_checkpoint
from calfat_plugin.runs.directory import CHECKPOINTS, RECIPE, RunDirectory
from calfat_plugin.typed_json import read_typed
from calfat_plugin.version import __version__

CONVENTIONS = {
    "accuracy": "share of examples that are classified correctly both clean and under attack",
    "accuracy_release": "share whose final point is classified correctly, whatever the clean image (CalFAT release)",
}


class RunWriter:
    """Keeps a run directory up to date. A context manager, which waits at its end for the round that is under way.

    A round is written at once, but forced to disk and put in its place in a thread, while the next one trains: so the
    rounds do not wait for the disk, and at most the last of them is made again after a crash.
    """

    def __init__(
        self,
        directory: RunDirectory,
        experiment: Experiment,
        best: Mapping[str, Mapping[str, Any]] | None = None,
        resume_from: Snapshot | None = None,
    ) -> None:
        self.directory, self.experiment = directory, experiment
        self._rounds = directory.rounds_file(experiment)
        self._selectors = {}  # name of each best checkpoint to the label of the evaluator that selects it
        if NATURAL in experiment.monitor.labels:
            self._selectors["best-natural"] = NATURAL
        if experiment.selecting_label not in (None, NATURAL):
            self._selectors["best-robust"] = experiment.selecting_label
        self.best: dict[str, Mapping[str, Any]] = dict(best or {})
        done, checkpoints = 0, {}
        if resume_from is not None:
            done = resume_from.round
            checkpoints = {name: named_files(directory.checkpoint(name)) for name in CHECKPOINTS}
        self.client_states = ClientStates(directory.client_states, checkpoints, done + 1)
        self._recipe_digest = directory.recipe_digest
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        #: A round on its way to the disk: its end, the checkpoints, and the files of client states that they name.
        self._under_way: tuple[Future[None], list[str], Named] | None = None

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._disk:
            self.settle()

    def round_finished(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Record first, ``last`` checkpoint last: after a crash the record of an unfinished round is made again."""
        self.settle()
        self._rounds.append(record)
        split = self.experiment.data.monitored_split
        without_models = dataclasses.replace(snapshot, client_models={})  # the final evaluation is of ``last``
        checkpoints = []
        for name, label in self._selectors.items():
            accuracy = record.accuracy(label)
            best_before = self.best.get(name, {}).get("accuracy", -1.0)
            if accuracy is not None and accuracy > best_before:
                self.best[name] = {"round": record.round, "evaluator": label, "accuracy": accuracy}
                selected_on = f"{split} split, {label} ({split}-selected)"
                notes = {RECIPE: self._recipe_digest, "selected_on": selected_on, **self.best[name]}
                write_checkpoint(self.directory.checkpoint(name), without_models, notes)
                checkpoints.append(name)
        write_checkpoint(self.directory.last_checkpoint, snapshot, {RECIPE: self._recipe_digest, "best": self.best})
        checkpoints.append("last")
        states = self.client_states
        done = self._disk.submit(self._put_in_place, checkpoints, states.take_written())
        self._under_way = done, checkpoints, dict(states.named)
        states.round = record.round + 1
        if record.round == self.experiment.num_rounds or record.stop is not None:  # what follows may take hours
            self.settle()

    def settle(self) -> None:
        """Wait until the round that was written last is on disk, and remove the clients' states that it replaces."""
        if self._under_way is not None:
            done, checkpoints, named = self._under_way
            wait([done])  # Ctrl-C may end this, but not the round that is under way
            self._under_way = None
            done.result()
            self.client_states.saved(checkpoints, named)

    def _put_in_place(self, checkpoints: list[str], states: list[Path]) -> None:
        """What waits for the disk; in a thread of its own, which touches nothing but files."""
        paths = [self.directory.checkpoint(name) for name in checkpoints]
        with reporting_disk_errors(paths[-1]):
            put_in_place(paths, also=[*self._rounds.paths, self.directory.path, *states])

    def run_finished(self, result: RunResult, scratch: Path | None = None) -> None:
        """Write ``results.json``; its presence says that the run is finished.

        Args:
            result: of the whole run.
            scratch: where its final evaluation has left its evidence; None: in ``evaluation/``.
        """
        experiment = self.experiment
        records = read_rounds(self.directory.rounds)
        partition = read_typed(Partition, self.directory.partition) or Partition()
        model = "global model" if experiment.ema is None else "moving average of the global models"
        model += " after the final round"
        if result.stop is not None:
            model += f", with which training stopped early: round {result.stop.round}"
        selected = {}
        for name, facts in self.best.items():
            path = self.directory.checkpoint(name).relative_to(self.directory.path)
            selected[name] = Selected(facts["evaluator"], facts["accuracy"], facts["round"], str(path))
        is_validated = experiment.data.monitored_split == "validation"
        alarms = [*find_alarms(result.evaluations, partition.class_names), *alarms_of(records)]
        results = Results(
            format=RESULTS_FORMAT,
            recipe=experiment.name,
            seed=experiment.seed,
            trainer=experiment.trainer.name,
            aggregator=experiment.aggregator.name,
            rounds=result.num_rounds,
            seconds=result.seconds,
            stopped_early=result.stop,
            model=model,
            conventions=CONVENTIONS,
            evaluations=result.evaluations,
            evidence=self._moved_evidence((scratch or self.directory.evaluation) / EVIDENCE),
            metrics=metrics_of(experiment, records),
            alarms=(*alarms, *_alarms_of_recipe(experiment)),
            test_selected=None if is_validated else selected,
            validation_selected=selected if is_validated else None,
            calfat_plugin=__version__,
            citations=experiment.citations(),
        )
        write_json(self.directory.results, results.as_json())
        shutil.rmtree(self.directory.evaluation, ignore_errors=True)  # only now is it of no use

    def _moved_evidence(self, collected: Path) -> tuple[Mapping[str, Any], ...]:
        """Move the file of evidence to its place; return what ``results.json`` says of it, nothing without a file."""
        if not collected.exists():
            return ()
        about = {"file": EVIDENCE, **read_evidence(collected).as_json()}
        with reporting_disk_errors(self.directory.evidence):
            collected.replace(self.directory.evidence)
        return (about,)


def metrics_of(experiment: Experiment, records: Sequence[RoundRecord]) -> dict[str, float]:
    """The numbers of the rounds' columns that ``results.json`` has; of the last round, or of all together."""
    labels = experiment.monitor.labels
    of_evaluators = tuple(f"{label}/" for label in labels)  # the final evaluation has its own
    metrics: dict[str, float] = {}
    for column in columns_of(labels, metrics=experiment.metric_columns):
        if not column.in_results or column.name.startswith(of_evaluators):
            continue
        counting = records[-1:]
        if column.in_results == "sum":
            counting = records
        values = [column.value_in(record) for record in counting]
        if values and None not in values:  # a client of a plugin need not say
            metrics[column.name] = float(sum(values))
    return metrics


def _alarms_of_recipe(experiment: Experiment) -> list[Alarm]:
    """What the recipe alone says about the numbers."""
    alarms = []
    if experiment.aggregator.entry.uses_monitored_data and experiment.data.monitored_split == "test":
        text = (
            f"Aggregator '{experiment.aggregator.name}' looks at the test images of the monitor, so accuracies "
            "on them are test-selected and too high. Monitor a subset (calfat.monitor.max_examples) to bound how "
            "many."
        )
        alarms.append(Alarm("test-images-used", text, ()))
    for problem, training in experiment.training_step_problems.items():
        alarms.append(Alarm(STEP_SIZE, f"{', '.join(whose for _, whose in training)}: {problem}", ()))
    return alarms
