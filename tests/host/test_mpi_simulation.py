"""The MPI simulator's server and workers, without a job: who keeps what of a client, and which client is trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.wire import add_client_state, pack_refusal
from calfat_plugin.federation.worker import Worker, shards_of
from calfat_plugin.host import mpi_simulation
from calfat_plugin.host.arguments import ServerTask, host_arguments
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import RoundRecord
from tests.host.federation import CPU, Ran, experiment, run

SOME = {"train_args__client_num_in_total": 4, "train_args__client_num_per_round": 2, "calfat__aggregator": "scaffold"}


class Job:
    """A server and one worker of an MPI job, and the messages between them by hand."""

    def __init__(self, **values: Any) -> None:
        self.experiment = experiment(**SOME, **values)
        dataset = self.experiment.load_dataset()
        dataset = dataclasses.replace(
            dataset, train=dataset.train.subset(range(80)), test=dataset.test.subset(range(20))
        )
        shards = shards_of(self.experiment, dataset, CPU)
        self.args = host_arguments(self.experiment)
        self.server = Server(self.experiment, dataset, CPU, RunObserver())
        self.worker = Worker(self.experiment, dataset, shards, CPU, RunObserver())
        counts, nothing = {client: len(shard) for client, shard in shards.items()}, dict.fromkeys(shards)
        travelling = mpi_simulation.TravellingTrainer(self.worker, self.args, self)  # type: ignore[arg-type]
        self.trainer = mpi_simulation.AnyClientsTrainer(0, nothing, counts, nothing, 0, CPU, self.args, travelling)
        self.ran = Ran()

    def rounds(self) -> mpi_simulation.Rounds:
        def on_round(record: RoundRecord, snapshot: Snapshot) -> None:
            self.ran.records.append(record)
            self.ran.snapshots.append(dataclasses.replace(snapshot, client_states=dict(snapshot.client_states)))

        return mpi_simulation.Rounds(self.args, ServerTask(self.server, on_round))

    def answer(self, rounds: mpi_simulation.Rounds, client: int) -> tuple[Any, int]:
        """What a worker sends back for a client."""
        self.trainer.trainer.round = rounds.server.round + 1
        kept = rounds.client_states.get(client, {})
        self.trainer.update_model(add_client_state(rounds.get_global_model_params(), kept))
        self.trainer.update_dataset(client)
        weights, num_examples = self.trainer.train(0)
        return weights, num_examples

    def finish(self, rounds: mpi_simulation.Rounds) -> None:
        """Combine what has been answered, and record it."""
        rounds.aggregate()
        assert rounds.aggregated is not None
        rounds.finish_round(rounds.aggregated)


def test_two_workers_without_a_job_do_what_the_simulator_does() -> None:
    """States come and go with the messages, so that one worker may train whichever clients, and keeps nothing."""
    job = Job(train_args__comm_round=4)
    rounds = job.rounds()
    for number in range(4):
        for index, client in enumerate(rounds.client_sampling(number, 4, 2)):
            rounds.add_local_trained_result(index, *job.answer(rounds, client))
            assert job.worker.client_states == {}
        job.finish(rounds)
    simulated = run(job.experiment)
    assert [record.clients for record in job.ran.records] == [record.clients for record in simulated.records]
    for ours, theirs in zip(job.ran.snapshots, simulated.snapshots, strict=True):
        assert ours.client_states.keys() == theirs.client_states.keys()
        for mine, other in (
            (ours.global_state, theirs.global_state),
            *((ours.client_states[client], theirs.client_states[client]) for client in ours.client_states),
        ):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("kept", [{}, {"scaffold/c/classifier.bias": torch.ones(10)}])
def test_a_client_without_an_update_keeps_what_it_kept(kept: dict[str, torch.Tensor]) -> None:
    """As in one process, down to a client that kept nothing yet and does not come to keep an empty state."""
    job = Job()
    rounds = job.rounds()
    first, second = rounds.client_sampling(0, 4, 2)
    before = {first: kept} if kept else {}
    rounds.client_states.update(before)
    refusal = add_client_state(pack_refusal("it diverged"), kept)
    rounds.add_local_trained_result(0, refusal, 20)
    rounds.add_local_trained_result(1, *job.answer(rounds, second))
    job.finish(rounds)
    assert job.ran.records[0].refused == {first: f"client {first}: it diverged"}
    assert rounds.client_states.keys() == {*before, second}
    assert rounds.client_states.get(first, {}).keys() == kept.keys()


def test_a_client_whose_update_the_server_refuses_keeps_what_it_kept() -> None:
    """As between silos, whose clients hear which of their updates was used last."""
    job = Job()
    rounds = job.rounds()
    first, second = rounds.client_sampling(0, 4, 2)
    message, num_examples = job.answer(rounds, first)
    del message["classifier.bias"]
    rounds.add_local_trained_result(0, message, num_examples)
    rounds.add_local_trained_result(1, *job.answer(rounds, second))
    job.finish(rounds)
    assert job.ran.records[0].refused == {first: f"client {first}: tensor 'classifier.bias' is missing"}
    assert rounds.client_states.keys() == {second}
