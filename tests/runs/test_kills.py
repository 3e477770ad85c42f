"""Runs are killed at random times and resumed, and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.kills import PLACES, kill_many


@pytest.mark.slow
def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    assert kill_many(tmp_path, 2 * len(PLACES), seed=1) == []
