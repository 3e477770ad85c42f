"""The bench itself: it sees tracebacks, silence, crashes, hangs, and what takes too long or too much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import overrides, texts
from tests.fuzz.bench import Bench, Case, bench, report


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("bench"), "misbehaving", "calfat_plugin.cli.check") as runner:
        yield runner


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        ("traceback", "traceback outside of the package: ValueError: _ and _"),
        (
            "traceback_of_ours",
            "traceback at calfat_plugin/exact.py:parse_number: ValueError: _ is not a number; write _/_, _._ or _e-_",
        ),
        ("silence", "refused without a word"),
        ("other_code", "exit code 1"),
        ("crash", "exit code -11"),
        ("slow", "more than 0.2 s of CPU time"),
        ("endless", "exit code -24"),
        ("memory", "more than 500 MB"),
        ("memory_before_a_round", "more than 500 MB"),
        ("much_memory", "traceback outside of the package: MemoryError"),
        ("refusal", ""),
        ("nothing", ""),
    ],
)
def test_what_a_case_does_wrong_is_seen(function: str, failure: str, runner: Bench) -> None:
    seconds = 0.2 if function in ("slow", "endless") else 5.0
    case = Case(function, (), target=f"misbehaving:{function}", seconds=seconds)
    assert runner.run(case).failure(case) == failure


def test_a_failing_case_is_shrunk_and_shown_with_what_makes_it_again(runner: Bench) -> None:
    lines = [f"line {number}\n" for number in range(20)]
    lines[13] = "the wrong one\n"
    cases = [
        Case(f"text, seed 0, number {number}", ("text",), {"text": "".join(lines[number:]).encode()},
             target="misbehaving:reads")
        for number in (0, 5, 15)
    ]  # fmt: skip
    found = runner.failures(cases)
    assert report(found) == (
        "== 2 x traceback outside of the package: KeyError: _\n"
        "text, seed 0, number 0: 'text'\n--- text\nthe wrong one\n"
    )


def test_a_case_has_a_folder_of_its_own(runner: Bench) -> None:
    for _ in range(2):
        assert runner.run(Case("folder", ("new",), target="misbehaving:creates")).code == 0


def test_a_seed_gives_the_same_cases_again_and_another_one_gives_others() -> None:
    for make in (texts.cases, overrides.cases):
        first, again, other = list(make(0, 5)), list(make(0, 5)), list(make(1, 5))
        assert first == again
        assert [(case.arguments, case.files) for case in first] != [(case.arguments, case.files) for case in other]


def test_mutated_texts_are_near_what_is_shipped() -> None:
    """Neither all broken at their first line nor all as they were: the depths of the check are reached."""
    changed = [case.files["mutated/case.yaml"] for case in texts.cases(0, 40)]
    shipped = {path.read_bytes() for path in texts.SHIPPED}
    assert len(set(changed) - shipped) > 30
    assert sum(re.search(rb"(?m)^(base|calfat):", text) is not None for text in changed) > 20


def test_a_sample_of_shipped_files_is_checked(runner: Bench) -> None:
    for name in ("recipes/calfat_digits.yaml", "suites/digits_table9.yaml"):
        case = Case(name, ("check", name))
        outcome = runner.run(case)
        assert (outcome.code, outcome.failure(case)) == (0, ""), outcome.err


def test_the_folder_of_damaged_runs_is_no_part_of_a_case(runner: Bench, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("as it was")
    case = Case("folder", ("kept",), folder=tmp_path, target="misbehaving:overwrites")
    assert runner.run(case).code == 0
    assert (tmp_path / "kept").read_text() == "as it was"
