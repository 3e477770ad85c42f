"""One recipe and seed give one global model, bit for bit, whatever carries the messages: rows of ``parity.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.silo import parity
from tests.silo.broker import needs_mosquitto

METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "FedRBN")


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Tools]:
    with parity.Tools(tmp_path_factory.mktemp("tools")) as shared:
        yield shared


def test_every_runtime_ends_with_the_same_model(tmp_path: Path, tools: parity.Tools) -> None:
    rows = {}
    for size in parity.JOB_SIZES:
        tools.job(size)  # it imports while others run
    for method, participation in itertools.product(METHODS, parity.PARTICIPATION):
        case = parity.Case(method, participation)
        rows[case] = {
            runtime: parity.model_hash(runtime, case, tmp_path, tools)
            for runtime in ("simulator", "GRPC", "MPI simulator", "MPI")
        }
    assert [case for case, row in rows.items() if len(set(row.values())) > 1] == [], rows
    assert len({row["simulator"] for row in rows.values()}) == len(rows)  # and no two rows are alike


@needs_mosquitto
@pytest.mark.parametrize("participation", parity.PARTICIPATION)
@pytest.mark.parametrize("method", METHODS)
def test_mqtt_s3_ends_with_the_simulators_model(
    tmp_path: Path, tools: parity.Tools, method: str, participation: str
) -> None:
    case = parity.Case(method, participation)
    hashes = {runtime: parity.model_hash(runtime, case, tmp_path, tools) for runtime in ("simulator", "MQTT_S3")}
    assert hashes["MQTT_S3"] == hashes["simulator"]
