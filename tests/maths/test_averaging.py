from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.errors import UpdateError
from calfat_plugin.maths.averaging import check_update, drift, update_norm, value_problem, weighted_average

FEW = settings(max_examples=40, deadline=None, derandomize=True)
STATES = [{"w": torch.tensor(values)} for values in ((1.0, 2.0), (3.0, 4.0), (5.0, 0.0))]
SEEDS = st.integers(0, 10**6)


def average(weights) -> list[float]:
    return weighted_average(STATES, weights)["w"].tolist()


def random_states(seed: int, count: int = 3):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "w": torch.randn(4, 3, generator=generator),
            "half": torch.randn(2, generator=generator).bfloat16(),
            "steps": torch.randint(0, 99, (), generator=generator),
        }
        for _ in range(count)
    ]


class TestWeightedAverage:
    def test_vector(self):
        assert average([10, 30, 60]) == pytest.approx([4.0, 1.4])
        assert average([1, 1, 1]) == pytest.approx([3.0, 2.0])
        assert average([0, 2, 0]) == [3.0, 4.0]

    @FEW
    @given(SEEDS, st.floats(1e-3, 1e6))
    def test_weights_are_normalised(self, seed, factor):
        states, weights = random_states(seed), [1.0, 2.0, 3.5]
        one = weighted_average(states, weights)
        two = weighted_average(states, [factor * weight for weight in weights])
        assert torch.allclose(one["w"], two["w"], rtol=1e-6)

    @FEW
    @given(SEEDS)
    def test_equal_states_come_back_bit_for_bit(self, seed):
        state = random_states(seed, 1)[0]
        mean = weighted_average([state] * 3, [0.1, 0.7, 0.3])
        assert all(torch.equal(mean[name], value) for name, value in state.items())

    @FEW
    @given(SEEDS)
    def test_neither_touches_nor_shares_its_inputs(self, seed):
        states = random_states(seed)
        before = [{name: value.clone() for name, value in state.items()} for state in states]
        for chosen in (states, states[:1]):
            mean = weighted_average(chosen, [1.0] * len(chosen))
            for value in mean.values():
                value.fill_(77)
        for state, copy in zip(states, before, strict=True):
            assert all(torch.equal(state[name], copy[name]) for name in state)

    def test_integers_are_averaged_as_numbers_and_rounded(self):
        states = [
            {"n": torch.tensor([10, 1]), "flag": torch.tensor(True)},
            {"n": torch.tensor([13, 2]), "flag": torch.tensor(True)},
            {"n": torch.tensor([14, 2]), "flag": torch.tensor(False)},
        ]
        mean = weighted_average(states, [1, 1, 1])  # 12.33 and 1.67; two of three
        assert mean["n"].tolist() == [12, 2]
        assert mean["flag"].item() is True

    def test_sums_in_float64(self):
        # In float32 a thousand roundings would add up.
        states = [{"w": torch.tensor([1.0])}] + [{"w": torch.tensor([1e-4])}] * 1000
        exact = (1.0 + 1000 * float(torch.tensor(1e-4))) / 1001
        assert weighted_average(states, [1] * 1001)["w"].item() == pytest.approx(exact, rel=1e-7)

    @pytest.mark.parametrize(
        ("states", "weights", "text"),
        [
            ([], [], "no updates to average"),
            (STATES, [1, 2], "3 updates but 2 weights"),
            (STATES, [1, -2, 1], "weight 1 is -2; weights must be finite and not negative"),
            (STATES, [1, 1, math.nan], "weight 2 is nan; weights must be finite and not negative"),
            (STATES, [0, 0, 0], "all weights are zero: no update holds any examples"),
            ([STATES[0], {"w": torch.zeros(3)}], [1, 1], "state 1: tensor 'w' has shape (3,) where state 0 has (2,)"),
            ([STATES[0], {}], [1, 1], "state 1: tensor 'w' is missing"),
        ],
    )
    def test_refuses_with_the_whole_reason(self, states, weights, text):
        with pytest.raises(UpdateError) as caught:
            weighted_average(states, weights)
        assert str(caught.value) == text


GLOBAL = {"conv.weight": torch.zeros(2, 3), "conv.bias": torch.zeros(2), "n": torch.tensor(0)}


class TestCheckUpdate:
    @pytest.mark.parametrize(
        "change",
        [
            {"conv.bias": torch.tensor([math.nan, 1.0])},
            {"conv.weight": torch.full((2, 3), math.inf)},
            {"conv.weight": torch.zeros(3, 2)},
            {"conv.bias": torch.zeros(2).double()},
            {"conv.bias": [0.0, 0.0]},
            {"conv.bais": torch.zeros(2)},
            {"a": torch.zeros(1), "b": torch.zeros(1)},
        ],
    )
    def test_refuses_with_the_whole_reason(self, change, snapshot):
        with snapshot.raises(UpdateError, "client 3: ", f"'{next(iter(change))}'"):
            check_update({**GLOBAL, **change}, GLOBAL, who="client 3")

    def test_largest_value(self):
        """1e18 is accepted, on either side of zero, and more is not: its square may overflow."""
        wanted = {"w": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0)}
        check_update({**wanted, "w": torch.tensor([1.0, -1e18, 1e18], dtype=torch.float64)}, wanted, who="c")
        for value in (-1.5e18, 1.5e18):
            with pytest.raises(UpdateError) as caught:
                check_update({**wanted, "w": torch.tensor([1.0, value, 0.0]).double()}, wanted, who="c")
            assert str(caught.value) == "c: tensor 'w' holds 1.5e+18; expected values up to 1e+18"

    def test_missing_tensors(self):
        with pytest.raises(UpdateError) as caught:
            check_update({"n": torch.tensor(0)}, GLOBAL, who="client 0")
        assert str(caught.value) == "client 0: tensor 'conv.weight' is missing, and 1 more"


NOWHERE = {"w": torch.zeros(()), "v": torch.zeros(())}


class TestFigures:
    def test_heterogeneity_sums_over_tensors_and_leaves_others_out(self):
        states = [{**state, "v": 2 * state["w"], "bn": state["w"] * 100} for state in STATES]
        assert drift(states, NOWHERE, ["w", "v"], NOWHERE).heterogeneity == pytest.approx(8.0 * 5)
        assert drift(STATES[:1], NOWHERE, ["w"], NOWHERE).heterogeneity == 0.0

    def test_each_clients_way_is_its_update_norm(self):
        torch.manual_seed(0)
        reference, *states = ({"w": torch.randn(3, 5), "v": torch.randn(7), "bn": torch.randn(7)} for _ in range(4))
        norms = drift(states, reference, ["w", "v"], reference).norms
        assert norms == [update_norm(state, reference, ["w", "v"]) for state in states]
        assert len(set(norms)) == 3

    def test_a_client_that_did_not_move_has_no_direction(self):
        """Such as one that sends the global model back: it must not look as if it worked against the others."""
        states = [{"w": torch.tensor(move)} for move in (0.0, 1.0, 3.0, -2.0)]
        found = drift(states, NOWHERE, ["w"], NOWHERE).cosines
        assert math.isnan(found[0])
        assert found[1:] == [1.0, 1.0, -1.0]

    def test_update_norm(self):
        state = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([5.0]), "n": torch.tensor(9)}
        reference = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}
        assert update_norm(state, reference, ["a", "b"]) == pytest.approx(5.0)


def test_integers_and_truth_values_are_checked_like_numbers() -> None:
    assert value_problem(torch.tensor([True, False])) == value_problem(torch.zeros(0)) == ""
    assert value_problem(torch.tensor([-(2**63)])) == "holds 9.22e+18; expected values up to 1e+18"
    assert value_problem(torch.tensor([-(10**18), 3])) == ""
