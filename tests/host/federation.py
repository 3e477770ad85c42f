"""Small experiments through the host's own simulator, in this process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.worker import shards_of
from calfat_plugin.host.simulation import simulate
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult, RoundRecord

CPU = torch.device("cpu")

RECIPE = """
data_args: {dataset: digits, partition_method: iid}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 5, comm_round: 2, batch_size: 64, learning_rate: 0.05}
calfat:
  trainer: fedpgd
  threat: {eps: 0.1, step_size: 0.1, steps: 1}
  evaluators: [natural]
  monitor: {evaluators: [natural]}
"""


def experiment(*plugins: Any, **values: Any) -> Experiment:
    """The recipe above with these plugins and values; dots in a key are written as ``__``."""
    document = parse_document(RECIPE, "test.yaml")
    for key, value in values.items():
        document = document.with_value(tuple(key.split("__")), value, f"--set {key.replace('__', '.')}={value}")
    return assemble(document, Registry.load(entry_points=False, plugins=plugins))


@dataclass
class Ran:
    """What came out of :func:`run`."""

    records: list[RoundRecord] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    evaluations: tuple[EvaluationResult, ...] = ()


def run(
    experiment: Experiment, observer: RunObserver | None = None, resume_from: Snapshot | None = None, examples: int = 80
) -> Ran:
    """Run an experiment on a few examples."""
    dataset = experiment.load_dataset()
    dataset = dataclasses.replace(
        dataset, train=dataset.train.subset(range(examples)), test=dataset.test.subset(range(20))
    )
    ran = Ran()

    def on_round(record: RoundRecord, snapshot: Snapshot) -> None:
        ran.records.append(record)
        ran.snapshots.append(dataclasses.replace(snapshot, client_states=dict(snapshot.client_states)))

    server = Server(experiment, dataset, CPU, observer or RunObserver())
    server.begin(resume_from)
    states = {} if resume_from is None else dict(resume_from.client_states)
    ran.evaluations = simulate(ServerTask(server, on_round, shards_of(experiment, dataset, CPU), states))
    return ran
