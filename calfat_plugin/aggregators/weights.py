"""How much each client counts in an average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from calfat_plugin.options import option
from calfat_plugin.results import LocalUpdate

Weights = Literal["examples", "uniform"]


@dataclass(frozen=True)
class WeightOptions:
    """The option of aggregators that average."""

    weights: Weights = option(
        "examples", help="weight of a client: its number of examples (paper), or the same for all (release)"
    )


def client_weights(updates: Mapping[int, LocalUpdate], weights: Weights) -> dict[int, float]:
    """Client id to its share of the average; shares sum to 1."""
    raw = {client: float(update.num_examples) if weights == "examples" else 1.0 for client, update in updates.items()}
    total = sum(raw.values())
    return {client: weight / total for client, weight in raw.items()}
