"""The arithmetic that cannot be avoided, and how fast this machine does it: the floor of what a benchmark measures.

Necessary are the multiplications and additions of convolutions and linear layers in the passes that a method's formulas
ask for; everything else (activations, losses, projections, batches) counts as nothing. A pass forward costs F. The
gradient with respect to the input costs F again, that of the first layer included, and the gradient with respect to the
weights another F. The outer step needs no gradient of its images, so it saves the first layer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.measuring import wait_for


@dataclass(frozen=True)
class Passes:
    """What a method needs for a batch, in passes over whole batches, K being the attack's steps."""

    attacked: float = 1.0
    natural: int = 0
    outer: int = 1


#: Options with which a method does all that it ever does in its first round, and what it then needs.
METHODS: dict[str, tuple[dict[str, object], Passes]] = {
    "calfat": ({}, Passes(natural=1)),
    "standard": ({}, Passes(attacked=0)),
    "fedpgd": ({}, Passes()),
    "mixfat": ({"ratio": 0.5}, Passes(attacked=0.5)),
    "fedtrades": ({}, Passes(natural=1, outer=2)),
    "fedmart": ({}, Passes(outer=2)),
    "fedgairat": ({"start_round": 1}, Passes()),
    "fedrbn": ({}, Passes(outer=2)),
    "fedawp": ({"warmup": 0}, Passes(outer=2)),
    "fedlat": ({}, Passes(attacked=0)),  # in a clean round: standard training
}
#: Methods that are measured in a round on clean images: how many of these there are.
CLEAN_ROUNDS = {"fedlat": 1}


@dataclass(frozen=True)
class Work:
    """Floating-point operations for one example: of all layers, and of the first alone."""

    forward: float
    first: float

    def of_method(self, passes: Passes, steps: int) -> float:
        """An example of local training."""
        attack = passes.attacked * steps * 2 * self.forward + passes.natural * self.forward
        return attack + passes.outer * (3 * self.forward - self.first)

    def of_pgd(self, steps: int) -> float:
        """An example of an evaluation: clean, attacked, and judged."""
        return (2 + 2 * steps) * self.forward


def work_of(model: nn.Module, shape: tuple[int, int, int]) -> Work:
    """Count a forward pass on one image of ``shape`` (C, H, W): 2 operations a weight and place that it is used at."""
    counts: list[float] = []

    def count(module: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        counts.append(2.0 * out.numel() * weight[0].numel())

    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    device = next(model.parameters()).device
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape, device=device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if len(counts) != len(layers) or not counts:
        raise SystemExit(f"{type(model).__name__}: {len(counts)} of {len(layers)} layers were called once, not all")
    return Work(sum(counts), counts[0])


def gemm(device: torch.device, dtype: torch.dtype = torch.float32, size: int = 0) -> Callable[[], float]:
    """What measures this machine's rate once: the best of some products of square matrices, in operations a second."""
    size = size or (8192 if device.type == "cuda" else 1536)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def measure() -> float:
        best = float("inf")
        for _ in range(8):
            wait_for(device)
            started = time.perf_counter()
            torch.mm(left, right)
            wait_for(device)
            best = min(best, time.perf_counter() - started)
        return 2.0 * size**3 / best

    return measure
