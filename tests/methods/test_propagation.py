"""FedRBN: what st clients borrow from at clients."""

from __future__ import annotations

import math

import pytest
import torch

from calfat_plugin.trainers.fedrbn import BranchStatistics, _lent, debiased, propagation_weights
from tests.methods.helpers import build_method


def at_angle(cosine: float) -> torch.Tensor:
    return torch.tensor([cosine, math.sqrt(1 - cosine**2)])


def layer(cos_mean: float, cos_var: float) -> BranchStatistics:
    return BranchStatistics(3 * at_angle(cos_mean), 0.5 * at_angle(cos_var))


TARGET = [BranchStatistics(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))]


def noise(mean: float, var: float) -> list[BranchStatistics]:
    return [BranchStatistics(torch.tensor([mean]), torch.tensor([var]))]


def test_weights_vector():
    weights = propagation_weights(TARGET, [[layer(1, 1)], [layer(0.98, 0.96)]])
    assert weights == pytest.approx([0.952574, 0.047426], abs=1e-5)


def test_similarity_is_averaged_over_layers():
    weights = propagation_weights(
        TARGET * 2, [[layer(1, 1), layer(0.96, 0.92)], [layer(0.98, 0.96), layer(0.98, 0.96)]]
    )
    assert weights == pytest.approx([0.5, 0.5], abs=1e-4)


def test_more_layers_do_not_sharpen_the_weights():
    weights = propagation_weights(TARGET * 3, [[layer(1, 1)] * 3, [layer(0.98, 0.96)] * 3])
    assert weights == pytest.approx([0.952574, 0.047426], abs=1e-5)


def test_opposite_similarities_do_not_overflow():
    opposite = BranchStatistics(-TARGET[0].mean, -TARGET[0].var)
    weights = propagation_weights(TARGET, [[layer(1, 1)], [opposite]])
    assert weights == pytest.approx([1.0, 0.0], abs=1e-80)


def state(seed: int) -> dict[str, torch.Tensor]:
    """The statistics of two dual layers."""
    stream = torch.Generator().manual_seed(seed)
    names = [
        f"{at}.{branch}.running_{kind}" for at in "ab" for branch in ("clean", "noise") for kind in ("mean", "var")
    ]
    return {name: torch.rand(3, generator=stream) for name in names}


def test_one_source_is_copied_bit_for_bit():
    source = state(1)
    lent = _lent(state(2), [source], build_method("fedrbn").options)
    assert sorted(lent) == sorted(name for name in source if ".noise." in name)
    for name, tensor in lent.items():
        assert torch.equal(tensor, source[name])
        assert tensor.data_ptr() != source[name].data_ptr()


def test_weighted_mean():
    lent = _lent(state(0), [state(1), state(2)], build_method("fedrbn", similarity="equal").options)
    for name, tensor in lent.items():
        assert torch.allclose(tensor, (state(1)[name] + state(2)[name]) / 2)


def test_debias_moves_by_the_difference_of_the_clean_statistics():
    (moved,) = debiased(noise(1.0, 2.0), noise(1.0, 2.0), noise(3.0, 8.0), 0.5)
    assert (moved.mean.item(), moved.var.item()) == pytest.approx((2.0, 4.0))
