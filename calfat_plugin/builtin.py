"""The built-in plugins, offered through the same hooks as anyone's. This is the one list of them."""

from __future__ import annotations

from collections.abc import Iterable

from calfat_plugin.aggregators import fedavg as fedavg_aggregator
from calfat_plugin.builtin_inputs import DATASETS, MODELS, PARTITIONS
from calfat_plugin.entries import (
    AggregatorEntry,
    DatasetEntry,
    EvaluatorEntry,
    LoggerEntry,
    ModelEntry,
    ModifierEntry,
    PartitionEntry,
    TrainerEntry,
)
from calfat_plugin.evaluators import gradient, natural
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers import tensorboard, wandb
from calfat_plugin.modifiers import calibrated, plain
from calfat_plugin.trainers import calfat, fedavg, fedpgd


@hookimpl
def calfat_local_trainers() -> Iterable[TrainerEntry]:
    return (calfat.ENTRY, fedavg.ENTRY, fedpgd.ENTRY)


@hookimpl
def calfat_loss_modifiers() -> Iterable[ModifierEntry]:
    return (plain.ENTRY, calibrated.ENTRY)


@hookimpl
def calfat_aggregators() -> Iterable[AggregatorEntry]:
    return (fedavg_aggregator.ENTRY,)


@hookimpl
def calfat_evaluators() -> Iterable[EvaluatorEntry]:
    return (natural.ENTRY, gradient.FGSM_ENTRY, gradient.BIM_ENTRY, gradient.PGD_ENTRY)


@hookimpl
def calfat_datasets() -> Iterable[DatasetEntry]:
    return DATASETS


@hookimpl
def calfat_models() -> Iterable[ModelEntry]:
    return MODELS


@hookimpl
def calfat_partitions() -> Iterable[PartitionEntry]:
    return PARTITIONS


@hookimpl
def calfat_loggers() -> Iterable[LoggerEntry]:
    return (tensorboard.ENTRY, wandb.ENTRY)
