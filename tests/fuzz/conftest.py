"""Fixtures of the fuzz tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.fuzz.bench import Bench, Case, report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of all cases: ``--fuzz-seed``."""
    return int(request.config.getoption("--fuzz-seed"))


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How many of some cases to run: ``--fuzz-share`` of them, at least one."""
    part = float(request.config.getoption("--fuzz-share"))
    return lambda count: max(1, round(part * count))


@pytest.fixture
def expect_none(capsys: pytest.CaptureFixture[str]) -> Callable[[Bench, Iterable[Case]], None]:
    """Runs cases and fails with all that went wrong."""

    def check(bench: Bench, cases: Iterable[Case]) -> None:
        if found := bench.failures(cases):
            pytest.fail(f"{len(found)} kinds of failure\n{report(found)}", pytrace=False)

    return check
