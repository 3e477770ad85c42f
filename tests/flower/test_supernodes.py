"""Flower's SuperLink and SuperNodes, with TLS and keys: plain loops' bits; a node that is killed; one that lies."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from calfat_plugin.experiment import Experiment
from tests.flower.federation import METHODS, digest, parties, trained_in_loops, written
from tests.flower.processes import TIMEOUT, bits, started_by, wait_for
from tests.flower.supernodes import SuperNodes
from tests.silo.hostile import LIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]

CLIENTS, LIAR = 3, 1
CHANGES = (
    *METHODS["SCAFFOLD + FedPGD"],
    f"train_args.client_num_in_total={CLIENTS}",
    f"train_args.client_num_per_round={CLIENTS}",
)


def rows(directory: Path) -> list[dict[str, str]]:
    path = directory / "rounds.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def test_a_node_that_is_killed_ends_the_run_which_resumes_to_the_same_bits(tmp_path: Path) -> None:
    changes = (*CHANGES, "train_args.comm_round=3")
    recipe, experiment = written(tmp_path, changes)
    with SuperNodes(tmp_path, recipe, changes, CLIENTS) as nodes:
        run = nodes.begin()
        wait_for(lambda: rows(nodes.run_directory) or run.poll() is not None)
        nodes.kill(1)
        run.wait(TIMEOUT)
        said = nodes.said("run")
        assert "client 1 has not answered; Flower says: " in said, said
        assert "Traceback" not in said, said
        assert not (nodes.run_directory / "results.json").exists()
        nodes.start(1)
        said = nodes.run("--run-config", "resume=true")
        assert f"results: {nodes.run_directory}" in said, said
        assert [row["round"] for row in rows(nodes.run_directory)] == ["1", "2", "3"]
        assert bits(nodes.run_directory) == digest(trained_in_loops(experiment)[0])
    assert not started_by(tmp_path)


def lied_in_loops(experiment: Experiment) -> tuple[str, list[dict[int, str]]]:
    """The final model, and who was refused in each round, where a client lies as its node does; without any host."""
    server, worker = parties(experiment)
    refused = []
    for round in range(1, experiment.num_rounds + 1):
        server.start_round(round)
        wires = {client: worker.fit(client, round, server.downlink()) for client in range(CLIENTS)}
        worker.client_states.pop(LIAR)  # of an update that was not used, nothing is kept
        LIES[round - 1](wires[LIAR])
        record = server.finish_round(round, {each: (worker.num_examples(each), wire) for each, wire in wires.items()})
        refused.append(dict(record.refused))
    return digest(server.state), refused


def test_a_certified_node_that_lies_is_refused_as_a_silo_is(tmp_path: Path) -> None:
    changes = (*CHANGES, f"train_args.comm_round={len(LIES)}")
    recipe, experiment = written(tmp_path, changes)
    with SuperNodes(tmp_path, recipe, changes, CLIENTS, liar=LIAR) as nodes:
        said = nodes.run()
        assert f"results: {nodes.run_directory}" in said, said
        model, refused = lied_in_loops(experiment)
        assert all(list(each) == [LIAR] for each in refused)
        found = rows(nodes.run_directory)
        assert [row["refused"] for row in found] == [f"{LIAR}: {each[LIAR]}" for each in refused]
        assert [row["clients"] for row in found] == ["0 2"] * len(LIES)
        assert bits(nodes.run_directory) == model
