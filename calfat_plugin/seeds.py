"""Derived randomness: every random stream is a function of (seed, purpose, round, client).

Where PyTorch or a plugin draws from a global generator, that is set to a derived state before, and put back afterwards
(``models.building``, ``federation.side_effects``). If streams were ambient, the order in which clients happen to run
would change the result. As they are derived, no stream's state has to be kept or sent, so the same recipe and seed give
the same model in one process, over MPI, over gRPC, and after a kill and a resume.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, purpose: str, *, round: int = 0, client: int = 0, extra: int = 0) -> int:
    """Seed of one stream: 63 bits, so that it fits every library's seeding function.

    Args:
        seed: the run's seed, any integer.
        purpose: what the stream is for, such as ``"attack"`` or ``"shuffle"``; streams of other
            purposes are independent.
        round: communication round.
        client: client index.
        extra: a further counter, such as the batch.
    """
    # JSON keeps the parts apart: no two different tuples share one text.
    text = json.dumps(["calfat-seed-1", int(seed), purpose, int(round), int(client), int(extra)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(
    seed: int, purpose: str, *, round: int = 0, client: int = 0, extra: int = 0, device: str | torch.device = "cpu"
) -> torch.Generator:
    """A fresh generator on ``device``, seeded with ``derive_seed``, whose arguments the others are.

    Args:
        seed: the run's seed, any integer.
        purpose: what the stream is for.
        round: communication round.
        client: client index.
        extra: a further counter, such as the batch.
        device: where it draws.
    """
    import torch  # here, not above: recipes are checked without torch

    stream = torch.Generator(device=device)
    stream.manual_seed(derive_seed(seed, purpose, round=round, client=client, extra=extra))
    return stream
