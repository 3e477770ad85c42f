"""One recipe and seed give one global model, bit for bit, whatever carries the messages: rows of ``parity.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.silo import parity
from tests.silo.broker import needs_mosquitto

CASES = [
    parity.Case(method, participation)
    for method, participation in itertools.product(
        ("FedAvg", "FedProx", "SCAFFOLD", "FedRBN", "Fed-LAT", "Long tail", "Groups"), parity.PARTICIPATION
    )
]
#: States of server and clients, some of which wait, and methods of clients: messages differ most in these.
GROUPS = parity.Case("Groups", "2 of 3")
BUFFERS = parity.Case("FedRBN", "all of 2")
IN_EVERY_TEST = {("GRPC", GROUPS), ("MQTT_S3", GROUPS), ("MQTT_S3", BUFFERS)}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Tools]:
    with parity.Tools(tmp_path_factory.mktemp("tools")) as shared:
        yield shared


@pytest.mark.parametrize(
    ("runtime", "case"),
    [
        pytest.param(
            runtime,
            case,
            id=f"{runtime}-{case.method}-{case.participation}",
            marks=[needs_mosquitto] * (runtime == "MQTT_S3")
            + [pytest.mark.slow] * ((runtime, case) not in IN_EVERY_TEST),
        )
        for runtime, case in itertools.product(("GRPC", "MQTT_S3"), CASES)
    ],
)
def test_a_runtime_ends_with_the_simulators_model(
    tmp_path: Path, tools: parity.Tools, runtime: str, case: parity.Case
) -> None:
    simulated = parity.model_hash("simulator", case, tmp_path, tools)
    assert parity.model_hash(runtime, case, tmp_path, tools) == simulated


@pytest.mark.parametrize("cases", [(GROUPS, BUFFERS), pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_two_cases_end_alike(tmp_path: Path, tools: parity.Tools, cases: Sequence[parity.Case]) -> None:
    hashes = [parity.model_hash("simulator", case, tmp_path, tools) for case in cases]
    assert len(set(hashes)) == len(cases)
