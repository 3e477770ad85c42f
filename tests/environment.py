"""The environment of processes that a test starts with nothing else of this machine's."""

from __future__ import annotations

import os

from tests import reaper

# What chooses the instructions that results are computed with: a test compares processes, so all use the same.
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def bare(**variables: str) -> dict[str, str]:
    """``variables``, and what no process of a test can do without."""
    kept = {name: os.environ[name] for name in ("PATH", *_INSTRUCTIONS) if name in os.environ}
    return {**kept, **reaper.mark(), **variables}
