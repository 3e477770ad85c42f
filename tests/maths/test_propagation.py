from __future__ import annotations

import math

import pytest
import torch

from calfat_plugin.trainers.propagation import BranchStatistics, propagated_noise, propagation_weights


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


def test_infinite_temperature_is_uniform():
    sources = [[layer(1, 1)], [layer(0, 0)]]
    assert propagation_weights(TARGET, sources, temperature=math.inf) == [0.5, 0.5]


def test_extreme_similarities_do_not_overflow():
    weights = propagation_weights(TARGET, [[layer(1, 1)], [layer(0, 0)]], temperature=1e-5)
    assert weights == [1.0, 0.0]


def test_weighted_mean():
    (mixed,) = propagated_noise([0.75, 0.25], [noise(1.0, 2.0), noise(5.0, 4.0)])
    assert (mixed.mean.item(), mixed.var.item()) == pytest.approx((2.0, 2.5))


def test_one_source_is_copied_bit_for_bit():
    source = [BranchStatistics(torch.randn(9), torch.rand(9)) for _ in range(3)]
    copied = propagated_noise(propagation_weights(TARGET, [[layer(0.3, 0.2)]]), [source])
    for ours, theirs in zip(copied, source, strict=True):
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.var, theirs.var)
        assert ours.mean.data_ptr() != theirs.mean.data_ptr()


def test_debias_moves_by_the_difference_of_the_clean_statistics():
    (moved,) = propagated_noise(
        [1.0],
        [noise(1.0, 2.0)],
        debias=0.5,
        target_clean=noise(3.0, 8.0),
        sources_clean=[noise(1.0, 2.0)],
    )
    assert (moved.mean.item(), moved.var.item()) == pytest.approx((2.0, 4.0))
