"""What batch normalisation costs an attack's pass, were it folded into convolutions: ``python -m benchmarks.folding``.

A pass is forward and backward to the image, on one thread, in the fast layout. With and without folding
(``torch.nn.utils.fuse_conv_bn_eval``, done beforehand) take turns, and the processor's time of the thread counts, so
that whatever else the machine does meets both. Printed are the median of the ratios of two neighbours, the smallest
and the largest.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval

from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.passes import fast_passes, has_bf16_units
from calfat_plugin.models.networks import CNN, PreActResNet, ResNet18

TURNS = 20
CASES = (
    ("preact_resnet", PreActResNet(norm="batch"), 64),
    ("cnn", CNN(norm="batch"), 64),
    ("resnet18", ResNet18(), 32),
)


def folded(model: nn.Module) -> nn.Module:
    """A copy in which each norm that follows a convolution in a sequence is part of its weights."""
    model = deepcopy(model).eval()
    for layers in list(model.modules()):
        if not isinstance(layers, nn.Sequential):
            continue
        for place, (convolution, norm) in enumerate(pairwise(layers)):
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                layers[place] = fuse_conv_bn_eval(convolution, norm)
                layers[place + 1] = nn.Identity()
    return model


def seconds(model: nn.Module, x: torch.Tensor, bf16: bool) -> float:
    """Of one pass there and back."""
    y = torch.zeros(len(x), dtype=torch.long)
    x_adv = x.clone().requires_grad_()
    start = time.thread_time()
    with attack_mode(model):
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = nn.functional.cross_entropy(model(x_adv).float(), y)
        torch.autograd.grad(loss, x_adv)
    return time.thread_time() - start


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, model, batch_size in CASES:
        x = torch.rand(batch_size, 3, 32, 32)
        without_norms = folded(model)
        for bf16 in (False, True):
            if bf16 and not has_bf16_units(x.device):
                continue
            with fast_passes(model, x), fast_passes(without_norms, x):
                seconds(model, x, bf16)  # to warm up
                seconds(without_norms, x, bf16)
                ratios = []
                for _ in range(TURNS):
                    plain = seconds(model, x, bf16)
                    ratios.append(seconds(without_norms, x, bf16) / plain)
            print(
                f"{name}, {'bf16' if bf16 else 'fp32'}: "
                f"{statistics.median(ratios):.2f} of the time ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
