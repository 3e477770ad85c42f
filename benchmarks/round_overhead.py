"""What a round costs beside training and evaluation: host, messages, aggregation, checkpoint, in milliseconds.

    python -m benchmarks.round_overhead --clients 5

Prints Markdown. Run it from the root of a checkout, on an idle machine. A recipe whose training is as short as it can
be (digits, a tiny network, one step a client) runs with ``--profile``; each repeat is a process of its own. The first
round is left out: it has the first calls of everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import ROOT, Report, Spread, command, machine, numbers, say

RECIPE = """\
common_args: {{training_type: simulation, random_seed: 0}}
data_args: {{dataset: digits, partition_method: iid}}
model_args: {{model: cnn_small}}
train_args: {{client_num_in_total: {clients}, client_num_per_round: {clients}, comm_round: {rounds}, batch_size: 2048}}
calfat:
  trainer: standard
  evaluators: [natural]
  monitor: {{evaluators: [natural], max_examples: 1}}
  runtime: {{threads: {threads}}}
"""
_WORK = ("training", "evaluation")


def run(folder: Path, recipe: str | Path, *options: str, python: Path | str = sys.executable) -> Path:
    """Run ``recipe``, a text or a file, anew in a process of its own, by this Python; returns the run directory."""
    number = len(list(folder.iterdir()))
    path, directory = folder / f"recipe-{number}.yaml", folder / f"run-{number}"
    if isinstance(recipe, Path):
        path = recipe
    else:
        path.write_text(recipe, encoding="utf-8")
    words = [str(python), "-m", "calfat_plugin.cli.main", "run", str(path), "--plain", "--run-dir", str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([*words, *options], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join([*words, *options])}\nended with {done.returncode}.\n{done.stdout}{done.stderr}")
    return directory


def spent(part: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(outermost span, milliseconds) of a round without training and evaluation, and what no span covers."""
    outermost = {span["path"][0]: 1000 * span["seconds"] for span in part["spans"] if len(span["path"]) == 1}
    yield from ((name, time) for name, time in outermost.items() if name not in _WORK)
    yield "host, messages, progress", 1000 * part["seconds"] - sum(outermost.values())


def overhead(clients: int, rounds: int, threads: int, repeats: int) -> dict[str, Spread]:
    """Span to milliseconds a round: the median round of each repeat; ``all`` is the median sum."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(1, repeats + 1):
            directory = run(Path(folder), RECIPE.format(clients=clients, rounds=rounds, threads=threads), "--profile")
            parts = json.loads((directory / "profile.json").read_text(encoding="utf-8"))["parts"]
            each = [dict(spent(part)) for part in parts if part["name"].startswith("round ")][1:]
            each = [{**row, "all": sum(row.values())} for row in each]
            for name in each[0]:
                found.setdefault(name, []).append(Spread(tuple(row[name] for row in each)).median)
            say(f"{repeat}/{repeats} {clients} clients: {found['all'][-1]:.2f} ms")
    return {name: Spread(tuple(values)) for name, values in found.items()}


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = command(__doc__)
    parser.add_argument("--clients", type=numbers, default=[5], help="comma-separated; default: 5")
    parser.add_argument("--rounds", type=int, default=50, help="of each run; default: 50")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds: expected 2 or more, for the first is left out")
    threads = given.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    report = Report("Overhead of a round", machine(torch.device("cpu")))
    found = {count: overhead(count, given.rounds, threads, given.repeats) for count in given.clients}
    for count, spans in found.items():
        report.keep(f"{count} clients", spans)
    names = list(next(iter(found.values())))
    report.table(
        f"Milliseconds a round beside training and evaluation, median of {given.rounds - 1} rounds",
        ["clients a round", *names],
        [(count, *(spans[name] for name in names)) for count, spans in found.items()],
    )
    report.finish(given.json)


if __name__ == "__main__":
    main()
