"""The package's own runs, through FedML's round loop, equal the plain federation of ``federation.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from calfat_plugin.datasets import Dataset
from calfat_plugin.datasets.data import Augmentation
from calfat_plugin.datasets.published import load_digits
from calfat_plugin.entries import AggregatorEntry, TrainerEntry
from calfat_plugin.experiment import assemble
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.worker import shards_of
from calfat_plugin.host.simulation import simulate
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult, RoundRecord
from tests.reference.client import Setting
from tests.reference.federation import ROBUST, Federation

CPU = torch.device("cpu")
VARIATE = "scaffold/c/"
RECIPE = """
data_args: {dataset: digits, partition_method: dirichlet, partition_alpha: 0.3}
model_args: {model: "tests.reference.models:Tiny"}
train_args: {client_num_in_total: 5, client_num_per_round: 3, comm_round: 3, epochs: 2, batch_size: 16,
             learning_rate: 0.05, momentum: 0.9, weight_decay: 1.0e-3}
calfat:
  partition: {seed: 2021}
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural]
  monitor: {every: 1000, evaluators: [natural]}
"""

# What is off until a later round is on from the second of the three.
METHODS: dict[str, dict[str, Any]] = {
    "standard": {},
    "mixfat": {},
    "fedpgd": {},
    "fedtrades": {},
    "fedmart": {},
    "fedgairat": {"start_round": 2},
    "fedrbn": {"roles": "at st at st at", "pnc_warmup": 1},
    "calfat": {},
    "fedawp": {"warmup": 1},
    "fedlat": {"clean_rounds": 1},
}
AGGREGATORS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "scaffold": {},
    "sfat": {},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "median": {},
    "trimmed_mean": {},
    "krum": {"f": 0},
    "multi_krum": {"f": 0, "m": None},
    "bulyan": {"f": 0},
    "geometric_median": {},
    "centered_clipping": {},
    "norm_clipping": {},
}
CONFLICTS = [("standard", "sfat"), ("fedrbn", "sfat")]
GRID = [
    (method, mix) for method in METHODS for mix in AGGREGATORS if (method, mix) not in CONFLICTS and mix not in ROBUST
]
# Each method once, each aggregator at least once, and what the grid's options leave out.
QUICK = [
    ("standard", "fedavg"),
    ("mixfat", "fedprox"),
    ("fedpgd", "scaffold"),
    ("fedtrades", "sfat"),
    ("fedmart", "fedadam"),
    ("fedgairat", "fedyogi"),
    ("fedrbn", "fedavg"),
    ("calfat", "fedadagrad"),
    ("fedawp", "fedavg"),
    ("fedlat", "fedavg"),
    *(("fedpgd", rule) for rule in ROBUST),
]
VARIANTS = [
    Setting("calfat", "fedavg", {"parameterisation": "release"}, {"weights": "uniform"}),
    Setting("mixfat", "scaffold", {"sampling": "fixed"}, {"variant": "I", "pairing": "gradient", "server_lr": 0.5}),
    Setting("fedrbn", "scaffold", METHODS["fedrbn"], {"pairing": "gradient"}),
    Setting("fedrbn", "fedavg", METHODS["fedrbn"], seed=101),  # a round of at clients alone, then an st client
]


@dataclass
class Ran:
    """What came out of :func:`runs`."""

    rounds: list[tuple[RoundRecord, Snapshot]] = field(default_factory=list)
    evaluations: tuple[EvaluationResult, ...] = ()


@cache
def digits() -> Dataset:
    """The first 143 training digits, cropped and mirrored in training, and 60 test digits.

    Two of the five clients have 33 of them: a last batch of one example, which joins the one before it.
    """
    whole = load_digits()
    train, test = whole.train.subset(range(143)), whole.test.subset(range(60))
    return dataclasses.replace(whole, train=train, test=test, augment=Augmentation(crop_padding=1, flip=True))


def runs(setting: Setting, changes: Mapping[str, Any] | None = None) -> Ran:
    """What the package makes of a setting; ``changes``: dotted keys of the recipe and their values."""
    values = {
        "common_args.random_seed": setting.seed,
        "calfat.trainer": {"name": setting.method, **setting.how},
        "calfat.aggregator": {"name": setting.aggregator, **setting.mix},
        **(changes or {}),
    }
    document = parse_document(RECIPE, "reference.yaml")
    for key, value in values.items():
        document = document.with_value(tuple(key.split(".")), value, f"--set {key}={value}")
    experiment = assemble(document, Registry.load(entry_points=False))
    ran, server = Ran(), Server(experiment, digits(), CPU, RunObserver())
    server.begin(None)
    shards = shards_of(experiment, digits(), CPU)
    ran.evaluations = simulate(ServerTask(server, lambda *now: ran.rounds.append(now), shards))
    return ran


def check(setting: Setting) -> None:
    """Round by round: same clients, losses, weights, buffers and variates.

    The local training has the same bits, except where a loss is written in another form (MART, GAIRAT, AWP). A mean of
    clients may lie half-way between two floats, and then the order of its sum decides. So 1e-6 is allowed, and the next
    round starts from the package's bits, because the sign of an attack's step may depend on the last one.
    """
    plain = Federation(setting, digits().train.x, digits().train.y)
    start = plain.state
    rounds = runs(setting).rounds
    assert len(rounds) == setting.rounds
    for record, snapshot in rounds:
        plain.play(record.round)
        assert list(record.clients) == plain.clients
        assert record.losses == pytest.approx(plain.losses, rel=0, abs=1e-6)
        variates = {name.removeprefix(VARIATE): c for name, c in snapshot.server_state.items() if VARIATE in name}
        assert_equal(snapshot.global_state, plain.state)
        assert_equal(variates, plain.c if setting.aggregator == "scaffold" else {})
        plain.adopt(snapshot.global_state, variates)
    moved = max(float((plain.state[name] - start[name]).abs().max()) for name in plain.shared)
    assert moved > 0.01  # a federation that does not move would hold nothing


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, wanted[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def given(method: str, aggregator: str) -> Setting:
    return Setting(method, aggregator, METHODS[method], AGGREGATORS[aggregator])


def test_the_grid_has_every_method_and_aggregator() -> None:
    registry = Registry.load(entry_points=False)
    assert set(METHODS) == {entry.name for entry, _ in registry.offers(TrainerEntry)}
    assert set(AGGREGATORS) == {entry.name for entry, _ in registry.offers(AggregatorEntry)}
    assert {method for method, _ in QUICK} == set(METHODS)
    assert {aggregator for _, aggregator in QUICK} == set(AGGREGATORS)


@pytest.mark.parametrize(("method", "aggregator"), QUICK)
def test_each_method_and_aggregator_trains_as_the_plain_federation(method: str, aggregator: str) -> None:
    check(given(method, aggregator))


@pytest.mark.parametrize("setting", VARIANTS, ids=lambda s: f"{s.method}-{s.aggregator}-{s.seed}")
def test_variants_train_as_the_plain_federation(setting: Setting) -> None:
    check(setting)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "aggregator"), [pair for pair in GRID if pair not in QUICK])
def test_every_method_with_every_aggregator_trains_as_the_plain_federation(method: str, aggregator: str) -> None:
    check(given(method, aggregator))
