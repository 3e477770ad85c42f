"""What workers gain: a recipe with one worker and with several on this machine; the results are compared bit by bit.

    python benchmarks/workers.py --workers 0,1,2 --repeats 5

Prints a Markdown table: medians over the repeats, with the smallest and the largest value, and ratios to the first way.
0 workers is the run in one process; with 1 worker, a second process already evaluates while the worker trains. Run it
on an idle machine: it measures time on the clock. The ways alternate, so that a machine that gets slower does so for
all alike, and ratios are taken within a repeat.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        rounds: seconds of all rounds: from the first client's begin to the last checkpoint. The start of the workers
            is in the first round.
        wall: seconds from the command to its end: imports, data, rounds, final evaluation, page.
        bits: the last checkpoint.
    """

    rounds: float
    wall: float
    bits: bytes


def measure(recipe: Path, workers: int, sets: Sequence[str], directory: Path) -> Measured:
    """Run once, anew."""
    shutil.rmtree(directory, ignore_errors=True)
    words = [sys.executable, "-m", "calfat_plugin.cli.main", "run", str(recipe), "--plain", "--run-dir", str(directory)]
    words += [word for change in sets for word in ("--set", change)]
    words += ["--workers", str(workers)] if workers else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{workers} workers: failed.\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    with (directory / "rounds.csv").open(encoding="utf-8") as file:
        rounds = sum(float(row["seconds"]) for row in csv.DictReader(file))
    return Measured(rounds, wall, (directory / "checkpoints" / "last.safetensors").read_bytes())


def run_all(
    recipe: Path, ways: Sequence[int], repeats: int, sets: Sequence[str], runs: Path, say: Callable[[str], None]
) -> dict[int, list[Measured]]:
    """Every way in every repeat; they begin with another way each time."""
    measured: dict[int, list[Measured]] = {way: [] for way in ways}
    for repeat in range(repeats):
        first = repeat % len(ways)
        for way in (*ways[first:], *ways[:first]):
            run = measure(recipe, way, sets, runs / str(way))
            measured[way].append(run)
            say(f"repeat {repeat + 1}, {way} workers: {run.rounds:.1f} s of rounds, {run.wall:.1f} s in all")
        if len({runs_of_way[-1].bits for runs_of_way in measured.values()}) > 1:
            raise SystemExit("the last checkpoints differ, so these are not the same runs")
    return measured


def table(measured: dict[int, list[Measured]]) -> str:
    """A row a way; ratios are to the first."""
    base = next(iter(measured.values()))
    lines = ["| workers | rounds, s | times as fast | whole command, s | times as fast |", "| ---: " * 5 + "|"]
    for way, runs in measured.items():
        pairs = list(zip(base, runs, strict=True))
        cells = [
            _spread([run.rounds for run in runs], 1),
            _spread([first.rounds / run.rounds for first, run in pairs], 2),
            _spread([run.wall for run in runs], 1),
            _spread([first.wall / run.wall for first, run in pairs], 2),
        ]
        lines.append(f"| {way or 'none'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "calfat_digits.yaml")
    parser.add_argument("--workers", default="0,1,2", help="comma-separated numbers of workers; 0: one process")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of calfat run")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "workers", help="where to run")
    arguments = parser.parse_args()
    ways = [int(word) for word in arguments.workers.split(",")]
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    measured = run_all(arguments.recipe, ways, arguments.repeats, arguments.set, arguments.runs, say)
    machine = f"{len(os.sched_getaffinity(0))} cores"
    print(f"{arguments.recipe.name}, {arguments.repeats} repeats, {machine}; median (smallest to largest)\n")
    print(table(measured))


if __name__ == "__main__":
    main()
