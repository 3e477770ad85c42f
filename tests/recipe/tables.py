"""The tables of bad recipes beside this file: a row is a name, an edit or groups, and how the error begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GOOD = """\
common_args: {training_type: simulation, random_seed: 0}
data_args: {dataset: digits, partition_method: dirichlet, partition_alpha: 0.1}
model_args: {model: cnn_small}
train_args:
  client_num_in_total: 5
  client_num_per_round: 5
  comm_round: 40
  epochs: 1
  batch_size: 64
  learning_rate: 0.05
device_args: {using_gpu: false}
comm_args: {backend: sp}
calfat:
  trainer: {name: calfat, preset: release}
  aggregator: {name: fedavg, weights: uniform}
  threat: {norm: linf, eps: 0.1, step_size: 0.025, steps: 10}
  evaluators: [natural, pgd20]
  monitor: {every: 1, evaluators: [natural]}
"""
SAID_OF_GOOD = (
    "r.yaml: good. calfat with fedavg on digits (dirichlet), cnn_small: 5 clients, 5 a round, 40 rounds, seed 0, "
    "on FedML.\n"
)


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    name: str
    edit: str
    expected: str

    @property
    def recipe(self) -> str:
        """The good recipe, edited."""
        return edited(self.edit.partition("$")[0])

    @property
    def arguments(self) -> list[str]:
        """Of the command."""
        return [word for argument in self.edit.split("$ ")[1:] for word in argument.strip().split(" ", 1)]


def rows(file: str) -> list[Row]:
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return [Row(*line.split(" | ")) for line in lines if line.count(" | ") == 2 and not line.startswith("Bad")]


def edited(edit: str) -> str:
    """The good recipe after ``old -> new``, where a backslash and n begin a line."""
    old, _, new = edit.strip().replace(r"\n", "\n").partition(" ->")
    assert not old or GOOD.count(old) == 1, f"'{old}' does not stand there once"
    return GOOD.replace(old, new.strip(" "), 1) if old else GOOD
