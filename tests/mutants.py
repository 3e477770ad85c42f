"""Plants the mistakes of ``mutants.yaml``; each must turn a test red. From the root: python tests/mutants.py

Each is planted in a copy of the working tree, one at a time. Arguments select mistakes by a part of their name. Exits
with 1 where a mistake survived; a text that is no longer found once is an error here, and in ``tests/test_mutants.py``.
Those that tests of Flower must find are left out where its environment is not there (`make .venv-flower/.installed`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
TIMEOUT = 600  # seconds for the tests of one mistake


class Mutant(NamedTuple):
    """A mistake: ``old``, which is in ``file`` once, becomes ``new``; ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FLOWER = ROOT / ".venv-flower" / "bin" / "python"
MUTANTS = tuple(Mutant(**entry) for entry in yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text()))


def python_for(mutant: Mutant) -> Path | None:
    """The Python that runs the tests of a mistake; None where it is not installed."""
    python = FLOWER if mutant.tests.startswith("tests/flower/") else Path(sys.executable)
    return python if python.exists() else None


def planted(mutant: Mutant, package: Path) -> str:
    """The file's text with the mistake in it.

    Raises:
        LookupError: the text to replace is not there, or more than once.
    """
    text = (package / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise LookupError(
            f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, expected once. "
            "The code has changed: plant the same mistake in the new code (tests/mutants.yaml)."
        )
    return text.replace(mutant.old, mutant.new)


def copied(target: Path) -> None:
    """Copy what the tests need: the files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).exists():  # not one that was just deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).unlink(missing_ok=True)  # a link of an earlier copy cannot be written over
            shutil.copyfile(ROOT / name, target / name, follow_symlinks=False)


def ended_with(mutant: Mutant, tree: Path) -> subprocess.CompletedProcess[str]:
    """Plant the mistake in ``tree``, run its tests, and put the file back.

    Raises:
        RuntimeError: the tests did not run at all.
    """
    file = tree / "calfat_plugin" / mutant.file
    good = file.read_text()
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [str(python_for(mutant)), "-m", "pytest", *options]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        file.write_text(planted(mutant, tree / "calfat_plugin"))
        ended = subprocess.run(
            [*command, mutant.tests], cwd=tree, env=environment, timeout=TIMEOUT, capture_output=True, text=True
        )
    finally:
        file.write_text(good)
    if ended.returncode not in (0, 1) or (ended.returncode == 1 and "FAILED" not in ended.stdout):
        raise RuntimeError(f"{mutant.name}: the tests did not run:\n{ended.stdout}{ended.stderr}")
    return ended


def turns_red(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests find the mistake."""
    return ended_with(mutant, tree).returncode == 1


def main(words: list[str]) -> int:
    named = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    chosen = [mutant for mutant in named if python_for(mutant)]
    if len(chosen) < len(named):
        print(f"left out, for there is no {FLOWER}: {len(named) - len(chosen)}")
    survived = []
    with TemporaryDirectory() as folder:
        copied(Path(folder))
        for mutant in chosen:
            red = turns_red(mutant, Path(folder))
            print(f"{'red     ' if red else 'SURVIVED'}  {mutant.name}", flush=True)
            survived += [] if red else [mutant.name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} planted mistakes turn a test red")
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
