"""examples/meamed is a third party's plugin: installed by pip into a new environment, and used from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.runner import ROOT
from tests.contract.new_environment import NewEnvironment

INSTALL = "pip install --no-build-isolation ."


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> NewEnvironment:
    """With a copy of the example, which pip writes into, and the example installed."""
    made = NewEnvironment.make(tmp_path_factory.mktemp("environment"))
    shutil.copytree(ROOT / "examples" / "meamed", made.folder / "meamed")
    done = made.shell(INSTALL, made.folder / "meamed")
    assert done.code == 0, done.err
    return made


def test_its_tests_pass(environment: NewEnvironment) -> None:
    done = environment.shell("python -m pytest -q -p no:cacheprovider", environment.folder / "meamed")
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1].startswith("6 passed in ")


def test_it_is_found_from_any_folder(environment: NewEnvironment, tmp_path: Path) -> None:
    done = environment.shell("calfat plugins meamed", tmp_path)
    first = done.out.splitlines()[0]
    assert first == "meamed (aggregator), offered by calfat-meamed 1.0 (meamed)", done.err
    recipe = environment.folder / "meamed" / "meamed.yaml"
    checked = environment.shell(f"calfat check --strict {recipe}", tmp_path)
    assert checked.out.startswith(f"{recipe}: good. fedpgd with meamed on digits (iid)"), checked.err


def test_its_page_shows_how_to_install_it() -> None:
    page = (ROOT / "examples" / "meamed" / "README.md").read_text(encoding="utf-8")
    assert INSTALL.replace(" .", " -e .") in page


@pytest.mark.slow
def test_its_recipe_runs(environment: NewEnvironment, tmp_path: Path) -> None:
    recipe = environment.folder / "meamed" / "meamed.yaml"
    done = environment.shell(f"calfat run {recipe} --set train_args.comm_round=1 --run-dir run", tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "results.json").exists()
