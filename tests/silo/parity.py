"""The parity table: one recipe and seed, every runtime, every method. From the root: python tests/silo/parity.py

Prints the hash of the final global model of each; exits with 1 when a row disagrees with itself.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # the second: a party's process, which reads this file first
    ROOT = Path(__file__).parents[2]
    sys.path.insert(0, str(ROOT))
    sys.modules["tests"] = types.ModuleType("tests")  # fedml installs one of that name, which would be found first
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]

from tests.silo import broker
from tests.silo.federation import Federation, global_model, read_rounds

METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"aggregator": {"name": "fedavg"}},
    "FedProx": {"aggregator": {"name": "fedprox"}},
    "SCAFFOLD": {"aggregator": {"name": "scaffold"}},
    "FedAdam": {"aggregator": {"name": "fedadam"}},
    "FedRBN": {"trainer": {"name": "fedrbn"}},
    "Fed-LAT": {"trainer": {"name": "fedlat", "clean_rounds": 1}},
    "Long tail": {
        "data_args": {"partition_method": "longtail"},
        "aggregator": {"name": "scaffold"},
        "threat": {"by_class": {"warmup": 0.5}},
        "clients": [{"share": 0.6, "threat": {"inner": "sora", "by_class": None}}],
    },
    "Groups": {
        "aggregator": {"name": "scaffold"},
        "clients": [
            {"ids": 0, "trainer": {"name": "standard", "awp": {"warmup": 1}, "label_smoothing": 0.1}, "epochs": 2},
            {"smallest": 1, "threat": {"eps": 0.05, "inner": {"name": "atas", "warmup": 1}}, "learning_rate": 0.02},
        ],
        "ema": {"decay": 0.5},
    },
}
PARTICIPATION: Mapping[str, Mapping[str, int]] = {
    "all of 2": {"client_num_in_total": 2, "client_num_per_round": 2},
    "2 of 3": {"client_num_in_total": 3, "client_num_per_round": 2},
}
NUM_ROUNDS = 4  # of 2 of 3 clients: only then does one return that has sat out
ACROSS_SILOS = {"common_args": {"training_type": "cross_silo"}}


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    method: str
    participation: str

    def federation(self, folder: Path, **changes: Any) -> Federation:
        """Its recipe in a folder, with these changes."""
        train = {**PARTICIPATION[self.participation], "comm_round": NUM_ROUNDS}
        federation = Federation(folder, train_args=train, **{**METHODS[self.method], **changes})
        federation.reports = False
        return federation


class Tools(ExitStack):
    """What runtimes share and keep: broker and store, and hashes once found."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.hashes: dict[tuple[str, Case], str] = {}
        self._folder = folder
        self._services: dict[str, Any] = {}

    def services(self) -> dict[str, Any]:
        """Broker and store, as the recipe names them below ``calfat.silo``."""
        if not self._services:
            self._services = self.enter_context(broker.broker_and_store(self._folder / "services"))
        return self._services


def simulator(case: Case, folder: Path, tools: Tools) -> Path:
    with case.federation(folder) as federation:
        federation.simulate()
        return federation.simulated


def grpc(case: Case, folder: Path, tools: Tools) -> Path:
    with case.federation(folder, comm_args={"backend": "GRPC"}, **ACROSS_SILOS) as federation:
        federation.start_all()
        federation.finish()
        return federation.directory(0)


def mqtt_s3(case: Case, folder: Path, tools: Tools) -> Path:
    silo = tools.services()
    silo = {**silo, "mqtt": {**silo["mqtt"], "run": folder.name}}
    with case.federation(folder, comm_args={"backend": "MQTT_S3"}, silo=silo, **ACROSS_SILOS) as federation:
        federation.start_all()
        federation.finish()
        return federation.directory(0)


#: Name to a function that runs a case and returns the server's run directory.
RUNTIMES: Mapping[str, Callable[[Case, Path, Tools], Path]] = {"simulator": simulator, "GRPC": grpc, "MQTT_S3": mqtt_s3}


def model_hash(runtime: str, case: Case, folder: Path, tools: Tools) -> str:
    """The hash of names and bits of a case's final global model; the case runs when it is first asked for."""
    if (runtime, case) not in tools.hashes:
        tools.hashes[runtime, case] = _run_and_hash(runtime, case, folder, tools)
    return tools.hashes[runtime, case]


def _run_and_hash(runtime: str, case: Case, folder: Path, tools: Tools) -> str:
    """A client that was left out is no parity; a client that keeps something is tried after a round without it."""
    name = f"{runtime}-{case.method}-{case.participation}".replace(" ", "-")
    directory = RUNTIMES[runtime](case, folder / name, tools)
    rows = read_rounds(directory)
    assert [len(row["clients"].split()) for row in rows] == [2] * NUM_ROUNDS, rows
    assert not any(row["refused"] for row in rows), rows
    assert ("of 3" in case.participation) == returns([row["clients"].split() for row in rows]), rows
    found = hashlib.sha256()
    for name, tensor in sorted(global_model(directory).items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def returns(rounds: Sequence[Collection[str]]) -> bool:
    """Whether a client is in a round, not in the next, and in a later one: its state is not of the round before."""
    return any(
        client in later and client not in after
        for number, (first, after) in enumerate(pairwise(rounds), start=2)
        for client in first
        for later in rounds[number:]
    )


def main() -> int:
    """Print the table as it is made."""
    runtimes = [name for name in RUNTIMES if name != "MQTT_S3" or broker.MOSQUITTO is not None]
    print(f"{'method':<10}{'clients':<10}" + "".join(f"{name:<15}" for name in runtimes), flush=True)
    started, disagree = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as place, Tools(Path(place)) as tools:
        cases = [Case(method, participation) for method in METHODS for participation in PARTICIPATION]
        for case in cases:
            print(f"{case.method:<10}{case.participation:<10}", end="", flush=True)
            row = []
            for runtime in runtimes:
                row.append(model_hash(runtime, case, Path(place), tools))
                print(f"{row[-1]:<15}", end="", flush=True)
            print("same" if len(set(row)) == 1 else "DIFFERENT", flush=True)
            disagree += len(set(row)) > 1
    missing = "" if len(runtimes) == len(RUNTIMES) else "; mosquitto is not installed, so MQTT_S3 is left out"
    print(f"{time.monotonic() - started:.0f} s{missing}")
    return min(1, disagree)


if __name__ == "__main__":
    sys.exit(main())
