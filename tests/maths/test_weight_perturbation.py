from __future__ import annotations

import pytest
import torch

from calfat_plugin.trainers.weight_perturbation import awp_perturbation


def perturbation(gradient, gamma=0.005):
    weights = {"w": torch.tensor([3.0, 4.0]), "frozen": torch.ones(1)}
    return awp_perturbation(weights, {"w": torch.tensor(gradient)}, gamma=gamma)


def test_vector():
    assert perturbation([0.0, 2.0])["w"].tolist() == pytest.approx([0.0, 0.025])


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_length_is_gamma_times_the_weights_however_large_the_gradient(size):
    moved = perturbation([3 * size, 4 * size], gamma=0.1)["w"]
    assert moved.tolist() == pytest.approx([0.3, 0.4])


def test_a_zero_gradient_moves_nothing_and_others_are_left_out():
    moved = perturbation([0.0, 0.0])
    assert list(moved) == ["w"]
    assert moved["w"].tolist() == [0.0, 0.0]
