"""What it costs to carry a run over gRPC: one recipe in the simulator and as a federation on this machine.

    python benchmarks/silo_overhead.py --seeds 0,1,2

Prints a Markdown table. Run it on an idle machine: it measures time on the clock, and all traffic on the loopback
interface. To count this traffic alone, run it in a network of its own:

    unshare -n sh -c 'ip link set lo up && python benchmarks/silo_overhead.py'

Each seed is run three times: in the simulator; as a server and clients that share all cores, where clients train at
the same time; and with all of these processes bound to a single core, where they cannot, so that what a round takes
longer than in the simulator is what the federation costs.
"""

from __future__ import annotations

import argparse
import csv
import json
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
GRPC = ("common_args.training_type=cross_silo", "comm_args.backend=GRPC", "calfat.silo.start_deadline=600")


@dataclass(frozen=True)
class Way:
    """A way to run the recipe: further arguments, and the cores to use (None: all)."""

    label: str
    words: tuple[str, ...]
    cores: frozenset[int] | None = None


@dataclass(frozen=True)
class Measured:
    """One run."""

    wall: float
    rounds: Sequence[float]
    final: float
    payload: Sequence[int]
    loopback: int
    scores: tuple[float, ...]

    @property
    def start(self) -> float:
        """Seconds outside rounds and final evaluation: imports, data, meeting, report."""
        return self.wall - sum(self.rounds) - self.final


def measure(way: Way, recipe: Path, seed: int, directory: Path) -> Measured:
    """Run once, anew."""
    shutil.rmtree(directory, ignore_errors=True)
    words = [sys.executable, "-m", "calfat_plugin.cli.main", "run", str(recipe), "--plain", "--seed", str(seed)]
    words += ["--run-dir", str(directory), *way.words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    all_cores, before, started = os.sched_getaffinity(0), _loopback_bytes(), time.perf_counter()
    try:
        os.sched_setaffinity(0, way.cores or all_cores)  # what we start inherits it
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    finally:
        os.sched_setaffinity(0, all_cores)
    wall, loopback = time.perf_counter() - started, _loopback_bytes() - before
    if done.returncode != 0:
        raise SystemExit(f"{way.label}, seed {seed}: failed.\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    with (directory / "rounds.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    evaluations = json.loads((directory / "results.json").read_text(encoding="utf-8"))["evaluations"]
    return Measured(
        wall,
        [float(row["seconds"]) for row in rows],
        sum(evaluation["seconds"] for evaluation in evaluations),
        [int(row["bytes_down"]) + int(row["bytes_up"]) for row in rows],
        loopback,
        tuple(evaluation["accuracy"] for evaluation in evaluations),
    )


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise SystemExit("this machine has no loopback interface called lo")


def table(measured: dict[Way, list[Measured]]) -> str:
    """A row a way: means over the seeds, with standard deviations where there are several."""
    simulated = next(iter(measured.values()))
    lines = [
        "| | seconds per round | ratio to the simulator | start and end, s | tensor bytes per round "
        "| bytes on the wire per round | ratio to the tensors |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for way, runs in measured.items():
        rounds = [statistics.fmean(run.rounds) for run in runs]
        ratio = [
            statistics.fmean(run.rounds) / statistics.fmean(base.rounds)
            for run, base in zip(runs, simulated, strict=True)
        ]
        start = [run.start for run in runs]
        payload = statistics.fmean(statistics.fmean(run.payload) for run in runs)
        wire = statistics.fmean(run.loopback / len(run.rounds) for run in runs)
        across = "--local" in way.words
        cells = [way.label, _spread(rounds, "{:.3f}"), _spread(ratio, "{:.3f}"), _spread(start, "{:.1f}")]
        cells += [f"{payload:,.0f}", f"{wire:,.0f}", f"{wire / payload:.2f}"] if across else ["-", "-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    text = form.format(statistics.fmean(values))
    return text + (f" ± {form.format(statistics.stdev(values))}" if len(values) > 1 else "")


def ways(cores: Sequence[int]) -> list[Way]:
    """The simulator first."""
    across = ("--local", *(word for change in GRPC for word in ("--set", change)))
    return [
        Way("simulator, one process", ()),
        Way(f"gRPC, {len(cores)} cores for all parties", across),
        Way("gRPC, one core for all parties", across, frozenset(cores[:1])),
    ]


def run_all(recipe: Path, seeds: Sequence[int], runs: Path, say: Callable[[str], None]) -> dict[Way, list[Measured]]:
    """Every way with every seed, seed by seed, so that a machine that gets slower does so for all alike."""
    measured: dict[Way, list[Measured]] = {way: [] for way in ways(sorted(os.sched_getaffinity(0)))}
    for seed in seeds:
        for number, way in enumerate(measured):
            run = measure(way, recipe, seed, runs / f"{number}-{seed}")
            measured[way].append(run)
            say(f"{way.label}, seed {seed}: {sum(run.rounds):.1f} s of rounds, {run.wall:.1f} s in all")
        if len({runs_of_way[-1].scores for runs_of_way in measured.values()}) > 1:
            raise SystemExit(f"seed {seed}: the accuracies differ, so these are not the same runs")
    return measured


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "calfat_digits.yaml")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "silo-overhead", help="where to run")
    arguments = parser.parse_args()
    seeds = [int(word) for word in arguments.seeds.split(",")]
    measured = run_all(arguments.recipe, seeds, arguments.runs, lambda line: print(line, file=sys.stderr, flush=True))
    print(table(measured))


if __name__ == "__main__":
    main()
