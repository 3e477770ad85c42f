"""CalFAT: what the presets say, and whole local trainings by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.interfaces import LocalTask, TrainSettings
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.calfat import CalFAT
from tests.methods.helpers import build_method, local_task, registry


def preset(name: str, dataset: str = "cifar10", **options: Any) -> Experiment:
    """The shortest recipe that names a preset."""
    document = parse_document("calfat: {trainer: {name: calfat}}", "short.yaml")
    for path, value in (
        (("data_args", "dataset"), dataset),
        (("calfat", "trainer"), {"name": "calfat", "preset": name, **options}),
    ):
        document = document.with_value(path, value, "test")
    return assemble(document, registry())


PAPER = {"prior": "frequencies", "prior_weight": 1.0, "scale": 1.0, "delta": 1e-6}
RELEASE = {"prior": "counts", "prior_weight": 0.1, "scale": 10.0}


@pytest.mark.parametrize(
    ("name", "losses", "partition", "weights"),
    [
        ("paper", PAPER, "dirichlet_plain", "examples"),
        ("release", RELEASE, "dirichlet", "uniform"),
        ("repro", PAPER, "dirichlet", "uniform"),
    ],
)
def test_presets(name: str, losses: dict[str, Any], partition: str, weights: str) -> None:
    experiment = preset(name)
    options = experiment.trainer.options
    assert {key: getattr(options, key) for key in losses} == losses
    assert (options.outer, options.inner, options.adv_ratio, options.start_noise) == ("calibrated", "ckl", 1.0, 1e-3)
    assert (experiment.partition.name, experiment.data.partition_alpha) == (partition, 0.1)
    assert (experiment.aggregator.name, experiment.aggregator.options.weights) == ("fedavg", weights)
    train = experiment.train
    assert (train.client_num_in_total, experiment.clients_per_round, train.comm_round) == (5, 5, 150)
    assert (train.epochs, train.batch_size, train.learning_rate, train.momentum) == (1, 128, 0.01, 0.9)
    threat = experiment.threat
    assert (threat.norm, str(threat.eps), str(threat.step_size), threat.steps) == ("linf", "8/255", "2/255", 10)
    assert experiment.model.name == "cnn"
    assert any("CalFAT" in citation.text for citation in experiment.citations())


@pytest.mark.parametrize(
    ("dataset", "weight_decay"), [("cifar10", 2e-3), ("cifar100", 2e-3), ("svhn", 2e-4), ("digits", 2e-4)]
)
def test_weight_decay_follows_the_release(dataset: str, weight_decay: float) -> None:
    """The release compares with "cifar10", which is also how "cifar100" begins."""
    assert preset("release", dataset).train.weight_decay == weight_decay


def test_what_the_recipe_says_wins_over_the_preset() -> None:
    document = parse_document(
        "train_args: {learning_rate: 0.5}\ncalfat: {trainer: {name: calfat, preset: release, scale: 3}}", "own.yaml"
    )
    experiment = assemble(document, registry())
    assert experiment.train.learning_rate == 0.5
    assert experiment.train.momentum == 0.9
    assert (experiment.trainer.options.scale, experiment.trainer.options.prior) == (3.0, "counts")


def test_repro_lets_the_losses_be_chosen() -> None:
    options = preset("repro", parameterisation="release").trainer.options
    assert {key: getattr(options, key) for key in RELEASE} == RELEASE


# --- by hand ----------------------------------------------------------------------------------------------------------

X = np.array([[0.4, 0.7], [0.9, 0.2]])
LABELS = np.array([0, 1])
COUNTS = np.array([30, 10, 0])  # class 2 is missing on this client
W = np.array([[1.0, -2.0], [-1.0, 1.0], [0.5, 0.5]])
NOISE = np.array([[1e-3, -2e-3], [5e-4, 1e-3]])
EPS, STEP, STEPS = 0.1, 0.04, 4
RATE, MOMENTUM, DECAY, EPOCHS = 0.1, 0.9, 0.01, 3


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def by_hand(log_prior: np.ndarray, k: float, s: float) -> tuple[np.ndarray, np.ndarray, float]:
    """(weights, last adversarial examples, last loss) of a linear model after the local training, in float64."""
    weights, velocity = W.copy(), np.zeros_like(W)
    x_adv, loss = X, np.nan
    for _ in range(EPOCHS):
        p = softmax(X @ weights.T + k * log_prior)  # the clean branch, constant in x'
        x_adv = X + NOISE
        for _ in range(STEPS):
            q = softmax(x_adv @ weights.T + k * log_prior)
            x_adv = x_adv + STEP * np.sign((q - p) @ weights)  # gradient of KL(p || q)
            x_adv = np.clip(np.clip(x_adv, X - EPS, X + EPS), 0, 1)
        q = softmax(s * (x_adv @ weights.T + k * log_prior))
        loss = -np.log(q[np.arange(2), LABELS]).mean()
        gradient = s * (q - np.eye(3)[LABELS]).T @ x_adv / 2 + DECAY * weights
        velocity = MOMENTUM * velocity + gradient
        weights = weights - RATE * velocity
    return weights, x_adv, loss


@pytest.mark.parametrize(
    ("parameterisation", "log_prior", "k", "s"),
    [
        ("paper", np.log(COUNTS / 40 + 1e-6), 1.0, 1.0),
        ("release", np.log(np.array([30, 10, 1]) + 1e-7), 0.1, 10.0),
    ],
)
def test_a_local_training_by_hand(parameterisation: str, log_prior: np.ndarray, k: float, s: float) -> None:
    crafted: list[Tensor] = []

    class Repeatable(CalFAT):
        """The noise goes by example, whatever order the loader gives."""

        def start(self, x_nat: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
            return x_nat + torch.tensor(NOISE, dtype=torch.float32)[self.rows(x_nat)].view_as(x_nat)

        def train_loss(self, batch: Any) -> Tensor:
            crafted.append(batch.x_adv.flatten(1)[self.rows(batch.x_nat).argsort()])
            return super().train_loss(batch)

        @staticmethod
        def rows(x_nat: Tensor) -> Tensor:
            return (x_nat.flatten(1)[:, 0] > 0.5).long()

    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor(W))
    method = build_method("calfat", parameterisation=parameterisation)
    task = local_task(
        model,
        ImageData(torch.tensor(X, dtype=torch.float32).view(2, 1, 1, 2), torch.tensor(LABELS)),
        settings=TrainSettings(EPOCHS, 2, RATE, MOMENTUM, DECAY, 150),
        threat=ThreatModel(eps="0.1", step_size="0.04", steps=STEPS),
        class_counts=torch.tensor(COUNTS),
    )
    update = Repeatable(method.options, method.modifier).fit(task)
    weights, x_adv, loss = by_hand(log_prior, k, s)
    assert update.state["1.weight"].numpy() == pytest.approx(weights, abs=1e-5)
    assert crafted[-1].numpy() == pytest.approx(x_adv, abs=1e-6)
    assert update.metrics["loss"] == pytest.approx(loss, abs=1e-5)


def test_the_two_parameterisations_are_one_loss_of_scaled_logits() -> None:
    """methods.md 3.3: the release's outer loss is the paper's on ten times the logits, a missing class counted once."""
    counts, logits, y = torch.tensor(COUNTS), torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), 2
    release = build_method("calfat", parameterisation="release").bind_loss(counts)
    paper = build_method("calfat", delta=1e-12).bind_loss(torch.tensor([30, 10, 1]))
    labels = torch.full((50,), y)
    assert torch.allclose(release.cross_entropy(logits, labels), paper.cross_entropy(10 * logits, labels), atol=1e-4)


def test_evaluation_sees_raw_logits() -> None:
    """The prior belongs to training: the model itself is not changed."""
    model = nn.Linear(2, 3)
    assert build_method("calfat", parameterisation="release").adapt_model(model) is model
