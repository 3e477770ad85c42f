"""Times a round of each method with each attack of training, for the figures and the column of README.md.

    python -m studies.passes.seconds --json studies/passes/seconds.json

Every method trains with every attack for eleven rounds, one after the other, on one thread; counted are rounds 6 to 10,
when attacks that warm up have done so, without the last one, which is evaluated. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import calfat_plugin as calfat

HERE = Path(__file__).parent
FIRST, ROUNDS = 6, 11


def suite_of(data: str) -> dict[str, Any]:
    """The suite of a data set."""
    suite: dict[str, Any] = yaml.safe_load((HERE / f"passes_{data}.yaml").read_text(encoding="utf-8"))
    return suite


def settings(suite: Mapping[str, Any], method: str, attack: str) -> dict[str, Any]:
    """What a run of the suite sets, but for its evaluation."""
    return {
        **suite["set"],
        **suite["axes"]["method"][method],
        **suite["axes"]["attack"][attack],
        "calfat.evaluators": ["natural"],
        "calfat.monitor": {"every": 1000, "evaluators": ["natural"]},  # only after the last round
        "calfat.runtime.threads": 1,
        "device_args.using_gpu": False,
    }


def seconds(recipe: Path, changes: Mapping[str, Any]) -> list[float]:
    """Of each counted round."""
    with TemporaryDirectory() as folder:
        changes = {**changes, "train_args.comm_round": ROUNDS}
        run = calfat.run(recipe, set=changes, run_dir=Path(folder) / "run", progress=False)
        return [float(value) for value in run.rounds["seconds"][FIRST - 1 : -1]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all of both suites and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits,fmnist", help="default: %(default)s")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every recipe")
    given = parser.parse_args(arguments)
    more = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in given.set)}
    numbers: dict[str, dict[str, dict[str, Any]]] = {}
    for data in given.data.split(","):
        suite, numbers[data] = suite_of(data), {}
        for method in suite["axes"]["method"]:
            for attack in suite["axes"]["attack"]:
                values = seconds(HERE / suite["base"], settings(suite, method, attack) | more)
                numbers[data][f"{method}/{attack}"] = {"values": values, "median": median(values)}
                print(f"{data}, {method}/{attack}: {median(values):.3f} s a round")
    content = {"title": "Seconds of a round", "machine": platform.processor() or platform.machine(), "numbers": numbers}
    given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
