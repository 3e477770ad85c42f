"""FixBN: batch normalisation whose statistics are fixed after some rounds (Zhong, Chen and Chao, arXiv 2303.06530)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FixBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation that goes by its running statistics from some round on, in training mode, too.

    In the first rounds it is ``nn.BatchNorm2d``. Clients with different labels have different batch statistics, so each
    of them then trains another network than the one that is evaluated. Once the statistics are fixed, all clients train
    that network. Weight and bias train all the time.

    Attributes:
        is_fixed: whether the running statistics are used, and stay as they are.
    """

    is_fixed = False

    def begin_round(self, round: int, num_rounds: int) -> None:
        """Fix the statistics in the second half of the rounds; ``round`` counts from 1."""
        self.is_fixed = round > num_rounds / 2

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        if not self.is_fixed:
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def begin_round(model: nn.Module, round: int, num_rounds: int) -> None:
    """Tell every FixBN of a model which round of how many begins."""
    for module in model.modules():
        if isinstance(module, FixBatchNorm2d):
            module.begin_round(round, num_rounds)
