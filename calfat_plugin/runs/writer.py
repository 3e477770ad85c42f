"""Writes a run directory while the run lasts: rows and checkpoints each round, results at the end."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from calfat_plugin.disk import put_in_place, read_json, reporting_disk_errors, write_json
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.evaluators.base import STEP_SIZE
from calfat_plugin.evaluators.evidence_file import read_evidence
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.outliers import alarms_of
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import EVIDENCE, NATURAL, RESULTS_FORMAT, RoundRecord, RunResult, evaluation_as_json
from calfat_plugin.rounds import read_rounds
from calfat_plugin.rounds_csv import columns_of
from calfat_plugin.runs.checkpoints import ClientStates, Named, named_files, write_checkpoint
from calfat_plugin.runs.directory import CHECKPOINTS, RECIPE, RunDirectory
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
        labels = [pick.label for pick in experiment.monitor.evaluators]
        self._selectors = {"best-natural": NATURAL} if NATURAL in labels else {}
        if experiment.selecting_label not in (None, NATURAL):
            self._selectors["best-robust"] = experiment.selecting_label
        self.best: dict[str, Mapping[str, Any]] = dict(best or {})
        done = 0 if resume_from is None else resume_from.round
        checkpoints = {name: named_files(directory.checkpoint(name)) for name in CHECKPOINTS} if done else {}
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
        checkpoints = {**self._selected(record), "last": {"best": self.best}}
        for name, notes in checkpoints.items():
            kept = snapshot if name == "last" else dataclasses.replace(snapshot, client_models={})
            write_checkpoint(self.directory.checkpoint(name), kept, {RECIPE: self._recipe_digest, **notes})
        states = self.client_states
        done = self._disk.submit(self._put_in_place, [*checkpoints], states.take_written())
        self._under_way = done, [*checkpoints], dict(states.named)
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

    def _selected(self, record: RoundRecord) -> dict[str, dict[str, Any]]:
        """Name of each checkpoint whose best round is this one, to its notes."""
        better = {}
        for name, label in self._selectors.items():
            accuracy = record.accuracy(label)
            if accuracy is not None and accuracy > self.best.get(name, {}).get("accuracy", -1.0):
                self.best[name] = {"round": record.round, "evaluator": label, "accuracy": accuracy}
                split = self.experiment.data.monitored_split
                better[name] = {"selected_on": f"{split} split, {label} ({split}-selected)", **self.best[name]}
        return better

    def _put_in_place(self, checkpoints: list[str], states: list[Path]) -> None:
        """What waits for the disk; in a thread of its own, which touches nothing but files."""
        paths = [self.directory.checkpoint(name) for name in checkpoints]
        with reporting_disk_errors(paths[-1]):
            put_in_place(paths, also=[*self._rounds.paths, self.directory.path, *states])

    def _metrics(self) -> dict[str, float | None]:
        """The numbers of the rounds' columns that ``results.json`` has; of the last round, or of all together."""
        records = read_rounds(self.directory.rounds)
        labels = [pick.label for pick in self.experiment.monitor.evaluators]
        of_evaluators = tuple(f"{label}/" for label in labels)  # the final evaluation has its own
        metrics: dict[str, float | None] = {}
        for column in columns_of(labels, metrics=self.experiment.metric_columns):
            if not column.in_results or column.name.startswith(of_evaluators):
                continue
            counting = records if column.in_results == "sum" else records[-1:]
            values = [column.value_in(record) for record in counting]
            if values and None not in values:  # an aggregator of a plugin need not say
                total = float(sum(values))
                metrics[column.name] = total if math.isfinite(total) else None
        return metrics

    def run_finished(self, result: RunResult, scratch: Path | None = None) -> None:
        """Write ``results.json``; its presence says that the run is finished.

        Args:
            result: of the whole run.
            scratch: where its final evaluation has left its evidence; None: in ``evaluation/``.
        """
        experiment = self.experiment
        model = "global model" if experiment.ema is None else "moving average of the global models"
        class_names = read_json(self.directory.partition).get("class_names") or ()
        stopped: dict[str, Any] = {}
        model = f"{model} after the final round"
        if result.stop is not None:
            model = f"{model}, with which training stopped early: round {result.stop.round}"
            stopped = {"stopped_early": dataclasses.asdict(result.stop)}
        alarms = [*find_alarms(result.evaluations, class_names), *alarms_of(read_rounds(self.directory.rounds))]
        if experiment.aggregator.entry.uses_monitored_data and experiment.data.monitored_split == "test":
            text = (
                f"Aggregator '{experiment.aggregator.name}' looks at the test images of the monitor, so accuracies "
                "on them are test-selected and too high. Monitor a subset (calfat.monitor.max_examples) to bound how "
                "many."
            )
            alarms.append(Alarm("test-images-used", text, ()))
        for problem, training in experiment.training_step_problems.items():
            alarms.append(Alarm(STEP_SIZE, f"{', '.join(whose for _, whose in training)}: {problem}", ()))
        kept = (scratch or self.directory.evaluation) / EVIDENCE
        evidence = {}
        if kept.exists():
            evidence = {"evidence": [{"file": EVIDENCE, **read_evidence(kept).as_json()}]}
            with reporting_disk_errors(self.directory.evidence):
                kept.replace(self.directory.evidence)
        write_json(
            self.directory.results,
            {
                "format": RESULTS_FORMAT,
                "recipe": experiment.name,
                "seed": experiment.seed,
                "trainer": experiment.trainer.name,
                "aggregator": experiment.aggregator.name,
                "rounds": result.num_rounds,
                "seconds": result.seconds,
                **stopped,
                "model": model,
                "conventions": CONVENTIONS,
                "evaluations": [evaluation_as_json(evaluation) for evaluation in result.evaluations],
                **evidence,
                "metrics": self._metrics(),
                "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
                f"{experiment.data.monitored_split}_selected": {
                    name: dict(facts, checkpoint=str(self.directory.checkpoint(name).relative_to(self.directory.path)))
                    for name, facts in self.best.items()
                },
                "calfat_plugin": __version__,
                "citations": [dataclasses.asdict(citation) for citation in experiment.citations()],
            },
        )
        shutil.rmtree(self.directory.evaluation, ignore_errors=True)  # only now is it of no use
