"""Mutated recipes, suites and overrides: each is good, or refused in words, at little cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.fuzz import overrides, texts
from tests.fuzz.bench import Bench, Case, bench

MODULES = ("calfat_plugin.cli.main", "calfat_plugin.cli.check", "calfat_plugin.cli.suite", "calfat_plugin.suites.plan")
Expect = Callable[[Bench, Iterable[Case]], None]
Share = Callable[[int], int]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mutated_recipes_are_good_or_refused(tmp_path: Path, seed: int, share: Share, expect_none: Expect) -> None:
    with bench(tmp_path, *MODULES) as runner:
        expect_none(runner, texts.cases(seed, share(3000)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mutated_overrides_are_good_or_refused(tmp_path: Path, seed: int, share: Share, expect_none: Expect) -> None:
    with bench(tmp_path, *MODULES) as runner:
        expect_none(runner, overrides.cases(seed, share(1000)))
