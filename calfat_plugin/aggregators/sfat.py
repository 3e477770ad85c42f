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
    """theta <- sum_i w_i a_i theta_i / sum_i w_i a_i.

    w_i is the base weight of client i, and theta_i is the model of client i. a_i is the option ``ratio`` for the
    ``top`` clients whose adversarial loss in the last local epoch was smallest, and 1 for all other clients. Rounds
    before ``start_round`` take the base weights alone.
    """

    options: SFATOptions

    def client_weights(self, task: AggregationTask) -> Mapping[int, float]:
        base_weights = super().client_weights(task)
        if task.round < self.options.start_round:
            return base_weights
        losses: list[float | None] = []  # in the order of base_weights
        for client in base_weights:
            if client in task.unattacked:
                losses.append(None)  # the client has a loss, but no adversarial one
            else:
                losses.append(task.updates[client].metrics.get("loss", math.nan))
        weights = slack_weights(list(base_weights.values()), losses, self.options.ratio, self.options.top)
        return dict(zip(base_weights, weights, strict=True))


def slack_weights(weights: Sequence[float], losses: Sequence[float | None], ratio: float, top: int) -> list[float]:
    """Multiply the weights of the clients with the smallest adversarial losses, and normalise all weights to sum 1.

    The official release divides by a wrong sum if client 0 is not among the favoured clients. This function divides by
    the sum of the multiplied weights.

    Args:
        weights: one weight for each client; at least one weight is positive.
        losses: the adversarial loss of each client, in the order of ``weights``. Of clients with equal losses, the
            earlier client is favoured. A loss of nan counts as the largest loss. None means that the client has no
            adversarial loss; such a client is never favoured.
        ratio: the factor by which the weight of a favoured client is multiplied.
        top: how many clients are favoured.
    """
    loss_of: dict[int, float] = {}  # client's position in ``weights`` to the loss by which the client is ranked
    for position, loss in enumerate(losses):
        if loss is None:
            continue
        if math.isnan(loss):
            # Every comparison with nan is false, so with nan the result of sorting would depend on the clients' order.
            loss = math.inf
        loss_of[position] = loss
    ranking = sorted(loss_of, key=loss_of.__getitem__)

    multiplied = [float(weight) for weight in weights]
    for position in ranking[:top]:
        multiplied[position] *= ratio
    total = math.fsum(multiplied)
    return [weight / total for weight in multiplied]


def _check_top(options: SFATOptions, recipe: Recipe) -> None:
    """Refuse to favour more clients than train in a round."""
    if options.top > recipe.clients_per_round:
        raise OptionError(
            f"top: got {options.top} favoured clients, expected at most the {recipe.clients_per_round} that train in a "
            "round (train_args.client_num_per_round)."
        )


ENTRY = AggregatorEntry(
    "sfat",
    build=SFAT,
    config=SFATOptions,
    check=_check_top,
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
