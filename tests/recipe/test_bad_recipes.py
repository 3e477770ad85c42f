"""Bad recipes: each is refused with exit code 2 and a message that says where and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from calfat_plugin import registry
from calfat_plugin.experiment import Experiment
from calfat_plugin.rounds_csv import RoundTables
from calfat_plugin.runs.directory import RunDirectory
from tests.cli.runner import COMMAND, REPORTING, Ended, calfat, python, refused
from tests.recipe.tables import GOOD, SAID_OF_GOOD, Row, edited, rows
from tests.snapshot import TextSnapshot

BAD = rows("refused.txt")

JUNK: dict[str, str | bytes] = {
    "empty file": "",
    "comments": "# x\n",
    "null document": "---\n",
    "top-level list": "- calfat\n- fedavg\n",
    "top-level text": "calfat\n",
    "tab indentation": "calfat:\n\ttrainer: calfat\n",
    "binary junk": b"calfat:\n\x89PNG\r\n\x1a\n",
    "another encoding": "calfat: {trainer: café}\n".encode("latin-1"),
    "zero byte": b"calfat:\n  a: \0\n",
    "huge file": "a: 1\n" * 60_000,
    "alias of itself": "calfat: &a {trainer: *a}\n",
    "merge of itself": "calfat: &a {<<: *a}\n",
    "deep nesting": "calfat: " + "[" * 2000,
    "aliases of aliases": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "merges of merges": "a: &a {x: 1}\n"
    + "".join(f"{b}: &{b} {{<<: [{','.join(['*' + a] * 10)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
}
PROCESSES = ("binary junk", "deep nesting")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin that happens to be installed here may change what is known, and nothing is really run."""

    def accepted(experiment: Experiment, path: Path | None) -> None:
        raise AssertionError(f"accepted: {experiment.as_run()}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_installed", lambda: iter(()))
    monkeypatch.setattr(RunDirectory, "create", accepted)
    yield
    assert not (tmp_path / "runs").exists(), "a refused recipe leaves no run directory behind"


def test_the_recipe_that_the_others_are_made_from_is_good(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    assert calfat("check", "r.yaml") == Ended(0, SAID_OF_GOOD, "")
    assert len({bad.name for bad in BAD}) == len(BAD) > 100


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_recipe_is_refused(bad: Row, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(bad.recipe)
    ended = calfat("check", "r.yaml", *bad.arguments)
    assert ended == Ended(2, "", ended.err)
    assert ended.err.startswith(f"error: {bad.expected}")


@pytest.mark.parametrize("bad", BAD[::12], ids=lambda bad: bad.name)
def test_it_is_not_run_either(bad: Row, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(bad.recipe)
    assert calfat("run", "r.yaml", *bad.arguments) == calfat("check", "r.yaml", *bad.arguments)


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_refused(name: str, tmp_path: Path, snapshot: TextSnapshot) -> None:
    content = JUNK[name]
    (tmp_path / "r.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    ended = calfat("check", "r.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: r.yaml:")
    snapshot(ended.err)


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_file_that_is_missing_or_a_directory_is_refused(command: str, tmp_path: Path, snapshot: TextSnapshot) -> None:
    Path("recipes/folder.yaml").mkdir(parents=True)
    Path("one").mkdir()
    for path in ("recipes/calfat_digits.yaml", "one/mine.yml"):
        Path(path).write_text(GOOD)
    for path in (
        "recipes/calfat_digit.yaml",
        "elsewhere/calfat_digits.yaml",
        "elsewhere/mine.yaml",
        "recipes/folder.yaml",
    ):
        ended = calfat(command, path)
        assert (ended.code, ended.out) == (2, "")
        snapshot(ended.err)
    assert calfat(command, "one") == refused(
        "one: this is a directory, expected a recipe file. Did you mean one/mine.yml?"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "r.yaml").chmod(0)
    assert calfat("check", "r.yaml") == refused("r.yaml: cannot be read (Permission denied).")


@pytest.mark.parametrize("content", [edited("name: calfat, -> name: calfatt,"), *map(JUNK.get, PROCESSES)])
def test_as_a_process_of_its_own_it_imports_nothing_heavy(content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    ended = python(REPORTING + COMMAND, "run", "r.yaml", cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: r.yaml:")
    assert ended.err.endswith("\nimported:\n")


COLUMNS = set(RoundTables(Path(), ("natural",), num_clients=2).header) - {"natural"}


@pytest.mark.parametrize("column", sorted(COLUMNS))
def test_no_label_takes_the_place_of_a_column(column: str, tmp_path: Path) -> None:
    """Whatever columns ``rounds.csv`` has, now or later."""
    labelled = f"evaluators: [natural, {{name: pgd2, label: {column}}}]}}"
    (tmp_path / "r.yaml").write_text(GOOD.replace("evaluators: [natural]}", labelled))
    ended = calfat("check", "r.yaml")
    assert ended.code == 2
    assert f"the label '{column}' is the name of a column" in ended.err


@pytest.mark.parametrize(
    "label", ["rounds", "pgd20_release", "loss_a", "release", "natural_released", "pgd20_worst_class"]
)
def test_a_label_that_is_only_like_a_column_is_good(label: str, tmp_path: Path) -> None:
    labelled = f"evaluators: [natural, {{name: pgd20, label: {label}}}]}}"
    (tmp_path / "r.yaml").write_text(GOOD.replace("evaluators: [natural]}", labelled))
    assert calfat("check", "r.yaml", "--strict").code == 0
