"""The built-in plugins, offered through the same hooks as anyone's. This is the one list of them."""

from __future__ import annotations

from collections.abc import Iterable

from calfat_plugin import entries
from calfat_plugin.aggregators import fedavg, fedprox, scaffold, server_optimizers, sfat
from calfat_plugin.datasets.entries import ENTRIES as DATASETS
from calfat_plugin.evaluators import autoattack, corruptions, deepfool, gradient, momentum, natural, panel
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers import tensorboard, wandb
from calfat_plugin.models.entries import ENTRIES as MODELS
from calfat_plugin.modifiers import calibrated, fedlc, fedrs, gear, logitadj, plain, robal
from calfat_plugin.partitions.entries import ENTRIES as PARTITIONS
from calfat_plugin.trainers import calfat, fedawp, fedgairat, fedmart, fedpgd, fedrbn, fedtrades, mixfat, standard


@hookimpl
def calfat_local_trainers() -> Iterable[entries.TrainerEntry]:
    methods = (calfat, fedawp, fedgairat, fedmart, fedpgd, fedrbn, fedtrades, mixfat, standard)
    return [method.ENTRY for method in methods]


@hookimpl
def calfat_loss_modifiers() -> Iterable[entries.ModifierEntry]:
    return [modifier.ENTRY for modifier in (plain, logitadj, robal, calibrated, fedlc, gear, fedrs)]


@hookimpl
def calfat_aggregators() -> Iterable[entries.AggregatorEntry]:
    return [fedavg.ENTRY, fedprox.ENTRY, scaffold.ENTRY, sfat.ENTRY, *server_optimizers.ENTRIES]


@hookimpl
def calfat_evaluators() -> Iterable[entries.EvaluatorEntry]:
    attacks = (*gradient.ENTRIES, momentum.ENTRY, deepfool.ENTRY, *autoattack.ENTRIES)
    return [natural.ENTRY, *attacks, corruptions.ENTRY, panel.ENTRY]


@hookimpl
def calfat_datasets() -> Iterable[entries.DatasetEntry]:
    return DATASETS


@hookimpl
def calfat_models() -> Iterable[entries.ModelEntry]:
    return MODELS


@hookimpl
def calfat_partitions() -> Iterable[entries.PartitionEntry]:
    return PARTITIONS


@hookimpl
def calfat_loggers() -> Iterable[entries.LoggerEntry]:
    return [tensorboard.ENTRY, wandb.ENTRY]
