"""Recipes that come with the package: found by name in any folder, listed, and copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calfat_plugin.recipe.document import read_document
from calfat_plugin.shipped import headline, located, shipped_files
from tests.cli.runner import COMMAND, RECIPES, Ended, calfat, python, refused
from tests.snapshot import TextSnapshot

pytestmark = pytest.mark.usefixtures("in_a_folder")


def test_every_recipe_of_the_repository_is_shipped() -> None:
    files = list(RECIPES.glob("*.yaml"))
    shipped = shipped_files()
    assert {name: file.resolve() for name, file in shipped.items()} == {file.stem: file.resolve() for file in files}
    assert 9 < len(files) < 15  # what a newcomer takes; docs/methods.md has a command for each other method


def test_a_name_is_the_shipped_recipe_in_any_folder() -> None:
    assert read_document("calfat_digits").data == read_document(RECIPES / "calfat_digits.yaml").data
    ended = calfat("check", "calfat_digits")
    assert (ended.code, ended.err) == (0, "")
    assert "calfat_digits.yaml: good. calfat with fedavg on digits" in ended.out


def test_a_suite_may_have_a_shipped_recipe_for_its_base() -> None:
    Path("mine.yaml").write_text(
        "base: calfat_digits\nseeds: [0, 1]\nmetrics: [natural]\n"
        "axes: {method: {CalFAT: {}, FedPGD: {calfat.trainer: fedpgd}}}\n"
    )
    for words, said in (
        (("suite", "mine.yaml", "--dry-run"), "mine.yaml: good. 2 cells, 4 runs to do.\n"),
        (("check", "mine.yaml"), "mine.yaml: good. A suite of 2 cells and 4 runs.\n"),
    ):
        ended = calfat(*words)
        assert (ended.code, ended.err) == (0, "")
        assert said in ended.out


def test_a_file_in_this_folder_comes_before_the_shipped_one_and_a_folder_does_not() -> None:
    Path("calfat_digits").mkdir()
    assert located("calfat_digits") == shipped_files()["calfat_digits"]
    Path("fedpgd_digits").write_text("mine")
    assert located("fedpgd_digits") == Path("fedpgd_digits")


@pytest.mark.parametrize(
    "words",
    [
        *(f"check {written}" for written in ("calfat_digit", "zzz", "recipes/calfat_digits.yaml", "zzz.yaml")),
        *(f"init {words}" for words in ("calfat_digit", "zzz", "calfat_digits --out a/b.yaml")),
    ],
)
def test_a_file_that_is_not_there(words: str, snapshot: TextSnapshot) -> None:
    ended = calfat(*words.split())
    assert (ended.code, ended.out) == (2, "")
    snapshot(ended.err)


def test_the_list_has_every_name_with_its_first_sentence(snapshot: TextSnapshot) -> None:
    listed = json.loads(calfat("recipes", "--json").out)["recipes"]
    assert [row["name"] for row in listed] == list(shipped_files())
    (digits,) = (row for row in listed if row["name"] == "calfat_digits")
    assert digits["file"] == str(shipped_files()["calfat_digits"])
    snapshot(digits["summary"])
    shown = calfat("recipes").out
    assert [row["name"] for row in listed if f"{row['name']} " not in shown or row["summary"] not in shown] == []


def test_a_sentence_does_not_end_with_et_al() -> None:
    Path("a.yaml").write_text("# PGD (Madry et al. 2018), on\n# digits. Then more.\na: 1\n# not this\n")
    assert headline(Path("a.yaml")) == "PGD (Madry et al. 2018), on digits."


def test_init_copies_a_recipe_as_it_is(snapshot: TextSnapshot) -> None:
    assert calfat("init", "calfat_digits") == Ended(
        0, "calfat_digits.yaml: written. Start it with: calfat run calfat_digits.yaml\n", ""
    )
    assert Path("calfat_digits.yaml").read_bytes() == (RECIPES / "calfat_digits.yaml").read_bytes()
    Path("calfat_digits.yaml").write_text("mine")
    assert calfat("init", "calfat_digits") == refused(
        "calfat_digits.yaml: exists already. Name another file with --out, or remove it."
    )
    assert Path("calfat_digits.yaml").read_text() == "mine"
    snapshot(calfat("init", "calfat_digits", "--out", "my own.yaml").out)


@pytest.mark.parametrize(
    ("words", "made"),
    [(("init", "calfat_digits"), "calfat_digits.yaml"), (("new-plugin", "x", "--kind", "model"), "x")],
)
def test_a_full_disk_leaves_nothing_that_a_second_try_would_not_replace(words: tuple[str, ...], made: str) -> None:
    full = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n{COMMAND}"
    assert python(full, *words) == Ended(2, "", f"error: {made}: cannot be written (File too large).\n")
    assert not Path(made).exists()
    assert calfat(*words).code == 0
