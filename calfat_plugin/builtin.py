"""The built-in plugins, offered through the same hooks as anyone's. This is the one list of them."""

from __future__ import annotations

from typing import TypeVar

from calfat_plugin import entries
from calfat_plugin.aggregators import fedavg, fedprox, robust, scaffold, server_optimizers, sfat
from calfat_plugin.attackers import colluding, label_flip, own_update
from calfat_plugin.datasets.entries import ENTRIES as DATASETS
from calfat_plugin.evaluators import autoattack, clients, gradient, natural, transfer
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.inner_attacks import atas, sora
from calfat_plugin.inner_attacks.gradient import ENTRIES as INNER_ATTACKS
from calfat_plugin.loggers import mlflow, tensorboard, wandb
from calfat_plugin.models.entries import ENTRIES as MODELS
from calfat_plugin.modifiers import calibrated, counts, robal
from calfat_plugin.partitions.entries import ENTRIES as PARTITIONS
from calfat_plugin.trainers import (
    calfat,
    fedawp,
    fedgairat,
    fedlat,
    fedmart,
    fedpgd,
    fedrbn,
    fedtrades,
    mixfat,
    standard,
)

E = TypeVar("E", bound=entries.Entry)

METHODS = (calfat, fedawp, fedgairat, fedlat, fedmart, fedpgd, fedrbn, fedtrades, mixfat, standard)
MODIFIERS = (calibrated, robal)
AGGREGATORS = (fedavg, fedprox, scaffold, sfat)
OTHERS = (natural, transfer, atas, sora, tensorboard, wandb, mlflow, label_flip)
WITH_SEVERAL_ENTRIES = (counts, server_optimizers, robust, gradient, autoattack, clients, own_update, colluding)

ENTRIES: list[entries.Entry] = [module.ENTRY for module in (*METHODS, *MODIFIERS, *AGGREGATORS, *OTHERS)]
for module in WITH_SEVERAL_ENTRIES:
    ENTRIES += module.ENTRIES
ENTRIES += [*DATASETS, *MODELS, *PARTITIONS, *INNER_ATTACKS]


def _entries_of(kind: type[E]) -> list[E]:
    return [entry for entry in ENTRIES if isinstance(entry, kind)]


@hookimpl
def calfat_local_trainers() -> list[entries.TrainerEntry]:
    return _entries_of(entries.TrainerEntry)


@hookimpl
def calfat_loss_modifiers() -> list[entries.ModifierEntry]:
    return _entries_of(entries.ModifierEntry)


@hookimpl
def calfat_inner_attacks() -> list[entries.InnerAttackEntry]:
    return _entries_of(entries.InnerAttackEntry)


@hookimpl
def calfat_aggregators() -> list[entries.AggregatorEntry]:
    return _entries_of(entries.AggregatorEntry)


@hookimpl
def calfat_evaluators() -> list[entries.EvaluatorEntry]:
    return _entries_of(entries.EvaluatorEntry)


@hookimpl
def calfat_datasets() -> list[entries.DatasetEntry]:
    return _entries_of(entries.DatasetEntry)


@hookimpl
def calfat_models() -> list[entries.ModelEntry]:
    return _entries_of(entries.ModelEntry)


@hookimpl
def calfat_partitions() -> list[entries.PartitionEntry]:
    return _entries_of(entries.PartitionEntry)


@hookimpl
def calfat_attackers() -> list[entries.AttackerEntry]:
    return _entries_of(entries.AttackerEntry)


@hookimpl
def calfat_loggers() -> list[entries.LoggerEntry]:
    return _entries_of(entries.LoggerEntry)
