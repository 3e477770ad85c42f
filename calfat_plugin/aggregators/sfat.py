"""SFAT: an average that favours the clients with the smallest adversarial loss (Zhu et al., ICLR 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.aggregators.fedavg import FedAvg, Weights
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import AggregationTask
from calfat_plugin.options import option

if TYPE_CHECKING:
    from calfat_plugin.recipe.schema import Recipe


@dataclass(frozen=True)
class SFATOptions:
    """Options of SFAT."""

    ratio: float = option(
        1.4, low=1, help="p = (1 + alpha) / (1 - alpha), factor of a favoured client's weight; 1 is FedAvg"
    )
    top: int = option(1, low=1, help="how many clients are favoured a round", unit="clients")
    start_round: int = option(2, low=1, help="first round that favours anyone; a plain mean before it", unit="rounds")
    weights: Weights = option(
        "uniform", help="base weight of a client: the same for all (release), or its number of examples"
    )


class SFAT(FedAvg):
    """theta <- sum_i w_i a_i theta_i / sum_i w_i a_i, a = p for the clients whose last epoch's loss was smallest."""

    options: SFATOptions

    def client_weights(self, task: AggregationTask) -> Mapping[int, float]:
        weights = super().client_weights(task)
        if task.round < self.options.start_round:
            return weights
        losses: list[float | None] = []
        for client, update in task.updates.items():
            if client in task.unattacked:
                losses.append(None)
            else:
                losses.append(update.metrics.get("loss", math.nan))
        slack = slack_weights(list(weights.values()), losses, self.options.ratio, self.options.top)
        return dict(zip(weights, slack, strict=True))


def slack_weights(weights: Sequence[float], losses: Sequence[float | None], ratio: float, top: int) -> list[float]:
    """The clients' weights, with those of the ``top`` smallest adversarial losses multiplied, normalised to sum 1.

    The official release divides by a wrong sum where client 0 is not on top; this is the normalised form.

    Args:
        weights: one for each client, at least one positive.
        losses: adversarial loss of each client. Of equal losses the first is favoured; nan counts as the largest loss.
            None, for a client without an adversarial loss, is never favoured.
        ratio: factor of a favoured client's weight.
        top: how many clients are favoured.
    """
    loss_of = {}
    for index, loss in enumerate(losses):
        if loss is None:
            continue
        if math.isnan(loss):
            loss = math.inf  # a comparison with nan is always false, so the order would depend on the clients' places
        loss_of[index] = loss
    favoured = sorted(loss_of, key=loss_of.__getitem__)[:top]

    slack = [float(weight) for weight in weights]
    for index in favoured:
        slack[index] *= ratio
    total = math.fsum(slack)
    return [weight / total for weight in slack]


def _check(options: SFATOptions, recipe: Recipe) -> None:
    if options.top > recipe.clients_per_round:
        raise OptionError(
            f"top: got {options.top} favoured clients, expected at most the {recipe.clients_per_round} that train in a "
            "round (train_args.client_num_per_round)."
        )


ENTRY = AggregatorEntry(
    "sfat",
    build=SFAT,
    config=SFATOptions,
    check=_check,
    summary="alpha-slack: the clients with the smallest adversarial loss count more",
    formula="theta = sum_i w_i a_i theta_i / sum_i w_i a_i, a_i = (1 + alpha) / (1 - alpha) for the smallest losses, "
    "else 1",
    conflicts={
        "standard": "SFAT ranks clients by their adversarial loss, and standard federated learning has none. In "
        "calfat.clients, groups may train so beside others that do not; they are not ranked.",
        "fedrbn": "SFAT ranks clients by their adversarial loss, and FedRBN's losses mix clean and adversarial parts "
        "that differ from client to client.",
    },
    beside_others=("standard",),
    citation=paper("zhu2023combating"),
)
