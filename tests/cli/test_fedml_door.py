"""The ``fedml`` command: recipes are ours, everything else is answered by the host as ever."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from calfat_plugin.cli import fedml
from calfat_plugin.cli.fedml import is_ours
from tests.cli.runner import Ended, python

run = import_module("calfat_plugin.cli.run")

OURS = """\
run recipe.yaml
run RECIPE.YML
run recipes/mine
run --seed 3 recipe.yaml
run --set train_args.comm_round=3 recipe.yaml --resume
run there
run recipe.yaml --run-dir list
run calfat_digits
run -v dev recipe.yaml
run -- recipe.yaml
run --resume --role client --rank 1 recipe.yaml"""
THEIRS = """\

version
--help
run
run --help
run list
run list --help
run stop -r 7
run status recipe.yaml
run -k 0123abcd logs
run not-there
run -v there list
run --version there list
run -pf there --api_key there status
run --platform there not-there
run -v recipe.yaml
run --set calfat.name=recipe.yaml
run --run-dir there
run -- list
run --
check calfat_digits
launch job.yaml
build -t client recipe.yaml
login recipe.yaml"""


@pytest.mark.parametrize(
    ("line", "ours"), [(line, lines is OURS) for lines in (OURS, THEIRS) for line in lines.splitlines()]
)
def test_a_recipe_is_ours_and_anything_else_is_the_host_s(
    line: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.touch() if ours else there.mkdir()  # a folder is a recipe only where a recipe is expected
    assert is_ours(line.split()) == ours


def test_a_bad_recipe_is_refused_without_importing_the_host(tmp_path: Path) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print('fedml' in sys.modules))\n"
        "from calfat_plugin.cli.fedml import main; main()"
    )
    ended = python(program, "run", "missing.yaml", cwd=tmp_path)
    assert ended == Ended(2, "False\n", "error: missing.yaml: no such file.\n")


LINES = [["version"], ["run", "list", "--help"], ["--help"], ["run", "lsit"]]
BETWEEN = "\nWithout a recipe, fedml run is FedML's own command:\n\n"


def test_a_run_of_fedml_is_judged_by_calfat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fedml trust`` would be FedML's own command, which it has not."""
    for name in ("calfat", "fedml"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "fedml"), "run", "recipe.yaml"])
    assert run._program("calfat") == [str(tmp_path / "calfat")]
    assert run._program() == [str(tmp_path / "fedml")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run._program("calfat") == ["calfat"]
    assert run._program() == ["fedml"]


def test_the_host_gets_what_was_typed(tmp_path: Path) -> None:
    """A stand-in for the host, whose import takes some six seconds."""
    (tmp_path / "fedml" / "cli").mkdir(parents=True)
    for file, text in (
        ("__init__.py", ""),
        ("cli/__init__.py", ""),
        ("cli/cli.py", "import sys\n\ndef cli():\n    print('host:', *sys.argv[1:])\n"),
    ):
        (tmp_path / "fedml" / file).write_text(text)
    program = (
        "import sys\n"
        "from calfat_plugin.cli.fedml import main\n"
        f"for line in {[*LINES, ['run', '--help']]}:\n"
        "    sys.argv = ['fedml', *line]\n"
        "    main()\n"
    )
    ended = python(program, cwd=tmp_path, path=(tmp_path,))
    assert (ended.code, ended.err) == (0, "")
    forwarded = "".join(f"host: {' '.join(line)}\n" for line in LINES)
    assert ended.out.startswith(f"{forwarded}Usage: fedml run [OPTIONS] RECIPE\n")
    assert ended.out.endswith(f"{BETWEEN}host: run --help\n")


@pytest.mark.slow
def test_what_is_known_of_the_host_s_own_run_is_still_so() -> None:
    program = """
import json
from calfat_plugin.compat import make_torchvision_importable
make_torchvision_importable()
from fedml.cli.cli import cli
run = cli.commands["run"]
options = [name for option in run.params if not option.is_flag for name in option.opts]
print(json.dumps([sorted(options), sorted(run.commands)]))
"""
    ended = python(program)
    assert ended.code == 0, ended.err
    known = json.loads(ended.out.splitlines()[-1])
    assert known == [sorted(fedml._HOST_OPTIONS), sorted(fedml._HOST_COMMANDS)]
