"""The ``fedml`` command: recipes are ours, everything else is answered by the host as ever."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from calfat_plugin.cli import fedml
from calfat_plugin.cli.fedml import is_ours
from tests.cli.runner import Ended, python


@pytest.mark.parametrize(
    "line",
    [
        "run recipe.yaml",
        "run RECIPE.YML",
        "run recipes/mine",
        "run --seed 3 recipe.yaml",
        "run --set train_args.comm_round=3 recipe.yaml --resume",
        "run there",
        "run recipe.yaml --run-dir list",
        "run calfat_digits",
        "run -v dev recipe.yaml",
        "run -- recipe.yaml",
        "run --resume --role client --rank 1 recipe.yaml",
    ],
)
def test_a_recipe_is_ours(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    assert is_ours(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "version",
        "--help",
        "run",
        "run --help",
        "run list",
        "run list --help",
        "run stop -r 7",
        "run status recipe.yaml",
        "run -k 0123abcd logs",
        "run not-there",
        "run -v there list",
        "run --version there list",
        "run -pf there --api_key there status",
        "run --platform there not-there",
        "run -v recipe.yaml",
        "run --set calfat.name=recipe.yaml",
        "run --run-dir there",
        "run -- list",
        "run --",
        "check calfat_digits",
        "launch job.yaml",
        "build -t client recipe.yaml",
        "login recipe.yaml",
    ],
)
def test_anything_else_is_the_host_s(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()  # a folder is a recipe only where a recipe is expected
    assert not is_ours(line.split())


def test_a_bad_recipe_is_refused_without_importing_the_host(tmp_path: Path) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print('fedml' in sys.modules))\n"
        "from calfat_plugin.cli.fedml import main; main()"
    )
    ended = python(program, "run", "missing.yaml", cwd=tmp_path)
    assert ended == Ended(2, "False\n", "error: missing.yaml: no such file.\n")


LINES = [["version"], ["run", "list", "--help"], ["--help"], ["run", "lsit"]]
ANSWERS = """
import contextlib, io, json, sys
from calfat_plugin.compat import make_torchvision_importable
make_torchvision_importable()
{get_main}
answers = []
for line in {lines!r}:
    sys.argv = ["fedml", *line]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    answers.append([code, out.getvalue(), "" if "pkg_resources is deprecated" in err.getvalue() else err.getvalue()])
print(json.dumps(answers))
from fedml.cli.cli import cli
run = cli.commands["run"]
options = [name for option in run.params if not option.is_flag for name in option.opts]
print(json.dumps([sorted(options), sorted(run.commands)]))
"""


def test_the_host_s_commands_answer_as_the_host_s_own(tmp_path: Path) -> None:
    """One test of two processes, because importing fedml takes some six seconds."""
    home = {"HOME": str(tmp_path)}
    ours, host = (
        python(ANSWERS.format(get_main=get_main, lines=LINES), cwd=tmp_path, **home)
        for get_main in (
            "from calfat_plugin.cli.fedml import main",
            "from fedml.cli.cli import cli as main",
        )
    )
    assert ours.code == host.code == 0, ours.err + host.err
    *_, said, known = ours.out.splitlines()
    answers = json.loads(said)
    assert answers == json.loads(host.out.splitlines()[-2])
    assert json.loads(known) == [sorted(fedml._HOST_OPTIONS), sorted(fedml._HOST_COMMANDS)]
    version, listing, helping, misspelt = answers
    assert version == [0, f"fedml version: {metadata.version('fedml')}\n", ""]
    assert listing[1].startswith("Usage: fedml run list [OPTIONS]")
    assert helping[1].startswith("Usage: fedml [OPTIONS] COMMAND [ARGS]...")
    assert misspelt[0] == 2
    assert "No such command 'lsit'" in misspelt[2]
