from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.aggregators.drift import (
    proximal_gradient,
    proximal_value,
    scaffold_correction,
    scaffold_divisor,
    scaffold_server_step,
    scaffold_server_variate,
    scaffold_variate,
)
from calfat_plugin.errors import OptionError, UpdateError
from calfat_plugin.maths.averaging import displacement, weighted_average

FEW = settings(max_examples=40, deadline=None, derandomize=True)
LR, K = 0.1, 2
GRADIENTS = (lambda w: w, lambda w: 2 * (w - 3))  # of the toy's two clients


class TestFedProx:
    W, ANCHOR = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 1.0])}

    def test_vector(self):
        assert proximal_value(self.W, self.ANCHOR, mu=0.01).item() == pytest.approx(0.00625)
        gradient = proximal_gradient(self.W["w"], self.ANCHOR["w"], mu=0.01)
        assert gradient.tolist() == pytest.approx([0.005, 0.01])

    def test_gradient_is_the_values(self):
        w = {name: torch.randn(3).requires_grad_() for name in ("a", "b")}
        anchor = {name: torch.randn(3) for name in w}
        proximal_value(w, anchor, mu=0.7).backward()
        for name, parameter in w.items():
            assert torch.allclose(parameter.grad, proximal_gradient(parameter, anchor[name], mu=0.7))

    def test_mu_zero_is_fedavg(self):
        assert proximal_value(self.W, self.ANCHOR, mu=0.0).item() == 0.0
        assert proximal_gradient(self.W["w"], self.ANCHOR["w"], mu=0.0).tolist() == [0.0, 0.0]


def scalar(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value], dtype=torch.float64)}


def value(state) -> float:
    return state["w"].item()


def train(start, c, own, gradient, *, momentum=0.0, pairing="after_step"):
    """K local steps of SGD as torch does them, with the correction where ``pairing`` puts it."""
    y, buffer = start["w"].clone(), 0.0
    correction = scaffold_correction(own, c)["w"]
    for _ in range(K):
        g = gradient(y) + (correction if pairing == "gradient" else 0.0)
        buffer = momentum * buffer + g
        y = y - LR * buffer - (LR * correction if pairing == "after_step" else 0.0)
    return {"w": y}


class Toy:
    """Two clients on x0 = 1, as in methods.md 16."""

    def __init__(self, option: str, **training):
        self.x, self.c, self.own = scalar(1.0), scalar(0.0), [scalar(0.0), scalar(0.0)]
        self.option, self.training = option, training
        self.divisor = scaffold_divisor(
            K, momentum=training.get("momentum", 0.0), pairing=training.get("pairing", "after_step")
        )

    def round(self):
        self.y = [
            train(self.x, self.c, own, gradient, **self.training)
            for own, gradient in zip(self.own, GRADIENTS, strict=True)
        ]
        if self.option == "I":
            new = [{"w": gradient(self.x["w"])} for gradient in GRADIENTS]
        else:
            new = [
                scaffold_variate(own, self.c, self.x, y, learning_rate=LR, divisor=self.divisor)
                for own, y in zip(self.own, self.y, strict=True)
            ]
        changes = [displacement(a, b, ["w"]) for a, b in zip(new, self.own, strict=True)]
        steps = [displacement(y, self.x, ["w"]) for y in self.y]
        self.c = scaffold_server_variate(self.c, changes, num_clients=2)
        self.x, self.own = scaffold_server_step(self.x, steps), new
        return self


class TestScaffold:
    def test_option_two_vector(self):
        toy = Toy("II").round()
        assert [value(y) for y in toy.y] == pytest.approx([0.81, 1.72])
        assert value(toy.x) == pytest.approx(1.265)
        assert value(toy.c) == pytest.approx(-1.325)
        assert [value(c) for c in toy.own] == pytest.approx([0.95, -3.6])
        toy.round()
        assert [value(y) for y in toy.y] == pytest.approx([1.4569, 1.4801])
        assert value(toy.x) == pytest.approx(1.4685)
        assert value(toy.c) == pytest.approx(-1.0175)
        assert [value(c) for c in toy.own] == pytest.approx([1.3155, -3.3505])
        assert value(toy.round().x) == pytest.approx(1.6163275)

    def test_option_one_vector(self):
        toy = Toy("I").round()
        assert value(toy.x) == pytest.approx(1.265)
        assert value(toy.c) == pytest.approx(-1.5)
        assert [value(c) for c in toy.own] == pytest.approx([1.0, -4.0])
        toy.round()
        assert value(toy.x) == pytest.approx(1.469625)
        assert [value(c) for c in toy.own] == pytest.approx([1.265, -3.47])

    @pytest.mark.parametrize(
        ("pairing", "variates"),
        [("after_step", [1.4, -5.4]), ("gradient", [0.965517, -3.724138])],
    )
    def test_momentum_vector(self, pairing, variates):
        toy = Toy("II", momentum=0.9, pairing=pairing).round()
        assert [value(y) for y in toy.y] == pytest.approx([0.72, 2.08])
        assert value(toy.x) == pytest.approx(1.4)
        assert [value(c) for c in toy.own] == pytest.approx(variates, abs=1e-6)

    @pytest.mark.parametrize(("pairing", "limit"), [("gradient", 2.0), ("after_step", 2.011765)])
    def test_momentum_pairings_converge(self, pairing, limit):
        # The joint optimum of w and 2 (w - 3) is 2, and plain averaging of these clients with
        # momentum stops at 1.62 / 0.82 = 1.9756. Only a correction inside the gradient is exact.
        toy = Toy("II", momentum=0.9, pairing=pairing)
        for _ in range(200):
            toy.round()
        assert value(toy.x) == pytest.approx(limit, abs=1e-6)

    def test_divisors(self):
        assert scaffold_divisor(2, momentum=0.9) == 2.0
        assert scaffold_divisor(2, momentum=0.9, pairing="gradient") == pytest.approx(2.9)
        assert scaffold_divisor(7, momentum=0.0, pairing="gradient") == 7.0
        ratios = [scaffold_divisor(k, momentum=0.9, pairing="gradient") / k for k in (10, 50, 100)]
        assert ratios == pytest.approx([4.1, 8.2, 9.1], abs=0.06)

    def test_first_round_is_fedavg(self):
        toy = Toy("II").round()
        plain = [train(scalar(1.0), scalar(0.0), scalar(0.0), g) for g in GRADIENTS]
        assert value(toy.x) == pytest.approx(value(weighted_average(plain, [1, 1])))

    @pytest.mark.parametrize("option", ["I", "II"])
    def test_server_variate_stays_the_mean_under_full_participation(self, option):
        toy = Toy(option)
        for _ in range(4):
            toy.round()
            assert value(toy.c) == pytest.approx(sum(value(c) for c in toy.own) / 2)

    @FEW
    @given(
        st.lists(st.floats(-5, 5), min_size=5, max_size=5),
        st.lists(st.floats(-5, 5), min_size=2, max_size=2),
    )
    def test_server_variate_stays_the_mean_under_partial_participation(self, variates, changes):
        c = scalar(sum(variates) / 5)
        updated = scaffold_server_variate(c, [scalar(d) for d in changes], num_clients=5)
        assert value(updated) == pytest.approx((sum(variates) + sum(changes)) / 5)

    def test_server_rate_scales_the_mean_step(self):
        moved = scaffold_server_step(scalar(1.0), [scalar(2.0), scalar(4.0)], server_lr=0.5)
        assert value(moved) == pytest.approx(2.5)

    def test_server_neither_touches_nor_shares_its_inputs(self):
        x = scalar(1.0)
        scaffold_server_step(x, [scalar(2.0)])["w"].fill_(9)
        scaffold_server_variate(x, [], num_clients=3)["w"].fill_(9)
        assert value(x) == 1.0

    def test_keeps_float32(self):
        x = {"w": torch.ones(2)}
        assert scaffold_server_step(x, [{"w": torch.ones(2)}])["w"].dtype == torch.float32

    def test_refuses_unknown_pairings(self):
        with pytest.raises(OptionError) as caught:
            scaffold_divisor(2, momentum=0.9, pairing="gradients")
        assert str(caught.value) == (
            "pairing must be after_step or gradient; got 'gradients'. Did you mean 'gradient'?"
        )

    def test_refuses_no_steps(self):
        with pytest.raises(UpdateError) as caught:
            scaffold_divisor(0, momentum=0.9)
        assert str(caught.value) == ("SCAFFOLD needs at least one local step to measure a variate; got 0")
