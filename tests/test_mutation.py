"""``mutation.py`` is set up for what is there; the mutation testing itself is a command of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.mutation import Change, explained

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]


@pytest.mark.parametrize("one", explained(), ids=lambda one: one.where)
def test_what_survives_is_still_in_the_code(one: Change) -> None:
    top, module, *_ = one.where.split(".")  # then a function, or a class and its method
    package = ROOT / "calfat_plugin"
    file = package / top / f"{module}.py" if (package / top).is_dir() else package / f"{top}.py"
    lines = " / ".join(line.strip() for line in file.read_text().splitlines())
    function = one.where.rpartition(".")[2]
    assert re.search(rf"/ def _*{function}_*\(", lines)
    assert one.old in lines
    assert explained()[one]


def test_modules_and_tests_of_the_settings_are_there() -> None:
    for pattern in SETTINGS["only_mutate"]:
        assert list(ROOT.glob(pattern)), pattern
    for tests in SETTINGS["pytest_add_cli_args_test_selection"]:
        assert (ROOT / tests).exists(), tests
