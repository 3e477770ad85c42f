"""Robust aggregation: other libraries' numbers, the papers' definitions in plain loops, attackers, buffers, memory."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calfat_plugin.aggregators.robust import Displacements
from calfat_plugin.errors import RecipeError
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.results import LocalUpdate
from tests.methods.helpers import build_aggregator, experiment
from tests.reference.robust import robust, score

PEERS = json.loads((Path(__file__).parent / "robust_peers.json").read_text())
GIVEN = [(peer, rule) for peer in ("byzfl", "fedml") for rule in PEERS[peer]]
# Each rule with as many attackers as eleven clients bear.
RULES: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"f": 2},
    "krum": {"f": 2},
    "multi_krum": {"f": 2},
    "bulyan": {"f": 2},
    "geometric_median": {"iterations": 20},
    "centered_clipping": {},
    "norm_clipping": {},
}


def combine(
    rule: str, vectors: Any, *, start: Any = None, memory: Any = None, examples: Any = (), **options: Any
) -> Any:
    """One aggregation of clients' vectors, client ids 10, 11, ...; ``start``: the global model, by default zeros."""
    rows = torch.as_tensor(vectors, dtype=torch.float64)
    theta = torch.zeros(rows.shape[1], dtype=torch.float64) if start is None else start
    examples = examples or [1] * len(rows)
    updates = {10 + i: LocalUpdate({"w": row}, n) for i, (row, n) in enumerate(zip(rows, examples, strict=True))}
    task = AggregationTask({"w": theta}, updates, memory or {}, ["w"], 20, 1)
    return build_aggregator(rule, **options).combine(task)


def vector_of(aggregate: Aggregate) -> list[float]:
    values: list[float] = aggregate.state["w"].tolist()
    return values


@pytest.mark.parametrize(("peer", "asked"), GIVEN)
def test_as_other_libraries_have_it(peer: str, asked: str) -> None:
    rule, *texts = asked.split()
    options = {key: float(value) if "." in value else int(value) for key, value in (t.split("=") for t in texts)}
    assert vector_of(combine(rule, PEERS["vectors"], **options)) == pytest.approx(PEERS[peer][asked], abs=1e-6)


# --- the papers' definitions in plain loops ---------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(11, 14))
@pytest.mark.parametrize("rule", RULES)
def test_as_plain_loops_have_it(rule: str, seed: int, clients: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    vectors = torch.randn(clients, 3, generator=stream, dtype=torch.float64).tolist()
    options = {} if rule == "geometric_median" else RULES[rule]
    found = vector_of(combine(rule, vectors, **options))
    assert found == pytest.approx(robust(rule, vectors, options, [0.0] * 3), abs=1e-9)


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_and_multi_krum_by_their_scores(f: int) -> None:
    vectors = PEERS["vectors"][:7]
    found = [score(vector, vectors, f) for vector in vectors]
    best = sorted(range(7), key=lambda i: found[i])
    krum = combine("krum", vectors, f=f)
    assert vector_of(krum) == pytest.approx(vectors[best[0]])
    assert krum.metrics == {"tolerated": f, "selected": 10 + best[0]}
    assert krum.weights == {}  # one client's model each round is what it is for, and no finding
    several = combine("multi_krum", vectors, f=f)
    assert {client for client, weight in several.weights.items() if weight > 0} == {10 + i for i in best[: 7 - f]}
    two = combine("multi_krum", vectors, f=f, m=2)
    expected = [(a + b) / 2 for a, b in zip(vectors[best[0]], vectors[best[1]], strict=True)]
    assert vector_of(two) == pytest.approx(expected)


def test_bounds_of_norms_and_distances() -> None:
    """Without a bound norms are clipped at the median."""
    found = combine("norm_clipping", [(1.0, 0.0), (0.0, 2.0), (-30.0, 40.0)], start=torch.zeros(2))
    assert vector_of(found) == pytest.approx([(1 - 1.2) / 3, (2 + 1.6) / 3])
    assert found.metrics == {"clipped": 1}
    bounded = combine("norm_clipping", [(1.0, 0.0), (0.0, 2.0), (-30.0, 40.0)], bound=0.5)
    assert vector_of(bounded) == pytest.approx([(0.5 - 0.3) / 3, (0.5 + 0.4) / 3])
    assert bounded.metrics == {"clipped": 3}
    found = combine("norm_clipping", [(11.0, 5.0), (10.0, 9.0)], start=torch.tensor([10.0, 5.0]), bound=2.0)
    assert vector_of(found) == pytest.approx([10.5, 6.0])  # displacements are from the global model
    nu = combine("geometric_median", [(0.0,), (4.0,)], iterations=1, nu=2.0)
    assert vector_of(nu) == pytest.approx([4 / 3])  # the smallest distance: 0 is taken as 2, so shares 2/3 and 1/3


def test_centered_clipping_begins_where_the_last_round_ended() -> None:
    """Radius 1: from 0 to the mean of clipped 1 and -1 and 1; then 1/3, with steps of 1 again."""
    first = combine("centered_clipping", [(4.0,), (-2.0,), (9.0,)], radius=1.0)
    assert vector_of(first) == pytest.approx([1 / 3])
    second = combine("centered_clipping", [(4.0,), (-2.0,), (9.0,)], radius=1.0, memory=first.server_state)
    assert vector_of(second) == pytest.approx([2 / 3])
    twice = combine("centered_clipping", [(4.0,), (-2.0,), (9.0,)], radius=1.0, iterations=2)
    assert vector_of(twice) == pytest.approx([2 / 3])
    assert list(first.server_state) == ["centered_clipping/center/w"]
    away = combine("centered_clipping", [(4.0,), (-2.0,)], radius=1.0, start=torch.tensor([2.0]))
    assert away.server_state["centered_clipping/center/w"].tolist() == pytest.approx([0.0])
    assert vector_of(combine("centered_clipping", [(1.0,), (2.0,), (30.0,)])) == pytest.approx([5 / 3])  # radius 2


# --- attackers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["multi_krum", "geometric_median", "centered_clipping", "norm_clipping"])
def test_examples_count_where_the_recipe_says_so(rule: str) -> None:
    vectors, wide = [(1.0,), (1.5,), (2.0,), (2.5,), (3.0,)], {"f": 0} if rule == "multi_krum" else {}
    even = combine(rule, vectors, examples=[1, 1, 1, 1, 96], **wide)
    claimed = combine(rule, vectors, examples=[1, 1, 1, 1, 96], weights="examples", **wide)
    assert vector_of(claimed)[0] > vector_of(even)[0] + 0.1
    assert claimed.weights[14] > even.weights[14]


# --- rounds with fewer clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "clients", "borne"),
    [
        ("krum", 9, 3), ("krum", 8, 2), ("krum", 3, 0), ("krum", 1, 0),
        ("multi_krum", 7, 2), ("multi_krum", 2, 0),
        ("bulyan", 11, 2), ("bulyan", 10, 1), ("bulyan", 2, 0), ("bulyan", 1, 0),
        ("trimmed_mean", 7, 3), ("trimmed_mean", 6, 2), ("trimmed_mean", 1, 0),
    ],
)  # fmt: skip
def test_a_round_of_fewer_updates_bears_what_it_can(rule: str, clients: int, borne: int) -> None:
    vectors = PEERS["vectors"][:clients]
    found = combine(rule, vectors, f=3)
    assert found.metrics["tolerated"] == borne
    assert vector_of(found) == vector_of(combine(rule, vectors, f=borne))


@pytest.mark.parametrize(
    ("aggregator", "complaint"),
    [
        ("krum", "f: got 1, for which Krum needs 2 f + 3 = 5 clients a round, and 3 train"),
        ("bulyan", "f: got 1, for which Bulyan needs 4 f + 3 = 7 clients"),
        ({"name": "multi_krum", "f": 2}, "f: got 2, for which multi-Krum needs 2 f + 3 = 7 clients"),
        ({"name": "trimmed_mean", "f": 2}, "f: got 2, for which the trimmed mean needs 2 f + 1 = 5 clients"),
        ({"name": "multi_krum", "f": 0, "m": 4}, "m: got 4, expected at most n - f = 3"),
    ],
)
def test_an_f_that_a_round_cannot_bear_is_refused(aggregator: Any, complaint: str) -> None:
    """Of nine clients three train in a round: it is these that count."""
    with pytest.raises(RecipeError, match=re.escape(f"test.yaml:2: calfat.aggregator: {complaint}")):
        experiment("fedpgd", aggregator, train_args={"client_num_in_total": 9, "client_num_per_round": 3})


@pytest.mark.parametrize(("rule", "options"), RULES.items(), ids=RULES)
def test_no_more_than_two_tensors_of_all_clients_are_widened_at_a_time(
    rule: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is made while a loop still holds the one before."""
    made: list[weakref.ref[Tensor]] = []
    of = Displacements.of

    def watched(moves: Displacements, name: str) -> Tensor:
        assert sum(rows() is not None for rows in made) < 2
        rows = of(moves, name)
        made.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(Displacements, "of", watched)
    start = {name: torch.zeros(3) for name in "abcde"}
    updates = {i: LocalUpdate({name: torch.full((3,), float(i)) for name in start}, 1) for i in range(11)}
    build_aggregator(rule, **options).combine(AggregationTask(start, updates, {}, list(start), 11, 1))
    assert len(made) >= len(start)


# --- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "options"), RULES.items(), ids=RULES)
def test_buffers_follow_no_single_client(rule: str, options: dict[str, Any]) -> None:
    """Six clients agree on the parameter; the first, whom Krum may well choose, sends wild buffers beside it."""
    options = {**options, "f": 1} if "f" in options else options
    updates = {
        client: LocalUpdate(
            {"w": torch.tensor([1.0]), "mean": torch.tensor([1e9 if client == 0 else float(client)]),
             "count": torch.tensor(0 if client == 0 else 10 + client)},
            1,
        )
        for client in range(7)
    }  # fmt: skip
    start = {"w": torch.tensor([0.5]), "mean": torch.tensor([0.0]), "count": torch.tensor(3)}
    state = build_aggregator(rule, **options).combine(AggregationTask(start, updates, {}, ["w"], 7, 1)).state
    assert state["mean"].item() == pytest.approx(4.0)  # without 1e9 and 1, or the median
    assert state["count"].item() == 13
    assert state["count"].dtype == torch.int64
    assert list(state) == list(start)
    updates = {c: LocalUpdate({"w": torch.full((2, 3), float(c)), "count": torch.tensor(c)}, 1) for c in (2, 5)}
    task = AggregationTask({"w": torch.ones(2, 3), "count": torch.tensor(0)}, updates, {}, ["w"], 2, 1)
    found = build_aggregator("median").combine(task).state
    assert found["count"].item() == 4  # 3.5, to the even number
    assert torch.equal(found["w"], torch.full((2, 3), 3.5))


def test_the_trimmed_mean_trims_buffers_too() -> None:
    """Of 0, 1, 2, 9 and 100 it is (1 + 2 + 9) / 3, where the median is 2."""
    buffers = (0.0, 1.0, 2.0, 9.0, 100.0)
    updates = {
        client: LocalUpdate({"w": torch.zeros(1), "mean": torch.tensor([value])}, 1)
        for client, value in enumerate(buffers)
    }
    task = AggregationTask({"w": torch.zeros(1), "mean": torch.zeros(1)}, updates, {}, ["w"], 5, 1)
    assert build_aggregator("trimmed_mean", f=1).combine(task).state["mean"].item() == pytest.approx(4.0)
    assert build_aggregator("median").combine(task).state["mean"].item() == 2.0
