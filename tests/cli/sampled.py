"""Recipes on digits that combine whatever there is: plugins, their options, and numbers near and beyond the usual."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import yaml

from calfat_plugin.entries import AggregatorEntry, Entry, ModifierEntry, PartitionEntry, TrainerEntry
from calfat_plugin.options import OptionInfo, describe_options
from calfat_plugin.registry import Registry

_NUMBERS = (0, 1, 2, 3, 0.5, 0.1, 0.9, 1.5, 10, "1/255", "8/255", 1e-6, 1e6, -1)
_NETWORKS = ("cnn_small", "cnn", "resnet18", "vgg8", "alexnet64")

Recipe = dict[str, Any]


def recipes() -> Iterator[tuple[str, str]]:
    """(name, text) of recipes without end, the same each time; some of them are good."""
    registry = Registry.load(entry_points=False)
    for number in itertools.count():
        name = f"digits, number {number}"
        yield name, yaml.safe_dump(sampled(registry, random.Random(name)), sort_keys=False)


def sampled(registry: Registry, rng: random.Random) -> Recipe:
    """A recipe of two short rounds."""
    clients = rng.choice([1, 2, 3, 3, 5])
    trainer = _pick(registry, TrainerEntry, rng)
    if rng.random() < 0.4:
        trainer["loss"] = _pick(registry, ModifierEntry, rng)
    evaluators = ["natural", *rng.sample(["fgsm", "bim", "pgd20", "cw20"], rng.randint(0, 2))]
    train = {
        "client_num_in_total": clients,
        "client_num_per_round": rng.randint(1, clients),
        "comm_round": 2,
        "epochs": rng.choice([1, 1, 2]),
        "batch_size": rng.choice([32, 64, 128, 128, 1, 10_000]),
        "learning_rate": rng.choice([0.01, 0.05, 0.05, 1e-6, 10.0]),
        "momentum": rng.choice([0, 0.9, 0.99]),
        "weight_decay": rng.choice([0, 2e-4, 1.0]),
    }
    method = rng.choice(registry.names(PartitionEntry))
    return {
        "common_args": {"training_type": "simulation", "random_seed": rng.choice([0, 1, 2**32 - 1])},
        "data_args": {"dataset": "digits", "partition_method": method, **_alpha(method, rng)},
        "model_args": {"model": rng.choice(_NETWORKS)},
        "train_args": train,
        "calfat": {
            "trainer": trainer,
            "aggregator": _pick(registry, AggregatorEntry, rng),
            "threat": {
                "norm": rng.choice(["linf", "linf", "l2"]),
                "eps": rng.choice([0, "8/255", 0.1, 0.3, 1, 3]),
                "step_size": rng.choice([0.01, 0.05, "2/255", 0.5]),
                "steps": rng.choice([1, 1, 2, 3]),
            },
            "evaluators": evaluators,
            "monitor": {"every": rng.choice([1, 2, 7]), "evaluators": evaluators, "max_examples": rng.choice([1, 40])},
            "evaluation": {"batch_size": rng.choice([1, 100, 500])},
            "runtime": {"threads": 1},
        },
    }


def _alpha(method: str, rng: random.Random) -> Recipe:
    return {"partition_alpha": rng.choice([0.01, 0.1, 0.5, 100])} if rng.random() < 0.8 else {}


def _pick(registry: Registry, kind: type[Entry], rng: random.Random) -> Recipe:
    """A plugin with other values for some of its options."""
    name = rng.choice(registry.names(kind))
    config = registry.find(kind, name)[0].config
    infos = [] if config is None else describe_options(config)
    chosen = rng.sample(infos, min(len(infos), rng.choice([0, 0, 1, 2])))
    return {"name": name, **{info.name: _value(info, rng) for info in chosen}}


def _value(info: OptionInfo, rng: random.Random) -> Any:
    if info.choices:
        return rng.choice(info.choices)
    if info.type is bool:
        return rng.random() < 0.5
    if info.type in (int, float, Fraction):
        usual = [info.default] * 10 if isinstance(info.default, (int, float)) else []
        return rng.choice([*_NUMBERS, *usual])
    return rng.choice([info.default if isinstance(info.default, str) else None, "x"])
