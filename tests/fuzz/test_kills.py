"""A few random kills; `python tests/fuzz/kills.py --kills 100 --seed 0` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.kills import PLACES, kill_many


@pytest.mark.slow
def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert kill_many(tmp_path, 2 * len(PLACES), 1, said.append) == 0, "\n".join(said)
