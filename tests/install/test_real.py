"""The wheel with everything that it needs, in empty environments. Downloads gigabytes where no cache has them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.runner import ROOT, Ended
from tests.install.environments import Downloaded, interpreter, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SUITE = ROOT / "studies" / "paper" / "small_table1.yaml"
SHORT = ("--set", "train_args.comm_round=1", "--set", "calfat.evaluators=[natural]", "--plain")


INSTALLATIONS = [
    *(
        pytest.param("uv", path, ("-c", "constraints.txt"), id=f"uv-{version}")
        for version in ("3.10", "3.11")
        if (path := interpreter(version))
    ),
    pytest.param("uv", sys.executable, ("--resolution", "lowest-direct"), id="uv-lower-bounds"),
    pytest.param("pip", sys.executable, ("-c", "constraints.txt"), id="pip"),
    pytest.param("pip", sys.executable, (), id="pip-newest"),
]


@pytest.mark.parametrize(("tool", "python", "options"), INSTALLATIONS)
def test_a_recipe_runs_where_only_the_wheel_was_installed(
    tool: str, python: str, options: tuple[str, ...], dist: Path, tmp_path: Path
) -> None:
    options = tuple(str(ROOT / option) if option == "constraints.txt" else option for option in options)
    environment = Downloaded(tmp_path, python, tool)
    environment.install(*options, str(next(dist.glob("*.whl"))))
    call, elsewhere = environment.call, environment.elsewhere
    for command in ("calfat", "fedml"):
        done = call(command, "run", "calfat_digits", *SHORT, "--run-dir", command)
        assert done.code == 0, done
        assert json.loads((elsewhere / command / "results.json").read_text())["rounds"] == 1
        assert (elsewhere / command / "report.html").exists()
    assert call("calfat", "suite", str(SUITE), "--dry-run").out.endswith("good. 34 cells, 510 runs to do.\n")
    environment.install("--no-deps", "fedml==0.9.6", again=True)
    assert call("fedml", "run", "missing.yaml") == Ended(2, "", "error: missing.yaml: no such file.\n")
    assert call("fedml", "version").out == "fedml version: 0.9.6\n"
    run(str(environment.bin / "python"), "-m", "pip", "uninstall", "--yes", "calfat-plugin")
    # FedML's own answer, which on a CPU build of torch is an error of torchvision's (docs/host.md).
    host = "from fedml.cli.cli import cli; cli()"
    for words in (("version",), ("run", "missing.yaml")):
        ours, theirs = call("fedml", *words), call("python", "-c", host, *words)
        assert (ours.code, ours.out) == (theirs.code, theirs.out)
    assert not call("fedml", "run", "missing.yaml").err.startswith("error: missing.yaml")
