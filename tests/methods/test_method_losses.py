"""The parts of MART's and GAIRAT's losses, MixFAT's draw and the modifiers' margins, on given numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.modifiers.counts import subtract_at_label
from calfat_plugin.modifiers.robal import cosine_logits
from calfat_plugin.trainers.base import random_share
from calfat_plugin.trainers.fedgairat import example_weights
from calfat_plugin.trainers.fedmart import margin, regulariser
from tests.methods.helpers import COUNTS, Z_ADV, Z_NAT, F, Y, build_method, build_modifier, train_batch

FEW = settings(max_examples=40, deadline=None, derandomize=True)


def near(values, abs: float = 1e-4):
    return pytest.approx(values, abs=abs)


class TestTrades:
    def test_gradients_flow_through_both_branches(self):
        method = build_method("fedtrades")
        batch = train_batch(method.bind_loss(COUNTS))
        batch.model.double()

        def loss(rows):
            batch.logits_nat, batch.logits_adv = rows[:2], rows[2:]
            return method.train_loss(batch)

        assert torch.autograd.gradcheck(loss, torch.cat([Z_NAT, Z_ADV]).double().requires_grad_())


class TestMart:
    def test_runner_up_classes_of_the_vector(self):
        # k* = [1, 0]: only their probabilities may matter to the margin.
        expected = -(1.0001 - Z_ADV.softmax(1)[[0, 1], [1, 0]]).log()
        assert margin(Z_ADV, Y).item() == near(expected.mean().item(), abs=1e-6)

    def test_ties_go_to_the_lowest_class(self):
        adv = torch.zeros(1, 4).requires_grad_()
        margin(adv, torch.tensor([0])).backward()
        assert adv.grad.argmax().item() == 1

    def test_stays_finite_where_probabilities_are_zero_and_one(self):
        nat = torch.tensor([[300.0, 0.0], [0.0, 300.0]]).requires_grad_()
        adv = torch.tensor([[0.0, 300.0], [0.0, 300.0]]).requires_grad_()
        y = torch.tensor([0, 0])
        loss = margin(adv, y) + regulariser(nat, adv, y)
        loss.backward()
        assert loss.isfinite()
        assert nat.grad.isfinite().all()
        assert adv.grad.isfinite().all()

    def test_gradients_flow_through_both_branches(self):
        nat, adv = Z_NAT.double().requires_grad_(), Z_ADV.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: margin(b, Y) + regulariser(a, b, Y), (nat, adv))


class TestGairat:
    KAPPA = torch.tensor([0, 2, 4, 5, 7, 10])

    def test_tanh_vector(self):
        weights = example_weights(self.KAPPA, 10, -1.0, "tanh")
        raw = [0.999665, 0.982014, 0.5, 0.119203, 0.002473, 6.14e-6]
        expected = [2.303941, 2.263261, 1.152357, 0.274729, 0.005699, 1.4e-5]
        assert weights.tolist() == near(expected)
        assert (weights * sum(raw) / len(raw)).tolist() == near(raw)
        assert weights[5].item() == pytest.approx(6.14e-6 * 6 / sum(raw), rel=1e-3)

    def test_lambda_zero_vector(self):
        weights = example_weights(torch.tensor([0, 5, 10]), 10, 0.0, "tanh")
        assert weights.tolist() == near([1.999909, 1.0, 9.1e-5])

    @pytest.mark.parametrize("weighting", ["tanh", "sigmoid", "discrete"])
    def test_lambda_infinite_weighs_all_alike(self, weighting):
        assert example_weights(self.KAPPA, 10, math.inf, weighting).tolist() == [1.0] * 6

    @pytest.mark.parametrize("lam", [-1.0, 0.0, -300.0])
    @pytest.mark.parametrize("weighting", ["tanh", "sigmoid", "discrete"])
    def test_equal_kappa_weigh_equally_and_never_underflow(self, weighting, lam):
        weights = example_weights(torch.tensor([10, 10, 10]), 10, lam, weighting)
        assert weights.tolist() == near([1.0, 1.0, 1.0], abs=1e-6)

    def test_other_weightings(self):
        kappa = torch.tensor([0, 5, 10])
        logistic = [1 / (1 + math.exp(-a)) for a in (4.0, -1.0, -6.0)]
        expected = [3 * w / sum(logistic) for w in logistic]
        assert example_weights(kappa, 10, -1.0, "sigmoid").tolist() == near(expected)
        expected = [3 * w / 18 for w in (11, 6, 1)]
        assert example_weights(kappa, 10, -1.0, "discrete").tolist() == near(expected)

    def test_odd_steps_round_down(self):
        raw = [(1 + math.tanh(-1 + 5 * (2 - k) / 2)) / 2 for k in (0, 3, 5)]
        expected = [3 * w / sum(raw) for w in raw]
        assert example_weights(torch.tensor([0, 3, 5]), 5, -1.0, "tanh").tolist() == near(expected)

    @FEW
    @given(st.lists(st.integers(0, 10), min_size=1, max_size=20), st.floats(-5, 5))
    def test_weights_sum_to_the_batch_and_fall_with_kappa(self, kappa, lam):
        weights = example_weights(torch.tensor(sorted(kappa)), 10, lam, "tanh")
        assert weights.sum().item() == pytest.approx(len(kappa), rel=1e-5)
        assert (weights.diff() <= 0).all()


class TestMixing:
    @FEW
    @given(st.integers(0, 300), st.integers(0, 100), st.integers(0, 10**6))
    def test_chooses_exactly_the_share(self, size, percent, seed):
        mask = random_share(size, percent / 100, torch.Generator().manual_seed(seed))
        assert mask.shape == (size,)
        assert int(mask.sum()) == size * percent // 100

    def test_a_share_that_floating_point_makes_smaller_is_the_one_that_was_meant(self):
        assert 0.29 * 100 < 29
        assert int(random_share(100, 0.29, torch.Generator()).sum()) == 29

    def test_choice_is_random_and_reproducible(self):
        def draw(seed):
            return random_share(100, 0.5, torch.Generator().manual_seed(seed))

        assert torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))


class TestMargins:
    """Of the modifiers, beside the losses in test_loss_table.py."""

    TAIL = torch.tensor([50, 30, 20, 10])

    def test_subtract_at_label_touches_the_true_class_only(self):
        logits, margins = torch.ones(2, 3), torch.tensor([0.1, 0.2, 0.3])
        shifted = subtract_at_label(logits, torch.tensor([2, 0]), margins)
        assert shifted.flatten().tolist() == near([1, 1, 0.7, 0.9, 1, 1])
        assert torch.equal(logits, torch.ones(2, 3))

    def test_robal(self):
        assert build_modifier("robal").bind(self.TAIL).margins.tolist() == near([0.148283, 0.132958, 0.120794, 0.1])
        # n_min is 20, of the classes present: log(50/20), log(30/20), 0, and m0 for the missing one.
        expected = [0.1 + 0.03 * math.log(2.5), 0.1 + 0.03 * math.log(1.5), 0.1, 0.1]
        assert build_modifier("robal").bind(COUNTS).margins.tolist() == near(expected, abs=1e-6)

    def test_robals_cosine_classifier(self):
        weight, features = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0]])
        cosines = cosine_logits(features, weight, gamma=1.0)
        assert cosines.flatten().tolist() == near([3 / 6, 0.0])
        assert torch.allclose(cosine_logits(7 * features, weight, gamma=1.0), cosines)
        assert cosine_logits(torch.zeros(1, 2), weight, gamma=1 / 32).tolist() == [[0.0, 0.0]]

    def test_gear(self):
        gear = build_modifier("gear", delta=0.5)
        assert gear.bind(self.TAIL).margins.tolist() == near([0.334370, 0.379918, 0.420448, 0.5])
        expected = [0.5 * (20 / n) ** 0.25 for n in (50, 30, 20)] + [0.5]
        assert gear.bind(COUNTS).margins.tolist() == near(expected)

    def test_fedrs_scales_missing_classes_only(self):
        counts = torch.tensor([50, 3, 2, 0])
        assert build_modifier("fedrs", alpha=0.5).bind(counts).factors.tolist() == [1.0, 1.0, 0.5, 0.5]
        assert build_modifier("fedrs", alpha=1.0).bind(counts).factors.tolist() == [1.0] * 4

    def test_logitadj_in_closed_form(self):
        tau, z, pi = 0.7, F[0], self.TAIL / self.TAIL.sum()
        others = sum((pi[k] / pi[0]) ** tau * math.exp(z[k] - z[0]) for k in (1, 2, 3))
        loss = build_modifier("logitadj", tau=tau, delta=1e-9).bind(self.TAIL).cross_entropy(F, torch.tensor([0]))
        assert loss.item() == near(math.log(1 + others))
