"""What ``calfat check`` calls good runs, or is refused with its place and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import digits
from tests.fuzz.bench import GOOD, REFUSED, Bench, Case, Outcome, bench, report

MODULES = (
    *("sklearn.datasets", "matplotlib.figure", "calfat_plugin.report", "calfat_plugin.cli.check"),
    *("calfat_plugin.cli.run", "calfat_plugin.cli.progress", "calfat_plugin.host.simulation"),
    *("calfat_plugin.runs.session", "calfat_plugin.trainers.loop"),
)
_PLACE = re.compile(rf"{re.escape(digits.FILE)}(:\d+)?: |\b(\w+_args|calfat)\.\w+")
_REMEDY = re.compile(
    r"(?i)\b(expected|lower|raise|take|use|set|add|remove|write|choose|give|try|fewer|smaller|larger|must)\b"
)


_PARTS = 4  # tests of their own, so that processes can share them


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
def test_good_recipes_run_or_are_refused_with_place_and_remedy(
    tmp_path: Path, part: int, seed: int, share: Callable[[int], int]
) -> None:
    found: dict[str, list[Case]] = {}
    left = share(100 // _PARTS)  # good recipes to run; those that the check refuses are not counted
    recipes = digits.recipes(seed, part)
    with bench(tmp_path, *MODULES) as runner:
        while left:
            case, failure, good = tried(runner, *next(recipes))
            left -= good
            if failure:
                print(f"{failure}: {case.name}", flush=True)  # seen with -s, also of a run that is cut short
                found.setdefault(failure, []).append(case)
    if found:
        pytest.fail(f"{len(found)} kinds of failure\n{report(found)}", pytrace=False)


def tried(runner: Bench, name: str, text: bytes) -> tuple[Case, str, bool]:
    """(the command that says most about a recipe, what is wrong with it, whether the check calls the recipe good)."""
    case = digits.check(name, text)
    outcome = runner.run(case)
    failure = outcome.failure(case)
    if failure or outcome.code != GOOD:
        return case, failure, False
    case = digits.run(name, text)
    outcome = runner.run(case)
    return case, outcome.failure(case) or unhelpful(outcome), True


def unhelpful(outcome: Outcome) -> str:
    """What a refused run leaves open, or a finished one lacks; empty: nothing."""
    if "the report was not written" in outcome.err:
        return "no report: " + outcome.err.partition("the report was not written")[2].splitlines()[0][:160]
    if outcome.code != REFUSED:
        return ""
    error = outcome.err.partition("error: ")[2]
    lacks = [what for what, words in (("place", _PLACE), ("remedy", _REMEDY)) if not words.search(error)]
    return f"refused without {' and '.join(lacks)}: {error.splitlines()[0][:200]}" if lacks else ""
