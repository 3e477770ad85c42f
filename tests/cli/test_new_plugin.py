"""``calfat new-plugin``: what it writes works as it is, whatever the kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calfat_plugin import __version__
from calfat_plugin.cli.new_plugin import KINDS
from tests.cli.runner import ROOT, calfat
from tests.environment import bare
from tests.snapshot import TextSnapshot

NAMES = {kind: f"my-{kind}" for kind in KINDS}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind."""
    folder = tmp_path_factory.mktemp("plugins")
    for kind, name in NAMES.items():
        assert calfat("new-plugin", name, "--kind", kind, "--into", str(folder)).code == 0
    return folder


def tool(*words: str, cwd: Path) -> str:
    """What a tool prints; it must find nothing."""
    env = bare(PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", PATH=os.environ["PATH"])
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_says_what_it_wrote_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = calfat("new-plugin", "my-fat", "--kind", "trainer")
    assert (ended.code, ended.err) == (0, "")
    snapshot(ended.out)
    files = sorted(str(path.relative_to(tmp_path / "my-fat")) for path in (tmp_path / "my-fat").rglob("*.*"))
    assert files == ["README.md", "my_fat.py", "my_fat.yaml", "pyproject.toml", "tests/test_my_fat.py"]


def test_the_tests_of_every_kind_pass(written: Path) -> None:
    """In one process, because it is the imports that take long; the plugins are found without being installed."""
    folders = [str(written / name) for name in NAMES.values()]
    path = [f"pythonpath={' '.join(folders)}"]
    said = tool("pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(written), "-o", *path,
                "--import-mode=importlib", *folders, cwd=written)  # fmt: skip
    assert said.splitlines()[-1].startswith(f"{2 * len(KINDS) - 1} passed in ")


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_of_every_kind_is_good(written: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written / NAMES[kind])
    module = f"my_{kind}"
    ended = calfat("check", "--strict", "--show", f"{module}.yaml", "--plugin", f"{module}.py")
    assert (ended.code, ended.err) == (0, "")
    assert NAMES[kind] in ended.out
    sys.modules.pop(module)


@pytest.mark.parametrize("name", ["My-FAT", "my-", "class", "taken", "torch", "iterable", "fedavg"])
def test_names_that_cannot_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    ended = calfat("new-plugin", name, "--kind", "model" if name != "iterable" else "aggregator")
    assert (ended.code, ended.out) == (2, "")
    snapshot(ended.err, torch_file=torch.__file__, version=__version__)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "taken"]
