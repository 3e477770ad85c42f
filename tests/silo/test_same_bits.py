"""One recipe and seed give one global model: in the host's simulator and over gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.silo.federation import Federation, assert_same_bits

ALL = {"client_num_in_total": 2}
SOME = {"client_num_in_total": 3, "client_num_per_round": 2}


@pytest.mark.parametrize(
    ("aggregator", "train_args"),
    [
        ("fedavg", ALL),
        ("scaffold", SOME),
        pytest.param("fedavg", SOME, marks=pytest.mark.slow),
        pytest.param("fedprox", ALL, marks=pytest.mark.slow),
        pytest.param("fedprox", SOME, marks=pytest.mark.slow),
        pytest.param("scaffold", ALL, marks=pytest.mark.slow),
    ],
)
def test_grpc_ends_with_the_simulators_model(tmp_path: Path, aggregator: str, train_args: dict[str, Any]) -> None:
    with Federation(tmp_path, aggregator={"name": aggregator}, train_args=train_args) as federation:
        federation.start_all()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        rows = federation.rounds()
    assert [len(row["clients"].split()) for row in rows] == [2, 2, 2]
    assert not any(row["refused"] for row in rows)
