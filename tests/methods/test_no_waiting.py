"""Nothing in a batch, an attack or a step makes the host wait for a device: no look at a value, no copy to the host.

Counted on the CPU, by operator: each of these is a synchronisation where tensors are on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calfat_plugin.entries import EvaluatorEntry
from calfat_plugin.evaluators import gradient
from calfat_plugin.interfaces import EvaluationTask, LocalCorrection, TrainBatch
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers import loop
from calfat_plugin.trainers.base import ALL_MODIFIERS
from calfat_plugin.trainers.watching import LossMeter
from tests.methods.helpers import (
    CPU,
    SETTINGS,
    TinyNet,
    build_aggregator,
    build_method,
    local_task,
    registry,
    tiny_data,
)

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("standard", {}),
    ("fedpgd", {"loss": "logitadj"}),
    ("fedpgd", {"loss": "robal"}),
    ("calfat", {"parameterisation": "release"}),
    ("fedtrades", {"loss": "calibrated"}),
    ("fedmart", {}),
    ("fedgairat", {"start_round": 1}),
    ("fedawp", {"warmup": 0}),
    ("fedlat", {}),
    ("fedrbn", {"at_fraction": 1.0}),
]
CORRECTIONS: list[tuple[str, dict[str, Any]]] = [("fedprox", {}), ("scaffold", {}), ("scaffold", {"variant": "I"})]
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class Watch(TorchDispatchMode):
    """Counts what would wait while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.found = False, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_", "_unsafe_index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        to_host = name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu")
        if self.on and (name in WAITING or by_mask or to_host):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """On from the moment a batch is handed to the attack until the step is over; the loss is looked at after that.

    No batch is inspected, unless a test says so.
    """
    monkeypatch.setattr(loop, "INSPECTED", 0)
    watched = Watch()
    attacked, add = loop.attacked, LossMeter.add

    def starting(*arguments: Any, moving: bool) -> TrainBatch:
        watched.on = True
        return attacked(*arguments, moving=moving)

    def over(meter: Any, *arguments: Any) -> None:
        watched.on = False
        add(meter, *arguments)

    monkeypatch.setattr(loop, "attacked", starting)
    monkeypatch.setattr(LossMeter, "add", over)
    with watched:
        yield watched


def train(watch: Watch, method: Any, correction: LocalCorrection | None = None, **asked: Any) -> Counter[str]:
    seen: list[int] = []
    settings = dataclasses.replace(SETTINGS, **asked)
    task = local_task(
        method.adapt_model(TinyNet(norm=True)),
        correction=correction,
        settings=settings,
        round=100,
        on_batch=lambda now: seen.append(1),
    )
    method.fit(task)
    assert len(seen) == 3 * settings.epochs
    return watch.found


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        *((name, options, {}) for name, options in METHODS),
        # Between them these two use all of a modifier's logits.
        *((name, {"loss": loss}, {}) for name in ("fedtrades", "fedmart") for loss in ALL_MODIFIERS),
        *((name, {}, {"max_grad_norm": 0.1, "nesterov": True}) for name in ("fedpgd", "fedrbn")),
    ],
)
def test_no_method_waits(watch: Watch, name: str, options: dict[str, Any], asked: dict[str, Any]) -> None:
    assert train(watch, build_method(name, **options), **asked) == {}


def test_as_many_looks_inspect_a_short_round_and_a_long_one(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "INSPECTED", 2)
    method, looks = build_method("fedpgd"), []
    for epochs in (1, 2):
        watch.found.clear()
        looks.append(dict(train(watch, method, epochs=epochs)))
    assert looks[0] == looks[1] != {}


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
def test_no_correction_waits(watch: Watch, name: str, options: dict[str, Any]) -> None:
    assert train(watch, build_method("fedpgd"), build_aggregator(name, **options).correction()) == {}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_looks_at_its_own_counters_alone(watch: Watch, name: str) -> None:
    """One a parameter and step; torch keeps them on the host, wherever the parameters are."""
    assert train(watch, build_method("fedpgd"), client_optimizer=name) == {"_local_scalar_dense": 6 * 3}


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", ["fgsm", "bim", "pgd", "cw"])
def test_no_step_of_an_evaluation_waits(name: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first pass of a batch's attack to its last projection; what it found is looked at after that."""
    entry, _ = registry().find(EvaluatorEntry, name)
    watched, climb, data = Watch(), gradient.PGD._climb, tiny_data()

    def watching(*given: Any) -> Any:
        watched.on = True
        try:
            return climb(*given)
        finally:
            watched.on = False

    monkeypatch.setattr(gradient.PGD, "_climb", watching)
    threat = ThreatModel(norm=norm, eps="0.1", step_size="0.04", steps=3)  # type: ignore[arg-type]
    task = EvaluationTask(TinyNet().eval(), data, 4, threat, 4, CPU, 0, 0, data.y.clone())
    with watched:
        assert entry.load()(entry.config()).evaluate(task, name).num_examples == len(data)
        watched.on = True
        float(torch.ones(1))
    assert watched.found == {"_local_scalar_dense": 1}  # this very line's: it does watch


def test_a_mixture_looks_once_a_batch_at_which_rows_it_attacks(watch: Watch) -> None:
    assert train(watch, build_method("mixfat")) == {"nonzero": 3}
