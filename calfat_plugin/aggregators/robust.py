"""Robust rules: aggregators for rounds in which some clients send what they like.

Every rule works on the displacements theta_i - theta of the trainable parameters. Distances do not see the buffers
(statistics of normalisation layers), so a rule that selects or weights whole clients must not take over their buffers
as well: a client could send good parameters with wild statistics. Buffers are therefore the coordinate-wise median over
all clients, or, for the trimmed mean, the trimmed mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.aggregators.fedavg import Weights, client_shares
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator, State
from calfat_plugin.maths.averaging import median_of, sorted_values, weighted_sum
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.recipe.schema import Recipe

CoordinateRule = Callable[["Tensor"], "Tensor"]
"""(n, values) of n clients to (values,)."""


# --- what the rules share: displacements ------------------------------------------------------------------------------


class Displacements:
    """theta_i - theta of a round's clients, in the order of ``task.updates``.

    They are computed in float64, one tensor of the model at a time: all of them at once would need twice the memory of
    all clients' models.
    """

    def __init__(self, task: AggregationTask) -> None:
        self.task = task
        self.clients = tuple(task.updates)

    def of(self, name: str) -> Tensor:
        """(n, values) of a parameter."""
        return self._models(name) - self.task.global_state[name].double().flatten()

    def combined(self, rule: CoordinateRule) -> dict[str, Tensor]:
        """The rule's result for every parameter: name to (values,)."""
        return {name: rule(self.of(name)) for name in self.task.parameter_names}

    def mean(self, shares: list[float]) -> dict[str, Tensor]:
        """sum_i s_i (theta_i - theta): name to (values,)."""
        return self.combined(lambda rows: weighted_sum(list(rows), shares))

    def distances(self, center: State) -> Tensor:
        """(n,) Euclidean distances to ``center``, name to (values,); a name that it lacks is at zero."""
        import torch

        squares = torch.zeros(len(self.clients), dtype=torch.float64)
        for name in self.task.parameter_names:
            rows = self.of(name)
            if name in center:
                rows = rows - center[name]
            squares = squares + rows.square().sum(1)
        return squares.sqrt()

    def squared_distances(self) -> Tensor:
        """(n, n) squared Euclidean distances between clients."""
        import torch

        squares = torch.zeros(len(self.clients), len(self.clients), dtype=torch.float64)
        for name in self.task.parameter_names:
            rows = self.of(name)
            # The fast form, by matrix products, cancels where one client is far away from all others.
            distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
            squares = squares + distances.square()
        return squares

    def new_state(self, step: State, buffers: CoordinateRule = median_of) -> dict[str, Tensor]:
        """The next global model: theta + ``step``, name to (values,), and all other tensors by the rule ``buffers``."""
        state = {}
        for name, start in self.task.global_state.items():
            if name in step:
                values = start.double().flatten() + step[name]
            else:
                values = buffers(self._models(name))
            if not start.is_floating_point():
                values = values.round()
            state[name] = values.reshape(start.shape).to(start.dtype)
        return state

    def _models(self, name: str) -> Tensor:
        """(n, values) of a tensor of the clients' models, in float64."""
        import torch

        return torch.stack([update.state[name].double().flatten() for update in self.task.updates.values()])


# --- what the rules share: options ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightedOptions:
    """Options of every robust rule that has a weighted form."""

    weights: Weights = option(
        "uniform", help="weight of a client: the same for all, or the number of examples that it claims to have"
    )


@dataclass(frozen=True)
class TolerantOptions:
    """Options of every robust rule that is told how many attackers to tolerate."""

    f: int = option(1, low=0, help="attackers among a round's clients that the rule has to tolerate", unit="clients")


@dataclass(frozen=True)
class Bound:
    """A rule tolerates f attackers among at least ``factor * f + rest`` clients."""

    rule: str
    factor: int
    rest: int

    def tolerated(self, f: int, clients: int) -> int:
        """f, or less where so few clients sent an update that the rule cannot tolerate f attackers."""
        most = (clients - self.rest) // self.factor
        return max(0, min(f, most))

    def check(self, options: Any, recipe: Recipe) -> None:
        """Refuse a recipe with more attackers than a round of all its clients tolerates."""
        clients = recipe.clients_per_round
        needed = self.factor * options.f + self.rest
        if clients >= needed:
            return
        most = (clients - self.rest) // self.factor
        if most >= 0:
            expected = f"an f of at most {most}"
        else:
            expected = f"at least {self.rest} clients"
        raise OptionError(
            f"f: got {options.f}, for which {self.rule} needs {self.factor} f + {self.rest} = {needed} clients a "
            f"round, and {clients} train in one (train_args.client_num_per_round); expected {expected}."
        )


_TOLERATED = {"tolerated": "f of the round: that of the options, or less where fewer clients sent an update"}
_CLIPPED = {"clipped": "clients whose update was shortened"}


# --- rules for each coordinate (Yin et al., ICML 2018) ----------------------------------------------------------------


class Median(Aggregator):
    """theta[k] <- med_i theta_i[k]; of an even number of clients the mean of the middle two (definition 1)."""

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        step = displacements.combined(median_of)
        return Aggregate(displacements.new_state(step))


_TRIMMED_MEAN_BOUND = Bound("the trimmed mean", 2, 1)


class TrimmedMean(Aggregator):
    """theta[k] <- the mean of theta_i[k] without the f largest and the f smallest (definition 2, with beta = f / n)."""

    options: TolerantOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        f = _TRIMMED_MEAN_BOUND.tolerated(self.options.f, len(displacements.clients))

        def trimmed_mean(rows: Tensor) -> Tensor:
            return sorted_values(rows)[f : len(rows) - f].mean(0)

        step = displacements.combined(trimmed_mean)
        state = displacements.new_state(step, buffers=trimmed_mean)
        return Aggregate(state, metrics={"tolerated": float(f)})


# --- Krum and its relatives -------------------------------------------------------------------------------------------


def krum_scores(squared: Tensor, f: int) -> list[float]:
    """Each client's sum of squared distances to its n - f - 2 nearest others, at least to one.

    Args:
        squared: (n, n) squared distances between the clients.
        f: attackers among them.
    """
    nearest_first = squared.sort(1).values
    others = nearest_first[:, 1:]  # the nearest is the client itself
    count = max(1, len(squared) - f - 2)
    scores: list[float] = others[:, :count].sum(1).tolist()
    return scores


_KRUM_BOUND = Bound("Krum", 2, 3)


class Krum(Aggregator):
    """theta <- theta_i of the smallest score (Blanchard et al., NeurIPS 2017, section 4).

    Of clients with equal scores the first one counts.
    """

    options: TolerantOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        f = _KRUM_BOUND.tolerated(self.options.f, len(displacements.clients))
        scores = krum_scores(displacements.squared_distances(), f)
        best = scores.index(min(scores))
        # Without the copy the row would keep the rows of all clients in memory.
        step = displacements.combined(lambda rows: rows[best].clone())
        return Aggregate(
            displacements.new_state(step),
            metrics={"tolerated": float(f), "selected": float(displacements.clients[best])},
        )


@dataclass(frozen=True)
class MultiKrumOptions(TolerantOptions, WeightedOptions):
    """Options of multi-Krum."""

    m: int | None = option(None, low=1, help="how many clients are averaged; null: n - f", unit="clients")


_MULTI_KRUM_BOUND = Bound("multi-Krum", 2, 3)


class MultiKrum(Aggregator):
    """theta <- the weighted mean of the m models with the smallest scores (Blanchard et al., section 5).

    Of clients with equal scores the first ones count.
    """

    options: MultiKrumOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        weights = client_shares(task, self.options.weights)
        n = len(displacements.clients)
        f = _MULTI_KRUM_BOUND.tolerated(self.options.f, n)
        m = n - f
        if self.options.m is not None:
            m = min(m, self.options.m)

        scores = krum_scores(displacements.squared_distances(), f)
        rows_by_score = sorted(range(n), key=lambda row: scores[row])
        selected = [displacements.clients[row] for row in rows_by_score[:m]]
        total = math.fsum(weights[client] for client in selected)
        shares = dict.fromkeys(displacements.clients, 0.0)
        for client in selected:
            shares[client] = weights[client] / total
        step = displacements.mean(list(shares.values()))
        return Aggregate(displacements.new_state(step), weights=shares, metrics={"tolerated": float(f)})


def _check_multi_krum(options: MultiKrumOptions, recipe: Recipe) -> None:
    _MULTI_KRUM_BOUND.check(options, recipe)
    most = recipe.clients_per_round - options.f
    if options.m is not None and options.m > most:
        raise OptionError(
            f"m: got {options.m}, expected at most n - f = {most}, or attackers have to be among them; "
            f"{recipe.clients_per_round} clients train in a round (train_args.client_num_per_round)."
        )


_BULYAN_BOUND = Bound("Bulyan", 4, 3)


class Bulyan(Aggregator):
    """theta[k] <- the mean of the n - 4f values nearest to the median of theta_i[k], over n - 2f clients i.

    Krum selects these clients, one after the other (El Mhamdi et al., ICML 2018, section 4).
    """

    options: TolerantOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        n = len(displacements.clients)
        f = _BULYAN_BOUND.tolerated(self.options.f, n)
        selected = _selected_by_krum(displacements.squared_distances(), f)

        def mean_around_median(rows: Tensor) -> Tensor:
            values = rows[selected]
            distances = (values - median_of(values)).abs()
            nearest = distances.sort(dim=0, stable=True).indices[: n - 4 * f]
            return values.gather(0, nearest).mean(0)

        step = displacements.combined(mean_around_median)
        return Aggregate(displacements.new_state(step), metrics={"tolerated": float(f)})


def _selected_by_krum(squared: Tensor, f: int) -> list[int]:
    """The rows of the n - 2f clients that Krum selects one after the other, each among those that are left.

    Args:
        squared: (n, n) squared distances between the clients.
        f: attackers among them.
    """
    left = list(range(len(squared)))
    selected = []
    for _ in range(len(squared) - 2 * f):
        scores = krum_scores(squared[left][:, left], f)
        best = scores.index(min(scores))
        selected.append(left.pop(best))
    return sorted(selected)


# --- the geometric median ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeometricMedianOptions(WeightedOptions):
    """Options of the geometric median."""

    nu: float = option(1e-6, low=0, open_low=True, help="smallest distance that a client is taken to have")
    iterations: int = option(3, low=1, help="steps of Weiszfeld's algorithm, the first from the global model")


class GeometricMedian(Aggregator):
    """theta <- argmin_z sum_i w_i |theta_i - z|: RFA (Pillutla et al., IEEE Transactions on Signal Processing 2022).

    The smoothed Weiszfeld algorithm (algorithm 2) approximates it: each step is the mean of the clients' models,
    weighted by w_i / |theta_i - z|.
    """

    options: GeometricMedianOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        weights = client_shares(task, self.options.weights)
        center: dict[str, Tensor] = {}
        for _ in range(self.options.iterations):
            distances = displacements.distances(center).clamp(min=self.options.nu).tolist()
            pulls = [weight / distance for weight, distance in zip(weights.values(), distances, strict=True)]
            total = math.fsum(pulls)
            shares = [pull / total for pull in pulls]
            center = displacements.mean(shares)
        return Aggregate(
            displacements.new_state(center),
            weights=dict(zip(displacements.clients, shares, strict=True)),
        )


# --- clipping ---------------------------------------------------------------------------------------------------------


def _clip_factors(distances: Tensor, bound: float | None) -> list[float]:
    """min(1, bound / distance) of each of the (n,) distances; without a bound their median is the bound."""
    import torch

    if bound is None:
        limit = median_of(distances)
    else:
        limit = distances.new_tensor(bound)
    factors: list[float] = torch.where(distances > limit, limit / distances, 1.0).tolist()
    return factors


def _clipped(factors: list[float]) -> dict[str, float]:
    """The metric of rules that clip: how many clients' updates were shortened."""
    return {"clipped": float(sum(factor < 1 for factor in factors))}


@dataclass(frozen=True)
class NormClippingOptions(WeightedOptions):
    """Options of norm clipping."""

    bound: float | None = option(
        None, low=0, open_low=True, help="largest norm of an update; null: the median norm of the round's updates"
    )


class NormClipping(Aggregator):
    """theta <- theta + sum_i w_i d_i min(1, bound / |d_i|), d_i = theta_i - theta (Sun et al., 2019, section 3)."""

    options: NormClippingOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        weights = client_shares(task, self.options.weights)
        factors = _clip_factors(displacements.distances({}), self.options.bound)
        shares = [weight * factor for weight, factor in zip(weights.values(), factors, strict=True)]
        step = displacements.mean(shares)
        return Aggregate(displacements.new_state(step), weights=weights, metrics=_clipped(factors))


@dataclass(frozen=True)
class CenteredClippingOptions(WeightedOptions):
    """Options of centered clipping."""

    radius: float | None = option(
        None,
        low=0,
        open_low=True,
        help="how far from the centre an update counts in full; null: the median distance of the round's clients",
    )
    iterations: int = option(1, low=1, help="clipped means a round, each around the one before")


_CENTER = "centered_clipping/center/"


class CenteredClipping(Aggregator):
    """v <- v + sum_i w_i (d_i - v) min(1, radius / |d_i - v|), d_i = theta_i - theta; theta <- theta + v.

    v starts each round as the last round's, and the first one at zero (Karimireddy et al., ICML 2021, algorithm 2).
    """

    options: CenteredClippingOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        displacements = Displacements(task)
        weights = client_shares(task, self.options.weights)
        center = {}  # v: name to (values,); empty in the first round, where it is zero
        for name in task.parameter_names:
            last_center = task.server_state.get(_CENTER + name)
            if last_center is not None:
                center[name] = last_center.double().flatten()
        for _ in range(self.options.iterations):
            factors = _clip_factors(displacements.distances(center), self.options.radius)
            shares = [weight * factor for weight, factor in zip(weights.values(), factors, strict=True)]
            # v + sum_i s_i (d_i - v) = (1 - sum_i s_i) v + sum_i s_i d_i
            share_of_center = 1.0 - sum(shares)
            mean = displacements.mean(shares)
            for name, step in mean.items():
                if name in center:
                    center[name] = weighted_sum([center[name], step], [share_of_center, 1.0])
                else:
                    center[name] = step

        server_state = {}
        for name, step in center.items():
            start = task.global_state[name]
            server_state[_CENTER + name] = step.reshape(start.shape).to(start.dtype)
        return Aggregate(
            displacements.new_state(center), server_state=server_state, weights=weights, metrics=_clipped(factors)
        )


# --- the table of rules -----------------------------------------------------------------------------------------------

ENTRIES = (
    AggregatorEntry(
        "median",
        build=Median,
        summary="coordinate-wise median of the clients' models; every client counts the same",
        formula="theta[k] = med_i theta_i[k]",
        citation=paper("yin2018byzantine"),
    ),
    AggregatorEntry(
        "trimmed_mean",
        build=TrimmedMean,
        config=TolerantOptions,
        check=_TRIMMED_MEAN_BOUND.check,
        summary="coordinate-wise mean without the f largest and f smallest values; every client counts the same",
        formula="theta[k] = 1 / (n - 2f) sum of the theta_i[k] but the f largest and the f smallest",
        citation=paper("yin2018byzantine"),
        metrics=_TOLERATED,
    ),
    AggregatorEntry(
        "krum",
        build=Krum,
        config=TolerantOptions,
        check=_KRUM_BOUND.check,
        summary="the one client's model that is nearest to its n - f - 2 nearest others; examples do not count",
        formula="theta = theta_i of the smallest s(i), s(i) = sum over the n - f - 2 nearest j of "
        "|theta_i - theta_j|^2",
        citation=paper("blanchard2017machine"),
        metrics={**_TOLERATED, "selected": "id of the client whose model it is"},
    ),
    AggregatorEntry(
        "multi_krum",
        build=MultiKrum,
        config=MultiKrumOptions,
        check=_check_multi_krum,
        summary="mean of the m clients' models with the smallest Krum scores",
        formula="theta = sum_i w_i theta_i / sum_i w_i over the m smallest s(i), s(i) as Krum's",
        citation=paper("blanchard2017machine"),
        metrics=_TOLERATED,
    ),
    AggregatorEntry(
        "bulyan",
        build=Bulyan,
        config=TolerantOptions,
        check=_BULYAN_BOUND.check,
        summary="mean around the median of n - 2f clients that Krum chooses; examples do not count",
        formula="theta[k] = mean of the n - 4f values nearest to med theta_i[k], i chosen by iterated Krum",
        citation=paper("elmhamdi2018hidden"),
        metrics=_TOLERATED,
    ),
    AggregatorEntry(
        "geometric_median",
        build=GeometricMedian,
        config=GeometricMedianOptions,
        summary="geometric median of the clients' models, by the smoothed Weiszfeld algorithm (RFA)",
        formula="theta = argmin_z sum_i w_i |theta_i - z|; z = sum_i b_i theta_i / sum_i b_i, b_i = w_i / max(nu, "
        "|theta_i - z|)",
        citation=paper("pillutla2022robust"),
    ),
    AggregatorEntry(
        "centered_clipping",
        build=CenteredClipping,
        config=CenteredClippingOptions,
        summary="mean of the updates, each clipped around the last round's aggregate",
        formula="v = v + sum_i w_i (d_i - v) min(1, radius / |d_i - v|), theta = theta + v, d_i = theta_i - theta",
        citation=paper("karimireddy2021learning"),
        metrics=_CLIPPED,
    ),
    AggregatorEntry(
        "norm_clipping",
        build=NormClipping,
        config=NormClippingOptions,
        summary="mean of the updates, none longer than a bound",
        formula="theta = theta + sum_i w_i d_i min(1, bound / |d_i|), d_i = theta_i - theta",
        citation=paper("sun2019can"),
        metrics=_CLIPPED,
    ),
)
