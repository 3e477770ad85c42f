"""What the tests of Flower share: recipes, a reference in plain loops, and a grid without an engine."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server
from calfat_plugin.federation.worker import Worker, shards_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe import read_document
from calfat_plugin.results import State
from calfat_plugin.runs.request import checked_experiment

RECIPE = """\
common_args: {host: flower, random_seed: 0}
data_args: {dataset: digits, partition_method: dirichlet, partition_alpha: 0.5, max_train_examples: 400}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 5, client_num_per_round: 3, comm_round: 4, batch_size: 64, learning_rate: 0.05}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: eps, steps: 1}
  evaluators: [natural]
  monitor: {evaluators: [natural], max_examples: 100}
  runtime: {threads: 1}
"""
PLAIN = "calfat.trainer.preset=null"
METHODS: Mapping[str, tuple[str, ...]] = {
    "CalFAT": (),
    "all clients": ("train_args.client_num_per_round=5", "train_args.comm_round=2"),
    "FedRBN": ("calfat.trainer={name: fedrbn, at_fraction: 0.5}",),
    "SCAFFOLD + FedPGD": ("calfat.trainer=fedpgd", "calfat.aggregator=scaffold"),
    "SFAT": (PLAIN, "calfat.trainer=fedpgd", "calfat.aggregator=sfat"),
    "long tail": (
        *("data_args.partition_method=longtail", PLAIN, "calfat.aggregator=scaffold"),
        "calfat.threat.by_class={warmup: 0.5}",
        "calfat.clients=[{share: 0.6, threat: {inner: sora, by_class: null}}]",
    ),
    "groups": (
        "calfat.aggregator={name: trimmed_mean, f: 1}",
        "calfat.clients=[{ids: 0, trainer: {name: fedpgd, loss: logitadj}, epochs: 2}, "
        "{smallest: 1, threat: {eps: 0.05}}, {share: 0.3, attacker: alie}]",
    ),
}


def written(folder: Path, changes: Iterable[str] = ()) -> tuple[Path, Experiment]:
    """The recipe in a file, and the experiment with these changes."""
    recipe = folder / "r.yaml"
    recipe.write_text(RECIPE)
    return recipe, checked_experiment(read_document(recipe), changes)


def write_app(folder: Path, recipe: Path, changes: Iterable[str] = ()) -> None:
    """A copy of the example with a recipe, which writes its runs beside it."""
    shutil.copytree(Path(__file__).parents[2] / "examples" / "flower_app", folder)
    data = read_document(recipe).with_overrides(changes).data
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**data, "calfat": {"name": recipe.stem, **data["calfat"]}}))
    project = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project.replace("~/calfat-runs", f"{folder}-runs"))


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def parties(experiment: Experiment) -> tuple[Server, Worker]:
    """A server and a worker for any client, in this process."""
    device, dataset = torch.device("cpu"), experiment.load_dataset()
    shards = shards_of(experiment, dataset, device)
    server = Server(experiment, dataset, device, RunObserver())
    server.begin(None)
    return server, Worker(experiment, dataset, shards, device, RunObserver())


def trained_in_loops(experiment: Experiment) -> tuple[State, dict[int, State]]:
    """The final global model, and what clients keep, without any host."""
    server, worker = parties(experiment)
    for round in range(1, experiment.num_rounds + 1):
        clients = server.start_round(round)
        wires = {client: worker.fit(client, round, server.downlink()) for client in clients}
        server.finish_round(round, {client: (worker.num_examples(client), wire) for client, wire in wires.items()})
    return server.state, dict(worker.client_states)


class MemoryGrid(Grid):  # type: ignore[misc]
    """Nodes that answer at once, in this process.

    Args:
        app: of every node.
        nodes: node id to node config.
        comes_later: how often the grid is asked for its nodes before the last one is there.
        spoils: changes an answer on its way.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        comes_later: int = 0,
        spoils: Callable[[Message], Message] = lambda reply: reply,
    ) -> None:
        self._app, self._spoils, self._left = app, spoils, comes_later
        self._contexts = {
            node: Context(run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={})
            for node, config in nodes.items()
        }
        self._numbers, self._replies = count(1), dict[str, Message]()
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    run = property(lambda self: None)

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        self._left -= 1
        return list(self._contexts)[: None if self._left < 0 else -1]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = []
        for message in messages:
            sent.append(f"message-{next(self._numbers)}")
            message.metadata.__dict__["_message_id"] = sent[-1]
            reply = self._app(message, self._contexts[message.metadata.dst_node_id])
            self._replies[sent[-1]] = self._spoils(reply)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(found) for found in message_ids if found in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))
