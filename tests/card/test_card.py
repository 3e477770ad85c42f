"""What computes puts its tensors where it computes: everything goes to a card that is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.card.process import BUILT_FOR_GPUS


@pytest.mark.needs("g++")
@pytest.mark.skipif(
    BUILT_FOR_GPUS, reason="a card can be pretended to a torch that was built without CUDA or ROCm only"
)
@pytest.mark.timeout(1800)
def test_everything_computes_on_a_card_that_is_not_there() -> None:
    """In a process of its own, because torch there says that it has a card. Its report names the tests that failed."""
    process = Path(__file__).with_name("process.py")
    done = subprocess.run(
        [sys.executable, process, "-q", "--tb=short"],
        cwd=process.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
