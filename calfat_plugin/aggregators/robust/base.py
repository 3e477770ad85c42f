"""Common parts of robust rules: the clients' displacements, the buffers, and how many attackers a round bears.

A rule works on the displacements theta_i - theta of the trainable parameters. A distance over them does not see the
buffers (normalisation statistics), so no rule lets a client's vote on parameters carry its buffers: these are the
coordinate-wise median of all clients', or what the rule itself makes of them where it is coordinate-wise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.aggregators.fedavg import Weights
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import Aggregate, AggregationTask, State
from calfat_plugin.maths.averaging import median_of, weighted_sum
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.recipe.schema import Recipe

CoordinateRule = Callable[["Tensor"], "Tensor"]
"""(n, values) of n clients to (values,)."""

TOLERATED = {"tolerated": "f of the round: what was asked for, or what its updates bear where fewer came"}
CLIPPED = {"clipped": "clients whose update was shortened"}


@dataclass(frozen=True)
class WeightedOptions:
    """Options of every robust rule that has a weighted form."""

    weights: Weights = option(
        "uniform", help="weight of a client: the same for all, or the number of examples that it claims to have"
    )


@dataclass(frozen=True)
class TolerantOptions:
    """Options of every robust rule that is told how many attackers to bear."""

    f: int = option(1, low=0, help="attackers among a round's clients that the rule has to bear", unit="clients")


@dataclass(frozen=True)
class Bound:
    """A rule bears f attackers among at least ``factor * f + rest`` clients."""

    rule: str
    factor: int
    rest: int

    def borne(self, f: int, clients: int) -> int:
        """f, or as much of it as this many clients bear."""
        return max(0, min(f, (clients - self.rest) // self.factor))

    def check(self, options: Any, recipe: Recipe) -> None:
        clients, f = recipe.clients_per_round, options.f
        needed = self.factor * f + self.rest
        if clients >= needed:
            return
        most = (clients - self.rest) // self.factor
        instead = f"an f of at most {most}" if most >= 0 else f"at least {self.rest} clients"
        raise OptionError(
            f"f: got {f}, for which {self.rule} needs {self.factor} f + {self.rest} = {needed} clients a round, and "
            f"{clients} train in one (train_args.client_num_per_round); expected {instead}."
        )


class Displacements:
    """theta_i - theta of a round's clients, in the order of ``task.updates``; one tensor at a time is in float64."""

    def __init__(self, task: AggregationTask) -> None:
        self.task = task
        self.clients = tuple(task.updates)

    def of(self, name: str) -> Tensor:
        """(n, values) of a parameter."""
        return _rows(self.task, name) - self.task.global_state[name].double().flatten()

    def each(self, rule: CoordinateRule) -> dict[str, Tensor]:
        """What a rule makes of every parameter: name to (values,)."""
        return {name: rule(self.of(name)) for name in self.task.parameter_names}

    def mean(self, shares: list[float]) -> dict[str, Tensor]:
        """sum_i s_i (theta_i - theta): name to (values,)."""
        return self.each(lambda rows: weighted_sum(list(rows), shares))

    def distances(self, center: State) -> Tensor:
        """(n,) Euclidean distances to ``center``, name to (values,); names it lacks are at the global model."""
        squares: Any = sum(
            (self.of(name) - center[name] if name in center else self.of(name)).square().sum(1)
            for name in self.task.parameter_names
        )
        distances: Tensor = squares.sqrt()
        return distances

    def squared_distances(self) -> Tensor:
        """(n, n) squared Euclidean distances between clients."""
        import torch

        exact = "donot_use_mm_for_euclid_dist"  # the fast form cancels where an attacker is far away
        every = map(self.of, self.task.parameter_names)  # one at a time: a list would hold all clients' models
        total: Any = sum(torch.cdist(rows, rows, compute_mode=exact).square() for rows in every)
        squared: Tensor = total
        return squared

    def moved(self, by: Mapping[str, Tensor], buffers: CoordinateRule | None = None, **more: Any) -> Aggregate:
        """The aggregate whose parameters are theta + ``by``; ``buffers``: rule for all other tensors, or the median."""
        state = {}
        for name, start in self.task.global_state.items():
            moved = name in by
            values = start.double().flatten() + by[name] if moved else (buffers or median_of)(_rows(self.task, name))
            rounded = values if start.is_floating_point() else values.round()
            state[name] = rounded.reshape(start.shape).to(start.dtype)
        return Aggregate(state, **more)


def _rows(task: AggregationTask, name: str) -> Tensor:
    """(n, values) of a tensor of the clients' models, in float64."""
    import torch

    return torch.stack([update.state[name].double().flatten() for update in task.updates.values()])


def clip_factors(norms: Tensor, bound: float | None) -> Tensor:
    """min(1, bound / norm), element by element: (n,) in [0, 1]. None: the norms' median is the bound."""
    import torch

    limit = norms.new_tensor(bound) if bound is not None else median_of(norms)
    return torch.where(norms > limit, limit / norms, 1.0)
