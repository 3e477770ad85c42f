"""``calfat_plugin.testing`` on our own plugins: every built-in keeps what third-party plugins are held to."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin import entries, testing
from calfat_plugin.options import describe_options
from calfat_plugin.registry import Registry

registry = cache(testing.builtin_registry)


def names(kind: type[entries.Entry], *others: str) -> list[str]:
    """Those of all built-ins of a kind but ``others``, each of which has a test of its own."""
    return [name for name in Registry.load(entry_points=False).names(kind) if name not in others]


@pytest.mark.parametrize("name", names(entries.TrainerEntry))
def test_trainers(name: str) -> None:
    testing.check_trainer(name, registry=registry(), losses=("plain",))


@pytest.mark.slow
@pytest.mark.parametrize("name", names(entries.TrainerEntry))
def test_trainers_with_every_loss(name: str) -> None:
    testing.check_trainer(name, registry=registry())


@pytest.mark.parametrize("name", names(entries.AggregatorEntry))
def test_aggregators(name: str) -> None:
    entry, _ = registry().find(entries.AggregatorEntry, name)
    none = {info.name: 0 for info in describe_options(entry.config) if info.name == "f"}  # three clients bear no more
    own_steps = name in ("fedadam", "fedyogi", "fedadagrad")
    testing.check_aggregator(name, registry=registry(), extras=name == "scaffold", unanimous=not own_steps, **none)


@pytest.mark.parametrize("name", names(entries.AttackerEntry))
def test_attackers(name: str) -> None:
    testing.check_attacker(name, registry=registry())


QUICK = {"iterations": 2, "queries": 2, "steps": 5}  # those of AutoAttack and its parts, and those of gradient attacks


@pytest.mark.parametrize("name", names(entries.EvaluatorEntry, "transfer"))  # it needs a source: tests/evaluators
def test_evaluators(name: str) -> None:
    entry, _ = registry().find(entries.EvaluatorEntry, name)
    few = {info.name: QUICK[info.name] for info in describe_options(entry.config) if info.name in QUICK}
    testing.check_evaluator(name, registry=registry(), **few)


@pytest.mark.parametrize("name", names(entries.ModifierEntry))
def test_modifiers(name: str) -> None:
    testing.check_modifier(name, registry=registry())


@pytest.mark.parametrize("name", names(entries.InnerAttackEntry))
def test_inner_attacks(name: str) -> None:
    testing.check_inner_attack(name, registry=registry())


SMALLEST: dict[str, dict[str, Any]] = {
    "cnn": {"image_size": (28, 28)},
    "cnn_mcmahan": {"image_size": (32, 32)},
    "alexnet64": {"image_size": (64, 64)},
}


@pytest.mark.parametrize("name", names(entries.ModelEntry, "alexnet64"))  # that one has 57 million parameters
def test_models(name: str) -> None:
    testing.check_model(name, registry=registry(), **SMALLEST.get(name, {}))


@pytest.mark.parametrize("name", names(entries.PartitionEntry, "silo"))  # which splits nothing
def test_partitions(name: str) -> None:
    testing.check_partition(name, registry=registry())


def test_data_sets(tmp_path: Path) -> None:
    """The one whose files come with a library; tests/inputs makes files for the others."""
    testing.check_dataset("digits", tmp_path, registry=registry())


def test_loggers(tmp_path: Path) -> None:
    written = testing.check_logger("tensorboard", tmp_path, registry=registry())
    assert list((written / "tensorboard").iterdir())
