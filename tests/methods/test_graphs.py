"""Local training in captured graphs has the bits of training without them, for every method and correction.

On the CPU, with the stand-in of ``tests/maths/stand_in.py`` for torch's graphs.
"""

from __future__ import annotations

import dataclasses
import logging
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation import measurements, server
from calfat_plugin.federation.server import Server
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.maths.graphs import Graphs
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import EvaluationResult, LocalUpdate
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import AttackBatch, TrainBatch
from tests.maths.stand_in import Cuda, cuda  # noqa: F401 (a fixture)
from tests.methods.helpers import (
    CPU,
    SETTINGS,
    TinyNet,
    build_aggregator,
    build_method,
    build_modifier,
    experiment,
    local_task,
    same_bits,
    small_digits,
    tiny_data,
)
from tests.methods.test_no_waiting import CORRECTIONS, METHODS

TWICE = dataclasses.replace(SETTINGS, epochs=2)  # batches of 4, 4 and 2: so each shape comes more than once
ST: dict[str, Any] = {"roles": "st at", "pnc_warmup": 0}  # of FedRBN: this client attacks nothing


def normalised() -> TinyNet:
    net = TinyNet()
    net.body = nn.Sequential(net.body[0], nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    return net


def fit(method: Any, graphs: Graphs | None, **more: Any) -> LocalUpdate:
    task: LocalTask = local_task(method.adapt_model(normalised()), settings=TWICE, round=100, graphs=graphs, **more)
    update: LocalUpdate = method.fit(task)
    return update


def alike(first: LocalUpdate, second: LocalUpdate) -> bool:
    return (
        same_bits(first.state, second.state)
        and same_bits(first.extras, second.extras)
        and same_bits(first.client_state, second.client_state)
        and first.metrics == second.metrics
    )


@pytest.mark.parametrize(("name", "options"), [*METHODS, ("mixfat", {}), ("fedrbn", ST)])
def test_every_method_has_the_same_bits(name: str, options: dict[str, Any], cuda: Cuda) -> None:  # noqa: F811
    method = build_method(name, **options)
    assert alike(fit(method, Graphs(CPU)), fit(method, None))
    # The attack and the step, in two shapes each, replayed 3 times and once.
    kinds = 0 if name == "fedlat" else 1 if name == "standard" or options == ST else 2
    assert (len(cuda.graphs), cuda.replays) == (2 * kinds, 4 * kinds)


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
def test_every_correction_has_the_same_bits(name: str, options: dict[str, Any], cuda: Cuda) -> None:  # noqa: F811
    method = build_method("fedpgd")
    updates = [
        fit(method, graphs, correction=build_aggregator(name, **options).correction()) for graphs in (Graphs(CPU), None)
    ]
    assert alike(*updates)
    assert cuda.replays >= 8


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipped_steps_have_the_same_bits(optimizer: str, cuda: Cuda) -> None:  # noqa: F811
    """Clipping writes into the gradients that a graph wrote."""
    method = build_method("fedpgd")
    settings = dataclasses.replace(TWICE, client_optimizer=optimizer, max_grad_norm=0.1)
    first, second = (
        method.fit(local_task(normalised(), settings=settings, graphs=graphs)) for graphs in (Graphs(CPU), None)
    )
    assert alike(first, second)
    assert cuda.replays == 8
    assert not alike(first, fit(method, None))


def test_clients_and_rounds_share_a_run(cuda: Cuda) -> None:  # noqa: F811
    """Other weights, another class prior, another round: none of it is what the graph before had."""
    method, graphs = build_method("fedgairat", start_round=2), Graphs(CPU)
    calibrated = build_method("calfat", parameterisation="release")
    for round in (1, 2):
        for counts in ([10, 0, 0, 0], [1, 2, 3, 4]):
            for trained in (method, calibrated):
                task = local_task(round=round, settings=TWICE, class_counts=torch.tensor(counts))
                task = dataclasses.replace(task, model=TinyNet(seed=round))
                found = trained.fit(dataclasses.replace(task, graphs=graphs))
                assert alike(found, trained.fit(dataclasses.replace(task, model=TinyNet(seed=round))))
    assert len(cuda.graphs) == 8 * 4


def test_bfloat16_has_the_same_bits(cuda: Cuda) -> None:  # noqa: F811
    method = build_method("fedtrades")
    assert alike(fit(method, Graphs(CPU), precision="bf16"), fit(method, None, precision="bf16"))
    assert cuda.replays == 8


class Somebodys(AdversarialTrainer):
    """A third party's method, without a line about graphs."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__(None, build_modifier("plain"))
        self.looks, self.calls = looks, 0

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        self.calls += 1
        loss = super().attack_loss(batch)
        return loss * (1 if not self.looks or float(loss.detach()) > -1 else 2)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.calls += 1
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


def test_a_third_partys_method_gets_graphs_without_a_line(
    cuda: Cuda,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    method, eager, looking = Somebodys(), Somebodys(), Somebodys(looks=True)
    expected = fit(eager, None)
    assert alike(fit(method, Graphs(CPU)), expected)
    assert (eager.calls, method.calls) == (6 * 4, 7 * 4)  # steps of the attack and one; captured, replayed, compared
    caplog.set_level(logging.INFO, logger="calfat_plugin.maths.graphs")
    before = cuda.replays
    assert alike(fit(looking, Graphs(CPU)), expected)
    assert cuda.replays - before == 4  # of the step
    assert [record.getMessage() for record in caplog.records] == [
        f"no CUDA graph of the attack of ({count}, 1, 4, 4): aten._local_scalar_dense.default waits for a value of the "
        "GPU"
        for count in (4, 2)
    ]


def test_dropout_is_drawn_anew_in_every_step(
    cuda: Cuda,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the attack it is off, and the attack is captured."""
    caplog.set_level(logging.INFO, logger="calfat_plugin.maths.graphs")
    method, updates = build_method("fedpgd"), []
    for graphs in (Graphs(CPU), None):
        net = TinyNet()
        net.classifier = nn.Sequential(nn.Dropout(0.5), net.classifier)
        torch.manual_seed(0)
        updates.append(method.fit(local_task(net, settings=TWICE, graphs=graphs)))
    assert alike(*updates)
    assert cuda.replays == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"no CUDA graph of the training step of ({count}, 1, 4, 4): it draws random numbers" for count in (4, 2)
    ]


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        PGDOptions(steps=3),
        *(PGDOptions(steps=3, norm=norm, eps=Fraction(1, 2), step_size=Fraction(1, 5)) for norm in ("l2", "l1")),
    ],
)
def test_an_evaluation_has_the_same_verdicts_and_counts(
    options: PGDOptions,
    cuda: Cuda,  # noqa: F811
) -> None:
    model, points = normalised().eval(), []
    for graphs in (Graphs(CPU), None):
        points.append(measured(model, PGD(options), graphs))
    (first, where), (second, expected) = points
    assert torch.equal(where, expected)
    assert (first.per_class, first.details) == (second.per_class, second.details)
    assert cuda.replays == 1  # batches of 4, 4 and 2


def test_restarts_have_the_same_points(cuda: Cuda) -> None:  # noqa: F811
    model, options = normalised().eval(), PGDOptions(steps=2, restarts=3)
    (first, where), (second, expected) = (measured(model, PGD(options), graphs) for graphs in (Graphs(CPU), None))
    assert torch.equal(where, expected)
    assert (first.per_class, first.details) == (second.per_class, second.details)
    assert cuda.replays > 0


def measured(model: nn.Module, attack: PGD, graphs: Graphs | None) -> tuple[EvaluationResult, Tensor]:
    """The result, and all points in order."""
    points: list[Tensor] = []
    found = measure(
        model,
        tiny_data(),
        [("pgd", attack)],
        num_classes=4,
        threat=ThreatModel(eps="0.1", step_size="0.04"),
        batch_size=4,
        device=CPU,
        seed=0,
        graphs=graphs,
        on_examples=lambda where, x_adv: points.append(x_adv.clone()),
    )
    return found["pgd"], torch.cat(points)


# --- who has graphs ---------------------------------------------------------------------------------------------------


def worker_on(asked: Experiment, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Graphs | None:
    """What its trainer is handed."""
    handed: list[LocalTask] = []

    def fit(task: LocalTask) -> LocalUpdate:
        handed.append(task)
        return LocalUpdate({name: tensor.cpu() for name, tensor in task.model.state_dict().items()}, 1)

    monkeypatch.setattr(nn.Module, "to", lambda module, where: module)
    dataset = small_digits()
    worker = Worker(asked, dataset, {0: dataset.train}, device, RunObserver())
    monkeypatch.setattr(worker._trainer, "fit", fit)
    state = worker._model.state_dict()
    for _ in range(2):
        worker.fit(0, 1, dict(state))
    first, second = (task.graphs for task in handed)
    assert first is second  # one for the run
    return first


def evaluated_with(asked: Experiment, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Graphs | None:
    """What a server's evaluation is handed."""
    handed: list[Graphs | None] = []
    monkeypatch.setattr(nn.Module, "to", lambda module, where: module)
    monkeypatch.setattr(Tensor, "to", lambda tensor, where: tensor)
    monkeypatch.setattr(measurements, "measure", lambda *given, graphs, **more: handed.append(graphs) or {})
    monkeypatch.setattr(server, "PeakMemory", lambda device: None)
    held = Server(asked, small_digits(), device, RunObserver())
    for _ in range(2):
        held.final_evaluation()
    assert handed[0] is handed[1]  # one for the run
    return handed[0]


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("never", "cuda:0", False), ("auto", "cuda:0", True), ("always", "cuda:0", True)],
)
def test_worker_and_server_hand_them_on(
    setting: str,
    device: str,
    expected: bool,
    cuda: Cuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="calfat_plugin.federation.worker")
    asked = experiment("fedpgd", calfat__runtime={"cuda_graphs": setting})
    assert (evaluated_with(asked, torch.device(device), monkeypatch) is not None) == expected
    found = worker_on(asked, torch.device(device), monkeypatch)
    assert (found is not None) == expected
    text = ", in CUDA graphs where their shapes repeat" if expected else ""
    assert [record.getMessage() for record in caplog.records] == [f"clients train in fp32 on {device}{text}"]
