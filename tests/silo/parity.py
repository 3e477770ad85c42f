"""The parity table: one recipe and seed, every runtime, every aggregator. From the root: python tests/silo/parity.py

Prints the hash of the final global model of each; exits with 1 when a row disagrees with itself.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.path.insert(0, str(Path(__file__).parent))

from federation import Federation, global_model

METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"aggregator": {"name": "fedavg"}},
    "FedProx": {"aggregator": {"name": "fedprox"}},
    "SCAFFOLD": {"aggregator": {"name": "scaffold"}},
    "FedAdam": {"aggregator": {"name": "fedadam"}},
    "FedRBN": {"trainer": {"name": "fedrbn"}},
}
PARTICIPATION = {
    "all": {"client_num_in_total": 2, "comm_round": 3},
    "2 of 3": {"client_num_in_total": 3, "client_num_per_round": 2, "comm_round": 3},
}


def digest(model: dict[str, Any]) -> str:
    """A hash of names and bits."""
    found = hashlib.sha256()
    for name in sorted(model):
        found.update(name.encode() + model[name].contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def hashes(folder: Path, method: str, participation: str) -> dict[str, str]:
    """Runtime to model hash."""
    with Federation(folder, train_args=PARTICIPATION[participation], **METHODS[method]) as federation:
        federation.start_all()
        found = {"simulator": digest(federation.simulate())}
        federation.finish()
        found["GRPC"] = digest(federation.model())
        words = ["--local", "--run-dir", str(folder / "mpi"), "--set", "comm_args.backend=MPI"]
        command = [sys.executable, "-m", "calfat_plugin.cli.main", "run", str(federation.recipe), *words]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        found["MPI"] = digest(global_model(folder / "mpi"))
    return found


def main() -> int:
    """Print the table as it is made."""
    print(f"{'method':<10}{'clients':<9}{'simulator':<14}{'GRPC':<14}{'MPI':<14}", flush=True)
    disagree = 0
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            for participation in PARTICIPATION:
                row = hashes(Path(folder) / f"{method}-{participation[0]}", method, participation)
                same = len(set(row.values())) == 1
                disagree += not same
                line = f"{method:<10}{participation:<9}" + "".join(f"{value:<14}" for value in row.values())
                print(line + ("same" if same else "DIFFERENT"), flush=True)
    return min(1, disagree)


if __name__ == "__main__":
    sys.exit(main())
