from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.errors import OptionError
from calfat_plugin.maths.losses import cross_entropy, kl_divergence
from calfat_plugin.modifiers.priors import PAPER, log_frequencies
from calfat_plugin.trainers.losses_methods import (
    adversarial_mask,
    gairat_lambda,
    gairat_loss,
    gairat_weights,
    mart_loss,
    mart_margin,
    mart_regulariser,
    mixed_batch,
    trades_loss,
)

FEW = settings(max_examples=40, deadline=None, derandomize=True)
Z = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.2, -0.3, 1.5, 0.1]])
Z_ADV = torch.tensor([[0.5, 2.5, 0.0, -0.5], [0.6, 0.1, 0.4, 0.3]])
Y = torch.tensor([0, 2])
B = log_frequencies(torch.tensor([50, 30, 20, 0]))
SEEDS = st.integers(0, 10**6)


def near(values, abs: float = 1e-4):
    return pytest.approx(values, abs=abs)


def logits_pair(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        3 * torch.randn(8, 6, generator=generator),
        3 * torch.randn(8, 6, generator=generator),
        torch.randint(0, 6, (8,), generator=generator),
    )


class TestTrades:
    def test_vector(self):
        assert cross_entropy(Z, Y).item() == near(1.008304)
        assert kl_divergence(Z, Z_ADV).item() == near(0.176344)
        assert trades_loss(Z, Z_ADV, Y, beta=6.0).item() == near(2.066370)

    def test_with_calibration(self):
        clean, adv = PAPER.outer(Z, B), PAPER.inner(Z_ADV, B)
        assert cross_entropy(clean, Y).item() == near(0.856353)
        assert kl_divergence(clean, adv).item() == near(0.187662)
        assert trades_loss(clean, adv, Y).item() == near(1.982322)

    @FEW
    @given(SEEDS)
    def test_beta_zero_is_clean_cross_entropy(self, seed):
        nat, adv, y = logits_pair(seed)
        assert trades_loss(nat, adv, y, beta=0.0).item() == cross_entropy(nat, y).item()

    def test_gradients_flow_through_both_branches(self):
        nat, adv = Z.double().requires_grad_(), Z_ADV.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: trades_loss(a, b, Y), (nat, adv))


class TestMart:
    def test_vector(self):
        bce = cross_entropy(Z_ADV, Y) + mart_margin(Z_ADV, Y)
        assert bce.item() == near(2.762405)
        assert mart_regulariser(Z, Z_ADV, Y).item() == near(0.090465)
        assert mart_loss(Z, Z_ADV, Y, lam=6.0).item() == near(3.305194)
        assert mart_loss(Z, Z_ADV, Y, lam=5.0).item() == near(3.214729)

    def test_runner_up_classes_of_the_vector(self):
        # k* = [1, 0]: only their probabilities may matter to the margin.
        adv = Z_ADV.clone().requires_grad_()
        p_adv = adv.softmax(1)
        expected = -(1.0001 - p_adv[[0, 1], [1, 0]]).log()
        assert mart_margin(adv, Y, "none").tolist() == near(expected.tolist(), abs=1e-6)

    def test_with_calibration(self):
        nat, adv = Z + B, Z_ADV + B
        bce = cross_entropy(adv, Y) + mart_margin(adv, Y)
        assert bce.item() == near(2.895514)
        assert mart_regulariser(nat, adv, Y).item() == near(0.100025)
        assert mart_loss(nat, adv, Y).item() == near(3.495665)

    def test_ties_go_to_the_lowest_class(self):
        adv = torch.zeros(1, 4).requires_grad_()
        mart_margin(adv, torch.tensor([0])).backward()
        assert adv.grad.argmax().item() == 1

    def test_stays_finite_where_probabilities_are_zero_and_one(self):
        nat = torch.tensor([[300.0, 0.0], [0.0, 300.0]]).requires_grad_()
        adv = torch.tensor([[0.0, 300.0], [0.0, 300.0]]).requires_grad_()
        loss = mart_loss(nat, adv, torch.tensor([0, 0]))
        loss.backward()
        assert loss.isfinite()
        assert nat.grad.isfinite().all()
        assert adv.grad.isfinite().all()

    def test_a_batch_of_one(self):
        assert mart_loss(Z[:1], Z_ADV[:1], Y[:1]).shape == ()

    def test_gradients_flow_through_both_branches(self):
        nat, adv = Z.double().requires_grad_(), Z_ADV.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: mart_loss(a, b, Y), (nat, adv))


class TestGairat:
    KAPPA = torch.tensor([0, 2, 4, 5, 7, 10])

    def test_tanh_vector(self):
        weights = gairat_weights(self.KAPPA, 10, lam=-1.0)
        raw = [0.999665, 0.982014, 0.5, 0.119203, 0.002473, 6.14e-6]
        expected = [2.303941, 2.263261, 1.152357, 0.274729, 0.005699, 1.4e-5]
        assert weights.tolist() == near(expected)
        assert (weights * sum(raw) / len(raw)).tolist() == near(raw)
        assert weights[5].item() == pytest.approx(6.14e-6 * 6 / sum(raw), rel=1e-3)

    def test_lambda_zero_vector(self):
        weights = gairat_weights(torch.tensor([0, 5, 10]), 10, lam=0.0)
        assert weights.tolist() == near([1.999909, 1.0, 9.1e-5])

    @pytest.mark.parametrize("weighting", ["tanh", "sigmoid", "discrete"])
    def test_lambda_infinite_is_plain_adversarial_training(self, weighting):
        weights = gairat_weights(self.KAPPA, 10, lam=math.inf, weighting=weighting)
        assert weights.tolist() == [1.0] * 6
        each = torch.tensor([0.3, 1.2, 5.0, 0.1, 0.0, 2.0])
        assert gairat_loss(each, weights).item() == each.mean().item()

    @pytest.mark.parametrize("lam", [-1.0, 0.0, -300.0])
    @pytest.mark.parametrize("weighting", ["tanh", "sigmoid", "discrete"])
    def test_equal_kappa_weigh_equally_and_never_underflow(self, weighting, lam):
        weights = gairat_weights(torch.tensor([10, 10, 10]), 10, lam=lam, weighting=weighting)
        assert weights.tolist() == near([1.0, 1.0, 1.0], abs=1e-6)

    def test_other_weightings(self):
        kappa = torch.tensor([0, 5, 10])
        logistic = [1 / (1 + math.exp(-a)) for a in (4.0, -1.0, -6.0)]
        expected = [3 * w / sum(logistic) for w in logistic]
        assert gairat_weights(kappa, 10, weighting="sigmoid").tolist() == near(expected)
        expected = [3 * w / 18 for w in (11, 6, 1)]
        assert gairat_weights(kappa, 10, weighting="discrete").tolist() == near(expected)

    def test_odd_steps_round_down(self):
        raw = [(1 + math.tanh(-1 + 5 * (2 - k) / 2)) / 2 for k in (0, 3, 5)]
        expected = [3 * w / sum(raw) for w in raw]
        assert gairat_weights(torch.tensor([0, 3, 5]), 5).tolist() == near(expected)

    def test_loss_vector(self):
        weights = gairat_weights(torch.tensor([0, 10]), 10, lam=-1.0)
        assert gairat_loss(cross_entropy(Z_ADV, Y, "none"), weights).item() == near(2.236810)

    def test_no_gradient_through_the_weights(self):
        weights = torch.ones(2, requires_grad=True)
        each = torch.ones(2, requires_grad=True)
        gairat_loss(each, weights).backward()
        assert weights.grad is None
        assert each.grad.tolist() == [0.5, 0.5]

    @FEW
    @given(st.lists(st.integers(0, 10), min_size=1, max_size=20), st.floats(-5, 5))
    def test_weights_sum_to_the_batch_and_fall_with_kappa(self, kappa, lam):
        weights = gairat_weights(torch.tensor(sorted(kappa)), 10, lam=lam)
        assert weights.sum().item() == pytest.approx(len(kappa), rel=1e-5)
        assert (weights.diff() <= 0).all()

    def test_schedule(self):
        assert [gairat_lambda(r) for r in (1, 59, 60, 150)] == [math.inf, math.inf, -1.0, -1.0]
        assert gairat_lambda(1, start_round=1, lam=0.5) == 0.5

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (
                {"weighting": "tahn"},
                "weighting must be tanh, sigmoid or discrete; got 'tahn'. Did you mean 'tanh'?",
            ),
            ({"lam": math.nan}, "lam must be a finite number or +inf; got nan"),
            ({"lam": -math.inf}, "lam must be a finite number or +inf; got -inf"),
            (
                {"steps": 1},
                "GAIRAT's tanh weighting divides by half the attack's steps, rounded down, "
                "so it needs at least 2 steps; got 1",
            ),
        ],
    )
    def test_refuses_with_the_whole_reason(self, options, text):
        with pytest.raises(OptionError) as caught:
            gairat_weights(self.KAPPA, **{"steps": 10, **options})
        assert str(caught.value) == text


class TestMixing:
    def test_vector(self):
        mixed = mixed_batch(Z, Z_ADV, torch.tensor([True, False]))
        assert cross_entropy(mixed, Y).item() == near(1.379121)
        assert cross_entropy(mixed + B, Y).item() == near(1.196701)

    @FEW
    @given(st.integers(0, 300), st.integers(0, 100), SEEDS)
    def test_chooses_exactly_the_share(self, size, percent, seed):
        mask = adversarial_mask(size, percent / 100, torch.Generator().manual_seed(seed))
        assert mask.shape == (size,)
        assert int(mask.sum()) == size * percent // 100

    def test_rounding_does_not_cost_an_example(self):
        assert 0.29 * 100 < 29
        assert int(adversarial_mask(100, 0.29, torch.Generator()).sum()) == 29

    def test_ratio_one_is_fedpgd_and_zero_is_standard_training(self):
        x_nat, x_adv = torch.zeros(5, 1, 2, 2), torch.ones(5, 1, 2, 2)
        generator = torch.Generator().manual_seed(0)
        assert torch.equal(mixed_batch(x_nat, x_adv, adversarial_mask(5, 1.0, generator)), x_adv)
        assert torch.equal(mixed_batch(x_nat, x_adv, adversarial_mask(5, 0.0, generator)), x_nat)

    def test_choice_is_random_and_reproducible(self):
        def draw(seed):
            return adversarial_mask(100, 0.5, torch.Generator().manual_seed(seed))

        assert torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))

    @pytest.mark.parametrize("ratio", [-0.1, 1.5, math.nan])
    def test_refuses_other_ratios(self, ratio):
        with pytest.raises(OptionError) as caught:
            adversarial_mask(4, ratio, torch.Generator())
        assert str(caught.value) == f"ratio must lie in [0, 1]; got {ratio:g}"
