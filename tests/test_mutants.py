"""The planted mistakes of ``mutants.yaml``: where they go, and that each turns a test red."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import FLOWER, MUTANTS, ROOT, Mutant, copied, ended_with, planted, python_for, turns_red


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_place_of_each_mistake_is_there(mutant: Mutant) -> None:
    compile(planted(mutant, ROOT / "calfat_plugin"), mutant.file, "exec")
    assert (ROOT / mutant.tests).is_file()


def test_a_place_that_is_gone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(LookupError) as error:
        planted(Mutant("one late", "a.py", "x = 2", "x = 3", "tests/a.py"), tmp_path)
    assert str(error.value) == (
        "one late: a.py has 'x = 2' 0 times, expected once. "
        "The code has changed: plant the same mistake in the new code (tests/mutants.yaml)."
    )


def test_a_copy_can_be_made_again_over_an_older_one(tmp_path: Path) -> None:
    """As ``mutation.py`` does, which continues in its folder."""
    for _ in range(2):
        copied(tmp_path)
    link = tmp_path / "calfat_plugin" / "shipped" / "recipes"
    assert link.is_symlink()
    assert (link / "calfat_digits.yaml").read_bytes() == (ROOT / "recipes" / "calfat_digits.yaml").read_bytes()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree."""
    folder = tmp_path_factory.mktemp("tree")
    copied(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mistake_turns_a_test_red(mutant: Mutant, tree: Path) -> None:
    if python_for(mutant) is None:
        pytest.skip(f"no {FLOWER}")
    assert turns_red(mutant, tree)


@pytest.mark.slow
def test_without_a_mistake_the_same_tests_are_green(tree: Path) -> None:
    for tests in {mutant.tests for mutant in MUTANTS if python_for(mutant)}:
        ended = ended_with(Mutant("none", "seeds.py", "calfat-seed-1", "calfat-seed-1", tests), tree)
        assert ended.returncode == 0, ended.stdout
