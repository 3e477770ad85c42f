"""The L1 ball: closed forms by hand, and pyautoattack's own projection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyautoattack.autopgd_base import L1_projection

from calfat_plugin.threat import ThreatModel, nearest_l1_change, random_l1_point, sparse_signs
from tests.maths.test_threat import FEW, seeded


def nearest(change: list[float], down: list[float], up: list[float], eps: float) -> list[float]:
    return nearest_l1_change(*(torch.tensor([values]) for values in (change, down, up)), eps)[0].tolist()


@pytest.mark.parametrize(
    ("change", "down", "up", "eps", "expected"),
    [
        ([0.3, -0.2], [1, 1], [1, 1], 1.0, [0.3, -0.2]),  # inside already
        ([0.9, -0.2], [1, 1], [0.5, 1], 1.0, [0.5, -0.2]),  # the box alone is enough
        ([0.8, -0.6, 0.1], [1, 1, 1], [1, 1, 1], 1.0, [0.6, -0.4, 0.0]),  # t = 0.2
        ([0.9, -0.9, 0.9], [1, 0.1, 1], [1, 1, 1], 1.0, [0.45, -0.1, 0.45]),  # a bound leaves more for the others
        ([2.0, -0.5], [1, 1], [0.0, 1], 0.25, [0.0, -0.25]),  # a value that cannot move at all
        ([0.5, 0.5], [1, 1], [1, 1], 0.0, [0.0, 0.0]),
    ],
)
def test_nearest_change_by_hand(change, down, up, eps, expected):
    assert nearest(change, down, up, eps) == pytest.approx(expected, abs=1e-7)


@FEW
@given(seed=st.integers(0, 10**6), eps=st.floats(0.01, 8), spread=st.sampled_from([0.01, 0.3, 3.0]))
def test_the_projection_is_pyautoattacks(seed, eps, spread):
    generator = seeded(seed)
    x = torch.rand(4, 1, 5, 6, generator=generator).round(decimals=1)  # some pixels at 0 and 1
    change = spread * torch.randn(x.shape, generator=generator)
    ours = ThreatModel("l1", eps).project(x + change, x)
    assert torch.allclose(ours, x + change + L1_projection(x, change, eps), atol=2e-5)


def test_a_projection_uses_the_whole_budget_beside_a_bound():
    x = torch.tensor([[0.0, 0.95, 0.5]])
    far = x + torch.tensor([[-3.0, 3.0, 0.9]])
    threat = ThreatModel("l1", 0.4)
    assert threat.project(far, x).tolist()[0] == pytest.approx([0.0, 1.0, 0.85], abs=1e-6)
    assert threat.distance(threat.project(far, x), x).item() == pytest.approx(0.4, abs=1e-6)


def test_a_random_point_is_uniform_in_the_ball():
    # Half the volume lies within 0.5 ** (1/d) of the radius, and a quarter of it in each quadrant of two values.
    points = random_l1_point(torch.empty(8000, 3), seeded())
    length = points.abs().sum(dim=1)
    assert (length < 0.5 ** (1 / 3)).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert length.max() <= 1
    assert (points[:, 0] > 0).logical_and(points[:, 1] < 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    # In the whole ball E|x_1| = 1 / (d + 1).
    assert points.abs().mean().item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("count", "moved"), [(1, 1), (64, 1), (100, 1), (101, 2), (784, 8), (3072, 31)])
def test_a_step_moves_the_largest_hundredth(count, moved):
    grad = torch.randn(2, count, generator=seeded())
    signs = sparse_signs(grad)
    largest = grad.abs().topk(moved, dim=1).indices
    assert (signs != 0).sum(dim=1).tolist() == [moved, moved]
    assert torch.allclose(signs.gather(1, largest), grad.gather(1, largest).sign() / moved)


def test_ties_all_move_and_a_zero_gradient_moves_nothing():
    grad = torch.tensor([[2.0, -2.0, 1.0], [0.0, 0.0, 0.0]])
    assert sparse_signs(grad).tolist() == [[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]


def test_a_step_passes_over_values_that_cannot_move():
    x_adv, grad = torch.tensor([[0.0, 1.0, 0.0, 0.5]]), torch.tensor([[-9.0, 8.0, 7.0, 1.0]])
    moved = ThreatModel("l1", 1).ascend(x_adv, grad, 0.25)
    assert moved.tolist() == [[0.0, 1.0, 0.25, 0.5]]
    assert ThreatModel("l1", 1, bounds=(-1, 2)).ascend(x_adv, grad, 0.25).tolist() == [[-0.25, 1.0, 0.0, 0.5]]


def test_a_slope_is_what_a_step_of_length_one_climbs():
    grad = torch.tensor([[3.0, -4.0]])
    assert [ThreatModel(norm, 1).slope(grad).item() for norm in ("linf", "l2", "l1")] == [7.0, 5.0, 4.0]
    for norm in ("linf", "l2", "l1"):
        threat, grad = ThreatModel(norm, 1), torch.randn(5, 301, generator=seeded())
        climbed = (threat.steepest(grad) * grad).sum(dim=1)
        assert torch.allclose(threat.slope(grad), climbed, rtol=1e-5)


def test_the_end_of_the_range_is_reached_exactly_so_that_the_next_step_passes_over_it():
    x = torch.rand(1, 500, generator=seeded())
    up, down = torch.full_like(x, 9.0), torch.full_like(x, -9.0)
    threat = ThreatModel("l1", 5000, bounds=(-0.7, 1))
    assert (threat.project(up, x) == 1).all()
    assert (threat.project(down, x) == torch.tensor(-0.7)).all()
    assert torch.equal(threat.ascend(threat.project(up, x), x, 0.5), torch.ones_like(x))
