"""Mutation testing with mutmut: every operator and constant of the core changed, one at a time. ``pyproject.toml`` says
which modules and which tests. From the root: python tests/mutation.py [--minutes N] [--survivors] [PATTERN ...]

A PATTERN selects mutants, such as 'calfat_plugin.maths.*'. Each survivor must be explained in ``survivors.yaml``; one
that is not is printed and ends the command with 1. Results in ``build/mutation`` are kept: without a PATTERN, the
command continues with what was not tried yet; what a PATTERN selects is tried again, whatever was found before.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parent))  # as a command and from a test alike
from mutants import ROOT, copied

FOLDER = ROOT / "build" / "mutation"
EXPLAINED = ROOT / "tests" / "survivors.yaml"
_KILLED, _SURVIVED = ("killed", "timeout", "caught by type check"), ("survived", "no tests", "suspicious")


class Change(NamedTuple):
    """What a mutant changes: lines without their indentation, joined where there are several."""

    where: str  # module and function
    old: str = ""
    new: str = ""


def explained() -> dict[Change, str]:
    """The survivors that need no test, with the reason; a change without lines is every change of that function."""
    entries = yaml.safe_load(EXPLAINED.read_text())
    return {
        Change(entry["where"], entry.get("old", ""), new): entry["why"]
        for entry in entries
        for new in entry.get("new", [""])
    }


def run(minutes: float, children: int, patterns: list[str]) -> None:
    """Let mutmut work for a while; what it has found out is kept."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *patterns]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    working = subprocess.Popen(command, cwd=FOLDER, env=environment, start_new_session=True)
    try:
        working.wait(60 * minutes)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(working.pid, signal.SIGINT)
        working.wait()
    print()


def mutmut(*words: str) -> str:
    """What a command of mutmut prints."""
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *words], cwd=FOLDER, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def statuses() -> Iterator[tuple[str, str]]:
    """(mutant, what became of it)."""
    for line in mutmut("results", "--all", "true").splitlines():
        name, colon, status = line.strip().partition(": ")
        if colon and "__mutmut_" in name:
            yield name, status


def survivors_among(patterns: list[str]) -> list[str]:
    """Names of mutants that no test killed in an earlier run."""
    chosen = (name for name, status in statuses() if status in _SURVIVED)
    return [name for name in chosen if any(fnmatchcase(name, pattern) for pattern in patterns or ["*"])]


def change(mutant: str) -> Change:
    """What a mutant changes."""
    lines = mutmut("show", mutant).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("@@"))
    old, new = (" / ".join(line[1:].strip() for line in lines[start:] if line.startswith(sign)) for sign in ("-", "+"))
    module, _, function = mutant.rpartition("__mutmut_")[0].rpartition(".x")
    return Change(f"{module.removeprefix('calfat_plugin.')}.{function.strip('_ǁ').replace('ǁ', '.')}", old, new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--children", type=int, default=1, help="processes at a time")
    parser.add_argument("--survivors", action="store_true", help="try only what no test has killed so far, again")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    words = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    FOLDER.mkdir(parents=True, exist_ok=True)
    copied(FOLDER)
    patterns = survivors_among(words.patterns) if words.survivors else words.patterns
    if words.survivors and not patterns:
        parser.error("nothing has survived; leave out --survivors")
    run(words.minutes, words.children, patterns)

    found = dict(statuses())
    counts = Counter(found.values())
    reasons = explained()
    survivors = {name: change(name) for name, status in found.items() if status in _SURVIVED}
    unexplained = sorted(one for one in set(survivors.values()) - reasons.keys() if Change(one.where) not in reasons)
    killed = sum(counts[status] for status in _KILLED)
    checked = killed + len(survivors)
    for one in unexplained:
        print(yaml.safe_dump([{**one._asdict(), "new": [one.new], "why": ""}], sort_keys=False, width=1000))
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    print(f"killed {killed} of {checked}; {len(survivors)} survived, {len(unexplained)} of them without an explanation")
    return 1 if unexplained or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
