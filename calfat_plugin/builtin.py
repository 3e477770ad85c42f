"""The built-in plugins, offered through the same hooks as anyone's. This is the one list of them."""

from __future__ import annotations

from collections.abc import Iterable

from calfat_plugin.aggregators import fedavg, fedprox, scaffold, server_optimizers, sfat
from calfat_plugin.datasets.entries import ENTRIES as DATASETS
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
from calfat_plugin.evaluators import autoattack, gradient, natural
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers import tensorboard, wandb
from calfat_plugin.models.entries import ENTRIES as MODELS
from calfat_plugin.modifiers import calibrated, fedlc, fedrs, gear, logitadj, plain, robal
from calfat_plugin.partitions.entries import ENTRIES as PARTITIONS
from calfat_plugin.trainers import calfat, fedawp, fedgairat, fedmart, fedpgd, fedrbn, fedtrades, mixfat, standard


@hookimpl
def calfat_local_trainers() -> Iterable[TrainerEntry]:
    return (
        calfat.ENTRY,
        fedawp.ENTRY,
        fedgairat.ENTRY,
        fedmart.ENTRY,
        fedpgd.ENTRY,
        fedrbn.ENTRY,
        fedtrades.ENTRY,
        mixfat.ENTRY,
        standard.ENTRY,
    )


@hookimpl
def calfat_loss_modifiers() -> Iterable[ModifierEntry]:
    return (
        plain.ENTRY,
        logitadj.ENTRY,
        robal.ENTRY,
        calibrated.ENTRY,
        fedlc.ENTRY,
        gear.ENTRY,
        fedrs.ENTRY,
    )


@hookimpl
def calfat_aggregators() -> Iterable[AggregatorEntry]:
    return (
        fedavg.ENTRY,
        fedprox.ENTRY,
        scaffold.ENTRY,
        sfat.ENTRY,
        server_optimizers.ADAM_ENTRY,
        server_optimizers.YOGI_ENTRY,
        server_optimizers.ADAGRAD_ENTRY,
    )


@hookimpl
def calfat_evaluators() -> Iterable[EvaluatorEntry]:
    return (natural.ENTRY, *gradient.ENTRIES, *autoattack.ENTRIES)


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
