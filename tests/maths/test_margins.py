from __future__ import annotations

import math

import pytest
import torch

from calfat_plugin.maths.losses import cross_entropy, kl_divergence
from calfat_plugin.modifiers.margins import (
    ROBAL_N_CIFAR10,
    ROBAL_N_CIFAR100,
    ROBAL_R_CIFAR10,
    ROBAL_R_CIFAR100,
    adjusted_logits,
    cosine_logits,
    fedlc_margins,
    fedrs_factors,
    gear_margins,
    subtract_at_label,
)
from calfat_plugin.modifiers.priors import PAPER, log_frequencies

F = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
COSINES = torch.tensor([[0.3, 0.5, 0.1, -0.2]])
COUNTS = torch.tensor([50, 30, 20, 10])
ONE_MISSING = torch.tensor([50, 30, 20, 0])
LOG_PI = log_frequencies(COUNTS)


def label(y: int) -> torch.Tensor:
    return torch.tensor([y])


def near(values, abs: float = 1e-4):
    return pytest.approx(values, abs=abs)


def test_subtract_at_label_touches_the_true_class_only():
    logits, margins = torch.ones(2, 3), torch.tensor([0.1, 0.2, 0.3])
    shifted = subtract_at_label(logits, torch.tensor([2, 0]), margins)
    assert shifted.flatten().tolist() == near([1, 1, 0.7, 0.9, 1, 1])
    assert torch.equal(logits, torch.ones(2, 3))


class TestLogitAdj:
    def test_vector(self):
        assert cross_entropy(adjusted_logits(F, LOG_PI), label(0)).item() == near(1.064934)

    def test_tau_one_is_cce(self):
        assert torch.equal(adjusted_logits(F, LOG_PI), PAPER.outer(F, LOG_PI))

    def test_tau_zero_is_plain(self):
        assert torch.equal(adjusted_logits(F, LOG_PI, tau=0.0), F)

    def test_closed_form(self):
        tau, z, pi = 0.7, F[0], COUNTS / COUNTS.sum()
        others = sum((pi[k] / pi[0]) ** tau * math.exp(z[k] - z[0]) for k in (1, 2, 3))
        loss = cross_entropy(adjusted_logits(F, LOG_PI, tau=tau), label(0))
        assert loss.item() == near(math.log(1 + others))

    def test_trades_vector(self):
        nat = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.2, -0.3, 1.5, 0.1]])
        adv = torch.tensor([[0.5, 2.5, 0.0, -0.5], [0.6, 0.1, 0.4, 0.3]])
        outer = cross_entropy(adjusted_logits(nat, log_frequencies(ONE_MISSING)), torch.tensor([0, 2]))
        assert (outer + 6 * kl_divergence(nat, adv)).item() == near(1.914419)


class TestRoBal:
    def test_margins_vector(self):
        expected = [0.148283, 0.132958, 0.120794, 0.1]
        assert ROBAL_R_CIFAR10.margins(COUNTS).tolist() == near(expected, abs=1e-6)

    @pytest.mark.parametrize(
        ("variant", "y", "value"),
        [
            (ROBAL_R_CIFAR10, 0, 2.790071),
            (ROBAL_N_CIFAR10, 0, 2.485412),
            (ROBAL_R_CIFAR10, 3, 9.911228),
        ],
    )
    def test_loss_vector(self, variant, y, value):
        logits = variant.logits(COSINES, label(y), variant.margins(COUNTS), LOG_PI)
        assert cross_entropy(logits, label(y)).item() == near(value)

    def test_constants_of_the_variants(self):
        def constants(v):
            return v.scale, v.m0, v.tau_b, v.tau_m, v.kl_weight, v.gamma

        assert constants(ROBAL_R_CIFAR10) == (10, 0.1, 1.5, 0.3, 6, 1 / 32)
        assert constants(ROBAL_N_CIFAR10) == (10, 0.1, 1.2, 0, 6, 1 / 32)
        assert constants(ROBAL_R_CIFAR100) == (10, 0.3, 0, 0, 6, 1 / 16)
        assert constants(ROBAL_N_CIFAR100) == (10, 0.2, 0, 0, 3, 1 / 32)

    def test_a_missing_class_leaves_the_margins_finite(self):
        # n_min is 20, of the classes present: log(50/20), log(30/20), 0, and m0 for the missing
        # one.
        margins = ROBAL_R_CIFAR10.margins(ONE_MISSING)
        expected = [0.1 + 0.03 * math.log(2.5), 0.1 + 0.03 * math.log(1.5), 0.1, 0.1]
        assert margins.tolist() == near(expected, abs=1e-6)

    def test_cosine_classifier(self):
        weight, features = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0]])
        cosines = cosine_logits(features, weight, gamma=1.0)
        assert cosines.flatten().tolist() == near([3 / 6, 0.0])
        assert torch.allclose(cosine_logits(7 * features, weight, gamma=1.0), cosines)
        assert cosine_logits(torch.zeros(1, 2), weight).tolist() == [[0.0, 0.0]]

    def test_changes_nothing_in_place(self):
        cosines = COSINES.clone()
        ROBAL_R_CIFAR10.logits(cosines, label(0), ROBAL_R_CIFAR10.margins(COUNTS), LOG_PI).add_(1)
        assert torch.equal(cosines, COSINES)


class TestFedLC:
    @pytest.mark.parametrize(("tau", "value"), [(1.0, 1.445845), (0.5, 1.470339)])
    def test_vector(self, tau, value):
        logits = F - fedlc_margins(COUNTS, tau=tau)
        assert cross_entropy(logits, label(0)).item() == near(value)

    def test_a_missing_class_leaves_the_softmax(self):
        margins = fedlc_margins(ONE_MISSING, tau=0.5)
        assert margins[3].item() == near(50.0)
        assert (F - margins).softmax(1)[0, 3].item() < 1e-20


class TestGear:
    def test_vector(self):
        margins = gear_margins(COUNTS, delta=0.5)
        assert margins.tolist() == near([0.334370, 0.379918, 0.420448, 0.5])
        logits = subtract_at_label(F, label(0), margins)
        assert cross_entropy(logits, label(0)).item() == near(1.763709)

    def test_a_missing_class_leaves_the_margins_finite(self):
        expected = [0.5 * (20 / n) ** 0.25 for n in (50, 30, 20)] + [0.5]
        assert gear_margins(ONE_MISSING, delta=0.5).tolist() == near(expected)


class TestFedRS:
    def test_scales_absent_classes_only(self):
        factors = fedrs_factors(torch.tensor([50, 3, 2, 0]), alpha=0.5)
        assert factors.tolist() == [1.0, 1.0, 0.5, 0.5]
        assert (F * factors).tolist() == [[1.0, 2.0, 0.25, -0.5]]

    def test_alpha_one_is_plain(self):
        assert fedrs_factors(ONE_MISSING, alpha=1.0).tolist() == [1.0] * 4
