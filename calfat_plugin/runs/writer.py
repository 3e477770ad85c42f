"""Writes a run directory while the run lasts: rows and checkpoints each round, results at the end."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from typing import Any

from calfat_plugin import __version__
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.results import RESULTS_FORMAT, RoundRecord, RunResult, evaluation_as_json
from calfat_plugin.runs.checkpoints import named_files, save_checkpoint
from calfat_plugin.runs.client_states import ClientStates
from calfat_plugin.runs.directory import CHECKPOINTS, RunDirectory
from calfat_plugin.runs.rounds import RoundsFile, alarms_of, read_rounds

NATURAL = "natural"
CONVENTIONS = {
    "accuracy": "share of examples whose final point is classified correctly (CalFAT release)",
    "accuracy_strict": "share classified correctly both clean and under attack",
}


class RunWriter:
    """Keeps a run directory up to date.

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
        self._rounds = RoundsFile(directory.rounds, labels, experiment.num_clients, experiment.metric_columns)
        robust = [label for label in labels if label != NATURAL]
        # The last attack of the list counts as the robust one: recipes list them from weak to strong.
        self._selectors = {"best-natural": NATURAL} if NATURAL in labels else {}
        if robust:
            self._selectors["best-robust"] = robust[-1]
        self.best: dict[str, Mapping[str, Any]] = dict(best or {})
        self.client_states = _client_states(directory, resume_from)

    def round_finished(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Row first, ``last`` checkpoint last: after a crash the row of an unfinished round is made again.

        Args:
            record: of the round.
            snapshot: at its end; with ``client_states`` of this writer where clients keep theirs in this process.
        """
        self._rounds.append(record)
        self.client_states.sync()
        for name, label in self._selectors.items():
            accuracy = record.accuracy(label)
            if accuracy is not None and accuracy > self.best.get(name, {}).get("accuracy", -1.0):
                self.best[name] = {"round": record.round, "evaluator": label, "accuracy": accuracy}
                split = self.experiment.recipe.data.monitored_split
                notes = {"selected_on": f"{split} split, {label} ({split}-selected)", **self.best[name]}
                self._save(name, snapshot, notes)
        self._save("last", snapshot, {"best": self.best})
        self.client_states.round = record.round + 1

    def _last_metrics(self) -> dict[str, dict[str, float | None]]:
        """``metrics``: the last round's numbers of trainer and aggregator; nothing where they have none."""
        names = [name for name in self.experiment.metric_columns if name.startswith(("train/", "server/"))]
        last = read_rounds(self.directory.rounds)[-1] if names and self.directory.rounds.exists() else {}
        found = {name: float(last[name]) for name in names if last.get(name)}
        return {"metrics": {n: value if math.isfinite(value) else None for n, value in found.items()}} if found else {}

    def _test_images_used(self) -> tuple[Alarm, ...]:
        """A finding where the aggregator looked at test images: accuracies on them are then no test."""
        if not self.experiment.aggregator.entry.uses_test_data:
            return ()
        text = (
            f"Aggregator '{self.experiment.aggregator.name}' looks at the test images of the monitor, so accuracies "
            "on them are test-selected and too high. Monitor a subset (calfat.monitor.max_examples) to bound how many."
        )
        return (Alarm("test-images-used", text, ()),)

    def _save(self, name: str, snapshot: Snapshot, notes: Mapping[str, Any]) -> None:
        save_checkpoint(self.directory.checkpoint(name), snapshot, notes)
        self.client_states.saved(name)

    def run_finished(self, result: RunResult) -> None:
        """Write ``results.json``; its presence says that the run is finished."""
        alarms = (*find_alarms(result.evaluations), *alarms_of(self.directory.rounds), *self._test_images_used())
        self.directory.write_json(
            self.directory.results,
            {
                "format": RESULTS_FORMAT,
                "recipe": self.experiment.recipe.name,
                "seed": self.experiment.seed,
                "trainer": self.experiment.trainer.name,
                "aggregator": self.experiment.aggregator.name,
                "rounds": result.num_rounds,
                "seconds": result.seconds,
                "model": "global model after the final round",
                "conventions": CONVENTIONS,
                "evaluations": [evaluation_as_json(evaluation) for evaluation in result.evaluations],
                **self._last_metrics(),
                "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
                f"{self.experiment.recipe.data.monitored_split}_selected": {
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
