"""What workers gain: a recipe in one process, with one worker and with several; the results are compared bit by bit.

    python -m benchmarks.workers --workers 0,1,2 --json workers.json

Prints Markdown. Run it from the root of a checkout, on an idle machine. 0 workers is the plain run, in one process;
with 1 worker, a second process already evaluates while the worker trains. Each run is made anew, in processes of its
own, and all must end with the same checkpoint. The seconds of the rounds have the start of the workers within; those of
the command also imports, data, checkpoints, final evaluation and page.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measuring import ROOT, Report, alternated_quantities, command, machine, words
from benchmarks.round_overhead import run
from calfat_plugin.rounds_csv import seconds_of
from calfat_plugin.runs.directory import RunDirectory

_ROUNDS, _WHOLE = "seconds of all rounds", "seconds of the command"


class Ways:
    """Runs of one recipe that differ in the number of workers.

    Args:
        folder: an empty one, for the runs.
        recipe: the file.
        options: further words of ``calfat run``.
    """

    def __init__(self, folder: Path, recipe: Path, options: list[str]) -> None:
        self._folder, self._recipe, self._options = folder, recipe, options
        self._first: bytes | None = None

    def way(self, workers: int) -> Callable[[], dict[str, float]]:
        """What runs the recipe once with so many workers (0: in one process), and gives its seconds.

        Raises (when called):
            SystemExit: the run failed, or its last checkpoint is not that of the first run.
        """
        options = [*self._options, *(["--workers", str(workers)] if workers else [])]

        def measure() -> dict[str, float]:
            started = time.perf_counter()
            directory = RunDirectory(run(self._folder, self._recipe, *options))
            whole = time.perf_counter() - started
            bits = directory.last_checkpoint.read_bytes()
            self._first = self._first or bits
            if bits != self._first:
                raise SystemExit(f"{directory.last_checkpoint}: other bits than in the first run; workers: {workers}.")
            return {_ROUNDS: seconds_of(directory.rounds), _WHOLE: whole}

        return measure


def _ways(text: str) -> list[int]:
    if not all(word.isdecimal() for word in words(text)) or not words(text):
        raise argparse.ArgumentTypeError(f"got {text}, expected whole numbers such as 0,1,2")
    return [int(word) for word in words(text)]


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = command(__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "calfat_release_digits.yaml")
    parser.add_argument("--workers", type=_ways, default=[0, 1, 2], help="0: in one process; default: 0,1,2")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of calfat run")
    given = parser.parse_args(arguments)
    sets = [*given.set, *([f"calfat.runtime.threads={given.threads}"] if given.threads else [])]
    report = Report(f"Workers: {given.recipe.name}", machine(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(Path(folder), given.recipe, [word for change in sets for word in ("--set", change)])
        names = {str(count) if count else "none": ways.way(count) for count in given.workers}
        found = alternated_quantities(names, given.repeats)
    first, base = next(iter(found.items()))
    for name, spreads in found.items():
        report.keep(f"workers: {name}", spreads)
    faster = f"times as fast as {first}"
    report.table(
        f"{given.repeats} alternated repeats, the same bits each time",
        ["workers", _ROUNDS, faster, _WHOLE, faster],
        [
            (name, *(cell for each in (_ROUNDS, _WHOLE) for cell in (spreads[each], base[each].over(spreads[each]))))
            for name, spreads in found.items()
        ],
    )
    report.finish(given.json)


if __name__ == "__main__":
    main()
