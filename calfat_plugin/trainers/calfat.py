"""CalFAT: calibrated federated adversarial training under label skew (Chen et al., NeurIPS 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.entries import Preset, TrainerEntry
from calfat_plugin.interfaces import AttackBatch, ClientLoss, LocalTask, TrainBatch
from calfat_plugin.maths.losses import kl_divergence
from calfat_plugin.modifiers.calibrated import CALFAT_PAPER, CalibratedLoss, CalibrationOptions, idle_delta
from calfat_plugin.options import option
from calfat_plugin.trainers.base import (
    SAMPLING_HELP,
    GaussianStart,
    Sampling,
    empty_share,
    mixed_rows,
    start_noise_option,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class CalFATOptions(CalibrationOptions):
    """The constants of CalFAT."""

    start_noise: float = start_noise_option()
    outer: Literal["calibrated", "plain"] = option(
        "calibrated", help="loss that trains; plain: cross-entropy on raw logits, the paper's ablation without CCE"
    )
    inner: Literal["ckl", "kl", "ce"] = option(
        "ckl", help="loss that the attack climbs; kl, ce: on raw logits, two readings of the ablation without CKL"
    )
    adv_ratio: float = option(
        1.0, low=0, high=1, help="r, share of adversarial examples; the others enter the outer loss clean"
    )
    sampling: Sampling = option("per_batch", help=SAMPLING_HELP)


class CalFAT(GaussianStart):
    """Inner: climb KL(C_in f(x) || C_in f(x')); outer: CE(C_out f(x~), y), adversarial examples only (Algorithm 1).

    The options ``outer``, ``inner`` and ``adv_ratio`` give the ablations of the paper's appendix.
    """

    options: CalFATOptions

    def bind_loss(self, class_counts: Tensor) -> ClientLoss:
        return CalibratedLoss(
            self.options,
            class_counts,
            calibrate_attack=self.options.inner == "ckl",
            calibrate_outer=self.options.outer != "plain",
        )

    def attacked_rows(self, index: Tensor, task: LocalTask, generator: Generator) -> Tensor | None:
        return mixed_rows(index, task, generator, self.options.adv_ratio, self.options.sampling)

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        if self.options.inner == "ce":
            return super().attack_loss(batch)
        clean = batch.loss.attack_logits(batch.logits_nat)
        adversarial = batch.loss.attack_logits(batch.logits_adv)
        return kl_divergence(clean, adversarial, reduction="sum")

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


def _protocol(partition: str, weights: str, dataset: str) -> dict[str, Any]:
    """Section 5.1 of the paper; weight decay, batch size and model, which it does not state, as in the release."""
    weight_decay = 2e-4
    if dataset.startswith("cifar10"):
        weight_decay = 2e-3
    return {
        "data_args.partition_alpha": 0.1,
        "model_args.model": "cnn",
        "train_args.client_num_in_total": 5,
        "train_args.comm_round": 150,
        "train_args.epochs": 1,
        "train_args.batch_size": 128,
        "train_args.learning_rate": 0.01,
        "train_args.momentum": 0.9,
        "train_args.weight_decay": weight_decay,
        "data_args.partition_method": partition,
        "calfat.aggregator": {"name": "fedavg", "weights": weights},
    }


_paper = partial(_protocol, "dirichlet_plain", "examples")
_release = partial(_protocol, "dirichlet", "uniform")
ENTRY = TrainerEntry(
    "calfat",
    build=CalFAT,
    config=CalFATOptions,
    warn=lambda options, recipe: empty_share(recipe, options.adv_ratio, options.sampling),
    idle=idle_delta,
    summary="adversarial training with both losses calibrated by the client's class prior",
    formula="min CE(s (f(x~) + k log nu), y), x~ = argmax KL(f(x) + k log nu || f(x') + k log nu)",
    modifiers=(),
    citation=CALFAT_PAPER,
    presets={
        "paper": Preset("losses and protocol as the paper words them", {"parameterisation": "paper"}, _paper),
        "release": Preset("losses and pipeline of the authors' code", {"parameterisation": "release"}, _release),
        "repro": Preset(
            "the release's pipeline, which the published partition matches; choose the losses with 'parameterisation'",
            {},
            _release,
        ),
    },
)
