"""Common parts of the tests of methods: losses on given logits, a client's training, a whole federation in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from calfat_plugin import testing
from calfat_plugin.datasets import Dataset
from calfat_plugin.entries import AggregatorEntry, ModifierEntry, TrainerEntry
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.interfaces import (
    ActiveCorrection,
    AggregationTask,
    Aggregator,
    AttackBatch,
    ClientLoss,
    LocalCorrection,
    LocalTask,
    LocalTrainer,
    TrainBatch,
    TrainSettings,
)
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.results import LocalUpdate
from calfat_plugin.testing.federation import TinyFederation
from calfat_plugin.testing.tiny import CPU as CPU
from calfat_plugin.testing.tiny import SETTINGS as SETTINGS
from calfat_plugin.trainers.base import AdversarialTrainer

# What the tests of plugins have, too, under the names that these tests use.
TinyNet, same_bits = testing.TinyModel, testing.same_bits
tiny_data, local_task = testing.tiny_images, testing.tiny_task

# The batch of docs/methods.md 16: clean and adversarial logits of a batch of two, labels, class counts, one row f.
Z_NAT = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.2, -0.3, 1.5, 0.1]])
Z_ADV = torch.tensor([[0.5, 2.5, 0.0, -0.5], [0.6, 0.1, 0.4, 0.3]])
Y = torch.tensor([0, 2])
COUNTS = torch.tensor([50, 30, 20, 0])
F = torch.tensor([[1.0, 2.0, 0.5, -1.0]])


registry = cache(testing.builtin_registry)


def build_modifier(name: str, **options: Any) -> Any:
    entry, _ = registry().find(ModifierEntry, name)
    return entry.load()(entry.config(**options))


def build_method(name: str, loss: str = "plain", loss_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A method with its modifier, options checked by nobody."""
    entry, _ = registry().find(TrainerEntry, name)
    return entry.load()(entry.config(**options), build_modifier(loss, **(loss_options or {})))


def build_aggregator(name: str, **options: Any) -> Aggregator:
    entry, _ = registry().find(AggregatorEntry, name)
    aggregator: Aggregator = entry.load()(entry.config(**options))
    return aggregator


# --- losses on given logits -------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """A model whose logits are a table: image i (its one pixel says i) has row i."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[x.flatten().long()]


def images(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).view(-1, 1, 1, 1)


def train_batch(
    loss: ClientLoss,
    *,
    y: Tensor = Y,
    attacked: Sequence[bool] | None = None,
    kappa: Sequence[int] | None = None,
    task: LocalTask | None = None,
) -> TrainBatch:
    """The batch whose clean logits are Z_NAT and whose adversarial logits are Z_ADV (clean where not attacked)."""
    count = len(Z_NAT)
    rows = [index + (count if attacked is None or attacked[index] else 0) for index in range(count)]
    return TrainBatch(
        Lookup(torch.cat([Z_NAT, Z_ADV])),
        images(*range(count)),
        images(*rows),
        y,
        loss,
        task or local_task(),
        attacked=None if attacked is None else torch.tensor(attacked),
        kappa=None if kappa is None else torch.tensor(kappa),
    )


def attack_batch(loss: ClientLoss) -> AttackBatch:
    """The batch of an attack whose clean logits are Z_NAT and whose running logits are Z_ADV."""
    batch = AttackBatch(Lookup(Z_NAT), images(0, 1), Y, loss)
    batch.logits_adv = Z_ADV.clone().requires_grad_()
    return batch


# --- one client -------------------------------------------------------------------------------------------------------


def watched(method: Any, see: Callable[[TrainBatch], object]) -> Any:
    """The method, with ``see`` called for each mini-batch before its loss."""

    class Watched(type(method)):  # type: ignore[misc]  # the class under test
        def train_loss(self, batch: TrainBatch) -> Tensor:
            see(batch)
            found: Tensor = super().train_loss(batch)
            return found

    return Watched(method.options, method.modifier)


class Asking(LocalCorrection, ActiveCorrection):
    """Wants the gradient of the whole local loss, and keeps what it is given."""

    wants_full_gradient = True

    def __init__(self) -> None:
        self.gradients: list[Mapping[str, Tensor]] = []

    def begin(self, task: LocalTask) -> ActiveCorrection:
        return self

    def take_full_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        self.gradients.append({name: tensor.clone() for name, tensor in gradient.items()})


def train(method: LocalTrainer, task: LocalTask) -> LocalUpdate:
    """The method's real local training on its own copy of the architecture."""
    return method.fit(dataclasses.replace(task, model=method.adapt_model(task.model)))


# --- an aggregator with clients that need no data ---------------------------------------------------------------------


class GivenLoss(AdversarialTrainer):
    """A "method" for toys: the loss is a function of (client, model)."""

    attacks = False

    def __init__(self, loss: Any) -> None:
        super().__init__(None, build_modifier("plain"))
        self.loss = loss

    def train_loss(self, batch: TrainBatch) -> Tensor:
        value: Tensor = self.loss(batch.task.client, batch.model)
        return value


class ToyFederation:
    """Clients and server around one aggregator, all clients in each round, messages handed over as they are."""

    def __init__(
        self, method: LocalTrainer, aggregator: Aggregator, model: nn.Module, settings: TrainSettings, data: Any
    ) -> None:
        """data: client id to ImageData."""
        self.method, self.aggregator, self.model, self.settings, self.data = method, aggregator, model, settings, data
        self.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.server_state: Mapping[str, Tensor] = {}
        self.broadcast: Mapping[str, Tensor] = {}
        self.kept: dict[int, Mapping[str, Tensor]] = {client: {} for client in data}
        self.updates: dict[int, LocalUpdate] = {}
        self.round = 0

    def play(self) -> None:
        """One round."""
        self.round += 1
        for client, data in self.data.items():
            self.model.load_state_dict(self.state)
            task = local_task(
                self.model,
                data,
                settings=self.settings,
                correction=self.aggregator.correction(),
                client=client,
                round=self.round,
                client_state=self.kept[client],
                broadcast=self.broadcast,
            )
            self.updates[client] = self.method.fit(task)
            self.kept[client] = self.updates[client].client_state
        aggregate = self.aggregator.combine(
            AggregationTask(
                global_state=self.state,
                updates=self.updates,
                server_state=self.server_state,
                parameter_names=[name for name, _ in self.model.named_parameters()],
                num_clients=len(self.data),
                round=self.round,
            )
        )
        self.state, self.server_state = dict(aggregate.state), aggregate.server_state
        self.broadcast = aggregate.broadcast


# --- a whole federation on digits, without the host -------------------------------------------------------------------

RECIPE = """
data_args: {dataset: digits}
model_args: {model: "calfat_plugin.testing.tiny:build_tiny_model"}
train_args: {client_num_in_total: 3, comm_round: 2, batch_size: 16, learning_rate: 0.05}
calfat:
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural]
  monitor: {every: 1000, evaluators: [natural]}
"""


def experiment(trainer: Any, aggregator: Any = "fedavg", **settings: Any) -> Experiment:
    """The recipe above with these plugins; ``settings``: dotted keys, dots written as ``__``."""
    document = parse_document(RECIPE, "test.yaml").with_value(("calfat", "trainer"), trainer, "test.yaml:1")
    document = document.with_value(("calfat", "aggregator"), aggregator, "test.yaml:2")
    for key, value in settings.items():
        document = document.with_value(tuple(key.split("__")), value, f"--set {key.replace('__', '.')}={value}")
    return assemble(document, registry())


@cache
def small_digits() -> Dataset:
    """Ninety training and twenty test images."""
    dataset: Dataset = experiment("fedpgd").load_dataset()
    return dataclasses.replace(
        dataset, train=dataset.train.subset(list(range(90))), test=dataset.test.subset(list(range(20)))
    )


class Federation(TinyFederation):
    """Server and worker of an experiment on :func:`small_digits` in this process."""

    def __init__(self, experiment: Experiment, snapshot: Snapshot | None = None) -> None:
        super().__init__(experiment, snapshot, small_digits())


def tasks_of(federation: Federation) -> dict[int, LocalTask]:
    """Play a round: what each client was given to train."""
    tasks: dict[int, LocalTask] = {}

    def noted(fit: Callable[[LocalTask], LocalUpdate], task: LocalTask) -> LocalUpdate:
        tasks[task.client] = task
        return fit(task)

    clients = range(federation.server.experiment.num_clients)
    for trainer in {federation.worker._training_of(client).trainer for client in clients}:
        trainer.fit = partial(noted, trainer.fit)
    federation.play()
    return tasks
