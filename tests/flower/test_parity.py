"""The same recipe on FedML and on Flower, each in its environment: the same checkpoints, by SHA-256.

FedML's Python is the one that CALFAT_FEDML_PYTHON names, or that of ``.venv`` beside this environment.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.runner import ROOT
from tests.flower.federation import METHODS, written
from tests.flower.processes import TIMEOUT, run_words

FEDML = Path(os.environ.get("CALFAT_FEDML_PYTHON", ROOT / ".venv" / "bin" / "python"))
PYTHONS = {"fedml": str(FEDML), "flower": sys.executable}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * TIMEOUT),
    pytest.mark.skipif(not FEDML.exists(), reason="FedML's environment is not here (CALFAT_FEDML_PYTHON)"),
]


def call(host: str, *words: str) -> str:
    """Call a host's Python, which imports this working tree; returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHONS[host], *words], env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(host: str, recipe: Path, directory: Path, *words: str) -> dict[str, str]:
    """``calfat run``; of every checkpoint, also of what each client keeps, the SHA-256 of the file."""
    call(host, *run_words(recipe, directory, "--host", host, *words))
    files = sorted((directory / "checkpoints").rglob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def as_words(changes: tuple[str, ...]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def test_both_environments_have_the_same_torch() -> None:
    version = call("fedml", "-c", "import torch; print(torch.__version__)").split("+")[0].strip()
    assert version == torch.__version__.split("+")[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_checkpoints_are_those_of_fedml(method: str, tmp_path: Path) -> None:
    recipe, _ = written(tmp_path)
    found = {host: run(host, recipe, tmp_path / host, *as_words(METHODS[method])) for host in PYTHONS}
    assert "last.safetensors" in found["fedml"]
    assert found["flower"] == found["fedml"]


@pytest.mark.parametrize(("first", "then"), [("fedml", "flower"), ("flower", "fedml")])
def test_a_run_goes_on_with_the_other_host(first: str, then: str, tmp_path: Path) -> None:
    words = as_words(METHODS["SCAFFOLD + FedPGD"])
    recipe, _ = written(tmp_path)
    whole = run("fedml", recipe, tmp_path / "whole", *words)
    run(first, recipe, tmp_path / "run", *words, "--set", "train_args.comm_round=2")
    assert run(then, recipe, tmp_path / "run", *words, "--resume") == whole
