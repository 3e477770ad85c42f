"""How clients train: ``train_args``, and what a recipe adds to any method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from calfat_plugin.entries import Citation, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.options import Tag, option, tagged
from calfat_plugin.recipe.keys import Section, as_plain, key

COSINE = "cosine"  # the schedule that depends on the number of rounds
_SMOOTHING_PAPER = paper("szegedy2016rethinking")
_CLEAN_ROUNDS_PAPER = paper("wang2025ignition")
AWP_PAPER = paper("wu2020adversarial")
BY_CLASS_PAPER = paper("zhang2026taming")
EMA_PAPER = paper("polyak1992acceleration")


@dataclass(frozen=True)
class TrainArgs:
    """``train_args``: clients, rounds and the local optimiser, which is new in each round of a client."""

    federated_optimizer: str = option("FedAvg", help="FedML's own key, unused here; see calfat.aggregator")
    client_num_in_total: int = tagged(Tag.PROBLEM, option(5, low=1, high=1_000_000, help="number of clients"))
    client_num_per_round: int | None = option(None, low=1, help="clients that train in a round; null: all")
    comm_round: int = tagged(
        Tag(0),
        option(150, low=1, help="rounds"),
        fixed_because="A cosine schedule ends with the rounds, the warm-up of by_class is a share of them, and atas "
        "draws nothing anew in the last of them, so the finished ones would have been others",
    )
    patience: int | None = tagged(
        Tag.MAY_CHANGE,  # of a run that has not stopped yet, nothing that is done depends on it
        option(
            None,
            low=1,
            help="stop early: training ends when so many monitored evaluations in a row have no higher validation "
            "accuracy than the best one before (of the last attack in `calfat.monitor.evaluators`); needs "
            "`data_args.validation_share`. null: all rounds are done",
        ),
    )
    epochs: int = option(1, low=1, help="local epochs per round")
    local_steps: int | None = option(
        None,
        low=1,
        help="mini-batches per round in place of local epochs: the same number for every client, through its data as "
        "often as it takes; null: go by epochs",
    )
    batch_size: int = option(128, low=1, help="examples per mini-batch; more than any client has warns")
    client_optimizer: str = option("sgd", choices=("sgd", "adam", "adamw"), help="local optimiser, as in torch.optim")
    learning_rate: float = option(0.01, low=0, open_low=True, help="learning rate; with a schedule, its highest")
    lr_schedule: str = option(
        "constant",
        choices=("constant", "step", COSINE),
        help="learning rate of a round: step multiplies it by lr_decay_rate every lr_step_size rounds; cosine lowers "
        "it to learning_rate_min over all rounds",
    )
    lr_step_size: int | None = option(
        None, low=1, help="rounds between two steps of lr_schedule: step; null: not that schedule"
    )
    lr_decay_rate: float = option(0.1, low=0, open_low=True, high=1, help="factor of each step of lr_schedule: step")
    learning_rate_min: float = option(0.0, low=0, help="where lr_schedule: cosine ends")
    warmup_rounds: int = option(
        0, low=0, help="rounds in which the learning rate rises in equal steps, before the schedule begins"
    )
    momentum: float = option(0.9, low=0, high=0.9999, help="SGD momentum, reset every round")
    nesterov: bool = option(False, help="Nesterov's form of SGD momentum")
    weight_decay: float = option(2e-4, low=0, help="L2 coefficient; of adamw: decay of the weights themselves")
    max_grad_norm: float | None = option(
        None, low=0, open_low=True, help="clip the gradient of each step to this L2 norm over all parameters; null: no"
    )

    def __post_init__(self) -> None:
        wrong: dict[str, str] = {}
        if (self.client_num_per_round or 0) > self.client_num_in_total:
            wrong["client_num_per_round"] = (
                f"got {self.client_num_per_round} clients per round, but there are only {self.client_num_in_total} in "
                "total (train_args.client_num_in_total)."
            )
        if self.nesterov and self.client_optimizer != "sgd":
            wrong["nesterov"] = f"got true, but client_optimizer is {self.client_optimizer}, not sgd. Remove one."
        elif self.nesterov and not self.momentum:
            wrong["nesterov"] = "got true, but momentum is 0. Raise train_args.momentum, or remove the key."
        if self.lr_schedule == "step" and self.lr_step_size is None:
            wrong["lr_schedule"] = "got step without lr_step_size, the rounds between two steps. Add lr_step_size: 30."
        if self.learning_rate_min > self.learning_rate:
            most = f"no more than train_args.learning_rate, {self.learning_rate:g}"
            wrong["learning_rate_min"] = f"got {self.learning_rate_min:g}, expected {most}."
        if self.warmup_rounds >= self.comm_round:
            wrong["warmup_rounds"] = (
                f"got {self.warmup_rounds}, but the run has {self.comm_round} rounds (train_args.comm_round), so none "
                "of them would have the whole learning rate. Lower it, or raise comm_round."
            )
        for name, text in wrong.items():
            raise OptionError(text, (name,))

    def learning_rate_of(self, round: int) -> float:
        """The learning rate of a round, as PyTorch's schedulers have it with one step a round.

        These are ``StepLR`` and ``CosineAnnealingLR``, behind ``LinearLR`` in a ``SequentialLR`` where there is a
        warm-up: round r of W, from 1, has r / (W + 1) of the learning rate, and the schedule begins in the round after.
        """
        past = round - 1 - self.warmup_rounds  # rounds of the schedule itself that are over
        if past < 0:
            return self.learning_rate * round / (self.warmup_rounds + 1)
        if self.lr_schedule == "step":
            assert self.lr_step_size is not None  # __post_init__
            return self.learning_rate * self.lr_decay_rate ** (past // self.lr_step_size)
        if self.lr_schedule == COSINE:
            left = (1 + math.cos(math.pi * past / (self.comm_round - self.warmup_rounds))) / 2
            return self.learning_rate_min + (self.learning_rate - self.learning_rate_min) * left
        return self.learning_rate

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate depends on the round."""
        return self.lr_schedule != "constant" or self.warmup_rounds > 0


def useless(train: TrainArgs) -> list[tuple[str, str]]:
    """(key, what it needs to have an effect) for every value that is not the default and does nothing."""
    needs = {
        "epochs": ("local_steps: null", train.local_steps is None),
        "momentum": ("client_optimizer: sgd", train.client_optimizer == "sgd"),
        "lr_step_size": ("lr_schedule: step", train.lr_schedule == "step"),
        "lr_decay_rate": ("lr_schedule: step", train.lr_schedule == "step"),
        "learning_rate_min": (f"lr_schedule: {COSINE}", train.lr_schedule == COSINE),
    }
    keys = []
    for name, (needed, is_met) in needs.items():
        is_default = getattr(train, name) == getattr(TrainArgs, name)
        if not is_default and not is_met:
            keys.append((name, f"train_args.{needed}"))
    return keys


# --- additions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AWPOptions:
    """``calfat.trainer.awp``: adversarial weight perturbation, added to a method: each training gradient is taken at
    weights that are perturbed against the training loss."""

    gamma: float = option(0.005, low=0, help="length of the perturbation, relative to each layer's weights")
    warmup: int = option(10, low=0, help="rounds of plain training before weights are perturbed", unit="rounds")


@dataclass(frozen=True)
class Additions:
    """``calfat.trainer``: what can be added to any local trainer, beside its own options."""

    label_smoothing: float = option(
        0.0, low=0, high=1, help="s: (1 - s) of the classification loss, s of the mean cross-entropy over all classes"
    )
    awp: AWPOptions | None = key(Section(config=AWPOptions, may_lack=True), default_factory=lambda: None)
    clean_rounds: int = option(
        0, low=0, help="first rounds in which the method trains on clean images and attacks nothing", unit="rounds"
    )

    def as_run(self) -> dict[str, Any]:
        """The additions that the recipe makes, as a recipe in full writes them."""
        return {name: value for name, value in as_plain(self, Additions).items() if value}

    def citations(self) -> Iterator[Citation]:
        """The papers of the additions that the recipe makes."""
        papers = {"label_smoothing": _SMOOTHING_PAPER, "awp": AWP_PAPER, "clean_rounds": _CLEAN_ROUNDS_PAPER}
        return (papers[name] for name in self.as_run())


ADDED = ("label_smoothing", "awp", "clean_rounds")  #: the keys of :class:`Additions`


@dataclass(frozen=True)
class ByClassOptions:
    """``calfat.threat.by_class``: in training, each client's examples have an eps by their class (RobustLT); the mean
    over its examples is eps. Evaluation stays at eps. Without this section each example has the same."""

    alpha: float = option(0.3, low=0, high=1, help="share of eps that goes by class; 0: none")
    warmup: float = option(
        0.8,
        low=0,
        high=1,
        help="share of the rounds in which every eps grows from 0 in the first one; 0: none. The source counts epochs",
    )


@dataclass(frozen=True)
class EMAOptions:
    """``calfat.ema``: the server keeps an exponential moving average of the global models. It is what is evaluated and
    stored; the clients go on from the model that was trained. Without this section there is none."""

    decay: float = option(
        0.9, low=0, high=1, help="weight of each round's model as a share of the next one's; 1: the mean of all rounds"
    )
