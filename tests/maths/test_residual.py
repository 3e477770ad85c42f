"""The small residual network, and FixBN against its source's description."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from calfat_plugin.errors import ModelError
from calfat_plugin.models.networks import CNN, CNNSmall, PreActBlock, PreActResNet
from calfat_plugin.models.norms import FixBatchNorm2d, begin_round, with_dual_norms
from tests.methods.helpers import Federation, experiment, same_bits

NORMS = ("none", "batch", "fixbn", "group")


def multiplications(model: nn.Module) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.rand(1, 3, 32, 32))
    return counter.get_total_flops() / 2


def test_it_costs_what_the_papers_network_does() -> None:
    """Both strides of the first convolution, the second with half the width."""
    of_paper = multiplications(CNN())
    for options in ({}, {"width": 16, "first_stride": 1}):
        assert 0.9 < multiplications(PreActResNet(**options)) / of_paper < 1.1


@pytest.mark.parametrize(("norm", "activation"), [*product(NORMS, ("relu", "silu"))])
def test_every_layer_learns_and_the_input_stays(norm: str, activation: str) -> None:
    torch.manual_seed(0)
    model = PreActResNet(1, (9, 7), 5, width=8, norm=norm, activation=activation).train()
    if (
        norm == "none"
    ):  # the second convolutions begin at zero, and what is before them has no gradient in the first step
        for module in model.modules():
            if isinstance(module, PreActBlock):
                nn.init.normal_(module.residual[-1].weight, std=0.1)
    images = torch.rand(4, 1, 9, 7)
    before = images.clone()
    logits = model(images)
    assert logits.shape == (4, 5)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert torch.equal(images, before)


def test_a_block_without_normalisation_begins_as_its_shortcut() -> None:
    block = PreActBlock(8, 8, 1, "none", "relu")
    x = torch.rand(2, 8, 6, 6)
    bias = block.residual[-1].bias.view(1, 8, 1, 1)
    assert torch.equal(block(x), bias + x)


def test_a_block_by_hand() -> None:
    """out = conv(relu(norm(conv(relu(norm(x)))))) + conv1x1(mean of 2x2 of relu(norm(x)))."""
    torch.manual_seed(0)
    block = PreActBlock(8, 16, 2, "group", "relu")
    x = torch.randn(3, 8, 5, 5)
    norm1, norm2 = block.enter[0], block.residual[1]
    entered = norm1(x).clamp_min(0)
    first, second = block.residual[0], block.residual[3]
    inner = nn.functional.conv2d(entered, first.weight, first.bias, stride=2, padding=1)
    wanted = nn.functional.conv2d(norm2(inner).clamp_min(0), second.weight, second.bias, padding=1)
    assert block.shortcut is not None
    one = block.shortcut[1]
    pooled = nn.functional.avg_pool2d(entered, 2, ceil_mode=True)
    wanted = wanted + nn.functional.conv2d(pooled, one.weight, one.bias)
    assert torch.allclose(block(x), wanted, atol=1e-6)
    assert wanted.shape == (3, 16, 3, 3)


def test_no_convolution_of_one_pixel_has_a_stride() -> None:
    """Torch's backward of such a layer ends the process on some processors (docs/models.md)."""
    for module in PreActResNet().modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            assert module.stride == (1, 1)


def test_a_width_that_groups_cannot_divide_is_refused() -> None:
    with pytest.raises(ModelError, match="width 12 is no multiple of 8"):
        PreActResNet(width=12)


# --- FixBN ------------------------------------------------------------------------------------------------------------


def test_fixbn_is_batch_normalisation_until_it_is_fixed() -> None:
    torch.manual_seed(0)
    fix, plain = FixBatchNorm2d(3), nn.BatchNorm2d(3)
    for _ in range(3):
        x = torch.randn(6, 3, 4, 4)
        assert torch.equal(fix(x), plain(x))
    assert torch.equal(fix.running_mean, plain.running_mean)
    assert torch.equal(fix.running_var, plain.running_var)
    before = {name: tensor.clone() for name, tensor in fix.state_dict().items()}
    fix.is_fixed = True
    x = torch.randn(6, 3, 4, 4)
    assert torch.equal(fix.train()(x), plain.eval()(x))  # by the running statistics, in training mode
    assert all(torch.equal(before[name], tensor) for name, tensor in fix.state_dict().items())
    fix(x).square().sum().backward()
    assert fix.weight.grad is not None  # weight and bias go on learning
    assert fix.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("num_rounds", "last_free"), [(1, 0), (2, 1), (5, 2), (40, 20)])
def test_the_statistics_are_fixed_in_the_second_half_of_the_rounds(num_rounds: int, last_free: int) -> None:
    model = CNNSmall(norm="fixbn")
    layers = [module for module in model.modules() if isinstance(module, FixBatchNorm2d)]
    assert len(layers) == 3
    for round in range(1, num_rounds + 1):
        begin_round(model, round, num_rounds)
        assert {layer.is_fixed for layer in layers} == {round > last_free}


def statistics(federation: Federation) -> dict[str, torch.Tensor]:
    """The running statistics of the global model."""
    return {name: tensor for name, tensor in federation.server.state.items() if "running" in name}


def test_a_federation_has_fixed_statistics_in_its_second_half_also_where_its_worker_begins_there() -> None:
    """A worker that is new in round 3, as after a crash, must know as well which half it is in."""
    model = {"model_args__model": "cnn_small", "calfat__model": {"norm": "fixbn"}}
    run = experiment("standard", **model, train_args__comm_round=4)
    whole = Federation(run)
    seen = [statistics(whole)]
    for round in range(1, 5):
        if round == 3:
            resumed = Federation(run, whole.snapshot())
        whole.play()
        seen.append(statistics(whole))
    assert len(seen[0]) == 6  # a mean and a variance of three layers
    for name in seen[0]:
        assert not torch.equal(seen[0][name], seen[1][name])
        assert not torch.equal(seen[1][name], seen[2][name])
        for later in seen[3:]:
            torch.testing.assert_close(later[name], seen[2][name])  # an average of equal ones may round
    resumed.play()
    torch.testing.assert_close(statistics(resumed), seen[2])
    resumed.play()
    assert same_bits(resumed.server.state, whole.server.state)


def test_fedrbn_has_statistics_of_its_own() -> None:
    with pytest.raises(ModelError, match="which FixBN would fix"):
        with_dual_norms(CNNSmall(norm="fixbn"))
