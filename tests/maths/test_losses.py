from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.maths.losses import cross_entropy, falling, kl_divergence
from calfat_plugin.modifiers.calibrated import CalibratedLoss, CalibrationOptions
from calfat_plugin.modifiers.counts import log_counts, log_frequencies

FEW = settings(max_examples=40, deadline=None, derandomize=True)
F = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
F_ADV = torch.tensor([[0.5, 2.5, 0.0, -0.5]])
COUNTS = torch.tensor([50, 30, 20, 0])
Z = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.2, -0.3, 1.5, 0.1]])
Z_ADV = torch.tensor([[0.5, 2.5, 0.0, -0.5], [0.6, 0.1, 0.4, 0.3]])
Y = torch.tensor([0, 2])


PAPER = CalibrationOptions(delta=1e-6)  # the floor of the vectors
RELEASE = CalibrationOptions(parameterisation="release")


def inner(options: CalibrationOptions, z: torch.Tensor, counts: torch.Tensor = COUNTS) -> torch.Tensor:
    return CalibratedLoss(options, counts).kl_logits(z)


def outer(options: CalibrationOptions, z: torch.Tensor, counts: torch.Tensor = COUNTS) -> torch.Tensor:
    return CalibratedLoss(options, counts).margin_logits(z)


def label(y: int) -> torch.Tensor:
    return torch.tensor([y])


def near(values, abs: float = 1e-4):
    return pytest.approx(values, abs=abs)


def random_logits(seed: int, rows: int = 8, classes: int = 6, size: float = 3.0) -> torch.Tensor:
    return size * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))


SEEDS = st.integers(0, 10**6)
COUNT_LISTS = st.lists(st.integers(0, 5000), min_size=6, max_size=6).filter(any)


class TestCrossEntropy:
    def test_reductions(self):
        assert cross_entropy(Z, Y).item() == near(1.008304)
        assert cross_entropy(Z, Y, "none").tolist() == near([1.495182, 0.521426])
        assert cross_entropy(Z_ADV, Y).item() == near(1.794655)
        assert cross_entropy(Z_ADV, Y, "none").tolist() == near([2.236815, 1.352494])
        assert cross_entropy(Z_ADV, Y, "sum").item() == near(2 * 1.794655)

    def test_gradient_vector(self):
        logits = F.clone().requires_grad_()
        cross_entropy(logits, label(0)).backward()
        assert logits.grad.tolist() == [near([-0.775792, 0.609460, 0.135989, 0.030343])]

    def test_half_precision_is_computed_in_float32(self):
        assert cross_entropy(F.half(), label(0)).dtype == torch.float32


class TestCalibration:
    def test_gradient_vector(self):
        logits = F.clone().requires_grad_()
        cross_entropy(outer(PAPER, logits), label(0)).backward()
        assert logits.grad.tolist() == [near([-0.652003, 0.567574, 0.084429, 9.4e-8])]
        assert logits.grad[0, 3].item() == pytest.approx(9.4e-8, rel=0.01)

    def test_priors(self):
        assert log_counts(COUNTS).exp().tolist() == near([50, 30, 20, 1])
        assert log_frequencies(COUNTS, delta=1e-6).exp().tolist() == near([0.5, 0.3, 0.2, 1e-6], abs=2e-6)
        assert log_frequencies(COUNTS, delta=1e-6)[3].item() == near(math.log(1e-6))

    def test_the_usual_floor_follows_the_size_of_the_client(self):
        assert log_frequencies(COUNTS).exp().tolist() == near([0.51, 0.31, 0.21, 0.01], abs=1e-6)
        assert log_frequencies(10 * COUNTS).exp().tolist() == near([0.501, 0.301, 0.201, 0.001], abs=1e-6)
        assert log_frequencies(0 * COUNTS).tolist() == [0, 0, 0, 0]

    def test_without_a_floor_cross_entropy_is_inf_and_the_divergence_nan(self):
        bare = log_frequencies(COUNTS, delta=0.0)
        assert cross_entropy(F + bare, label(0)).item() == near(1.055559)
        assert cross_entropy(F + bare, label(3)).item() == math.inf
        assert kl_divergence(F + bare, F_ADV + bare).isnan()

    def test_changes_nothing_in_place(self):
        logits = F.clone()
        for options in (PAPER, RELEASE):
            loss = CalibratedLoss(options, COUNTS)
            prior = loss.log_prior.clone()
            loss.margin_logits(logits).add_(1)
            loss.kl_logits(logits).add_(1)
            assert torch.equal(loss.log_prior, prior)
        assert torch.equal(logits, F)

    @FEW
    @given(SEEDS, COUNT_LISTS, st.floats(1e-3, 1e3))
    def test_the_priors_scale_does_not_matter(self, seed, counts, factor):
        z, z_adv, y = random_logits(seed), random_logits(seed + 1), torch.arange(8) % 6
        prior = log_frequencies(torch.tensor(counts))
        scaled = prior + math.log(factor)
        for loss, other in ((cross_entropy, y), (kl_divergence, z_adv + prior)):
            one = loss(z + prior, other)
            two = loss(z + scaled, other)
            assert one.item() == pytest.approx(two.item(), rel=1e-5, abs=1e-4)

    @FEW
    @given(SEEDS, COUNT_LISTS)
    def test_release_divergence_is_at_temperature_ten(self, seed, counts):
        z, z_adv = random_logits(seed).double(), random_logits(seed + 1).double()
        prior = CalibratedLoss(RELEASE, torch.tensor(counts)).log_prior
        hard = kl_divergence(*(inner(RELEASE, logits, torch.tensor(counts)) for logits in (z, z_adv)))
        softened = kl_divergence((10 * z + prior) / 10, (10 * z_adv + prior) / 10)
        assert hard.item() == near(softened.item(), abs=1e-5)


class TestDivergence:
    def test_vectors(self):
        assert kl_divergence(F, F_ADV).item() == near(0.101830)
        assert kl_divergence(inner(PAPER, F), inner(PAPER, F_ADV)).item() == near(0.113122)
        assert kl_divergence(inner(RELEASE, F), inner(RELEASE, F_ADV)).item() == near(0.103125)

    @pytest.mark.parametrize("trained_target", [False, True])
    def test_reductions(self, trained_target):
        target = Z.clone().requires_grad_(trained_target)
        assert kl_divergence(target, Z_ADV).item() == near((0.101830 + 0.250858) / 2)
        assert kl_divergence(target, Z_ADV, "sum").item() == near(0.101830 + 0.250858)

    @FEW
    @given(SEEDS)
    def test_gradient_is_that_of_the_soft_cross_entropy(self, seed):
        """CKL as the paper writes it, -sum p log q, differs from the divergence by the entropy of p."""
        target = random_logits(seed)
        one, two = (random_logits(seed + 1).requires_grad_() for _ in range(2))
        kl_divergence(target, one).backward()
        torch.nn.functional.cross_entropy(two, target.softmax(1)).backward()
        assert torch.allclose(one.grad, two.grad, atol=1e-6)

    def test_gradient_is_zero_where_both_are_equal(self):
        logits = F.clone().requires_grad_()
        kl_divergence(F, logits, "sum").backward()
        assert logits.grad.abs().max().item() < 1e-7

    def test_gradient_flows_through_the_target(self):
        target, adv = Z.double().requires_grad_(), Z_ADV.double().requires_grad_()
        assert torch.autograd.gradcheck(kl_divergence, (target, adv))

    def test_gradient_survives_probabilities_that_underflow(self):
        target = torch.tensor([[0.0, -300.0]]).requires_grad_()
        kl_divergence(target, torch.zeros(1, 2)).backward()
        assert target.grad.isfinite().all()


@pytest.mark.parametrize(
    ("clean", "attacked", "fell"),
    [
        ([1.0] * 10, [0.5] * 10, 10),
        ([1.0] * 9, [0.5] * 9, 0),  # chance could do that
        ([1.0] * 10, [1 - 1e-6] * 10, 0),  # rounding
        ([1.0] * 16, [0.5] * 12 + [1.1] * 4, 0),  # three quarters are not over three quarters
        ([1.0] * 16, [0.5] * 13 + [1.1] * 3, 13),
        ([1.0] * 16, [0.9] * 13 + [9.0] * 3, 0),  # but the sum rises
    ],
)
def test_what_counts_as_falling(clean: list[float], attacked: list[float], fell: int) -> None:
    assert falling(torch.tensor(clean), torch.tensor(attacked)) == fell
