"""The wheel with everything that it needs, in empty environments. Downloads gigabytes where no cache has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import ROOT, Ended
from tests.install.environments import UV, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SHORT = ("--set", "train_args.comm_round=1", "--set", "calfat.evaluators=[natural]", "--plain")


def interpreters() -> Iterator[tuple[str, str]]:
    """Each version that we declare and this machine has, with its interpreter."""
    for version in ("3.10", "3.11"):
        found = subprocess.run(
            [UV, "python", "find", "--no-project", "--no-managed-python", version],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if found.returncode == 0:
            yield version, found.stdout.strip()


INSTALLATIONS = [
    *(pytest.param("uv", path, ("-c", "constraints.txt"), id=f"uv-{version}") for version, path in interpreters()),
    pytest.param("uv", sys.executable, ("--resolution", "lowest-direct"), id="uv-lower-bounds"),
    pytest.param("pip", sys.executable, ("-c", "constraints.txt"), id="pip"),
    pytest.param("pip", sys.executable, (), id="pip-newest"),
]


@pytest.mark.parametrize(("tool", "python", "options"), INSTALLATIONS)
def test_a_recipe_runs_where_only_the_wheel_was_installed(
    tool: str, python: str, options: tuple[str, ...], dist: Path, tmp_path: Path
) -> None:
    bin, elsewhere = tmp_path / "env" / "bin", tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = tuple(str(ROOT / option) if option == "constraints.txt" else option for option in options)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join((str(bin), environment["PATH"]))

    def install(*words: str) -> None:
        target = ("--python", str(bin / "python"))
        run(*((UV, "pip", "install", *target) if tool == "uv" else (str(bin / "pip"), "install")), *words)

    def call(*words: str) -> Ended:
        done = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)

    run(UV, "venv", "--seed", "--python", python, str(tmp_path / "env"))
    install(*options, str(next(dist.glob("*.whl"))))
    findings = json.loads(call("calfat", "doctor", "--json").out)
    broken = [found for found in findings if found["status"] == "fail"]
    assert [found for found in broken if found["check"] != "import fedml"] == []  # which has a limit of time
    for command in ("calfat", "fedml"):
        done = call(command, "run", "calfat_digits", *SHORT, "--run-dir", command)
        assert done.code == 0, done
        assert json.loads((elsewhere / command / "results.json").read_text())["rounds"] == 1
        assert (elsewhere / command / "report.html").exists()
    assert call("calfat", "suite", "digits_table1", "--dry-run").out.endswith("good. 16 cells, 240 runs to do.\n")
    install("--reinstall" if tool == "uv" else "--force-reinstall", "--no-deps", "fedml==0.9.6")
    assert call("fedml", "run", "missing.yaml") == Ended(2, "", "error: missing.yaml: no such file.\n")
    assert call("fedml", "version").out == "fedml version: 0.9.6\n"
    run(str(bin / "python"), "-m", "pip", "uninstall", "--yes", "calfat-plugin")
    # FedML's own answer, which on a CPU build of torch is an error of torchvision's (docs/host.md).
    host = "from fedml.cli.cli import cli; cli()"
    for words in (("version",), ("run", "missing.yaml")):
        ours, theirs = call("fedml", *words), call("python", "-c", host, *words)
        assert (ours.code, ours.out) == (theirs.code, theirs.out)
    assert not call("fedml", "run", "missing.yaml").err.startswith("error: missing.yaml")
