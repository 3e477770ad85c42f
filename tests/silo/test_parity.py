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
        ("FedAvg", "FedProx", "SCAFFOLD", "FedRBN", "Fed-LAT", "Groups"), parity.PARTICIPATION
    )
]
#: States of server and clients, some of which wait, and methods of clients: messages differ most in these.
IN_EVERY_TEST = (parity.Case("Groups", "2 of 3"),)
#: In one runtime.
BUFFERS = parity.Case("FedRBN", "all of 2")


def each_case(*in_every_test: parity.Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case, id=f"{case.method}-{case.participation}", marks=[pytest.mark.slow] * (case not in in_every_test)
            )
            for case in CASES
        ],
    )


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Tools]:
    with parity.Tools(tmp_path_factory.mktemp("tools")) as shared:
        yield shared


@each_case(*IN_EVERY_TEST)
def test_every_runtime_ends_with_the_same_model(tmp_path: Path, tools: parity.Tools, case: parity.Case) -> None:
    tools.job(case.num_parties)  # it imports while others run
    runtimes = ("simulator", "GRPC", "MPI simulator", "MPI")
    hashes = {runtime: parity.model_hash(runtime, case, tmp_path, tools) for runtime in runtimes}
    assert len(set(hashes.values())) == 1, hashes


def test_both_simulators_have_the_same_attackers(tmp_path: Path, tools: parity.Tools) -> None:
    case = parity.Case("Attackers", "2 of 3")
    hashes = {runtime: parity.model_hash(runtime, case, tmp_path, tools) for runtime in ("simulator", "MPI simulator")}
    assert len(set(hashes.values())) == 1, hashes


@needs_mosquitto
@each_case(*IN_EVERY_TEST, BUFFERS)
def test_mqtt_s3_ends_with_the_simulators_model(tmp_path: Path, tools: parity.Tools, case: parity.Case) -> None:
    hashes = {runtime: parity.model_hash(runtime, case, tmp_path, tools) for runtime in ("simulator", "MQTT_S3")}
    assert hashes["MQTT_S3"] == hashes["simulator"]


@pytest.mark.parametrize(
    "cases", [(*IN_EVERY_TEST, BUFFERS), pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_two_cases_end_alike(tmp_path: Path, tools: parity.Tools, cases: Sequence[parity.Case]) -> None:
    hashes = [parity.model_hash("simulator", case, tmp_path, tools) for case in cases]
    assert len(set(hashes)) == len(cases)
