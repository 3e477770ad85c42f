"""The same bits as without a host: what the adapter sends and keeps, over a grid without an engine."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from calfat_plugin.errors import HostError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.measurements import Measurements
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.federation.wire import pack_refusal
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.flower import server as flower_server
from calfat_plugin.host.flower.messages import STATE, any_client_app, packed, tensors_of
from calfat_plugin.host.flower.server import RemoteTrainingError, resources, run_rounds, simulate
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.recipe.document import Document
from calfat_plugin.results import EvaluationResult, RoundRecord, State
from calfat_plugin.runs.request import checked_experiment
from tests.flower.federation import METHODS, MemoryGrid, digest, parties, trained_in_loops, written
from tests.snapshot import TextSnapshot


def start(document: Document) -> Worker:
    """What a node calls; it is pickled by its name."""
    return parties(checked_experiment(document))[1]


class Run:
    """A run over nodes in this process, with what it recorded."""

    def __init__(self, experiment: Experiment, **of_grid: object) -> None:
        self.server, worker = parties(experiment)
        self.records: list[RoundRecord] = []
        self.states: dict[int, State] = {}
        self._task = ServerTask(
            self.server, self._note, worker.shards, self.states, start_elsewhere=partial(start, experiment.document)
        )
        app = any_client_app(self._task.start_elsewhere)
        nodes = {100 + node: {} for node in range(experiment.num_clients)}
        self.grid = MemoryGrid(app, nodes, **of_grid)  # type: ignore[arg-type]

    def _note(self, record: RoundRecord, snapshot: Snapshot) -> None:
        self.records.append(record)

    def simulate(self) -> None:
        simulate(self._task, self.grid)

    def serve(self) -> None:
        """As between parties, whose messages are not believed."""
        nodes = dict(enumerate(self.grid.get_node_ids()))
        run_rounds(self._task, self.grid, nodes, lambda: None, states_travel=False)


@pytest.mark.parametrize("method", METHODS)
def test_the_bits_are_those_of_plain_loops(method: str, tmp_path: Path) -> None:
    _, experiment = written(tmp_path, METHODS[method])
    model, states = trained_in_loops(experiment)
    run = Run(experiment, comes_later=3)
    run.simulate()
    assert digest(run.server.state) == digest(model)
    assert [record.round for record in run.records] == list(range(1, experiment.num_rounds + 1))
    assert not any(record.refused for record in run.records)
    assert {client: digest(state) for client, state in run.states.items()} == {
        client: digest(state) for client, state in states.items()
    }


def test_who_has_started_too_few_nodes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower would have no more of them, however long the run waited."""
    monkeypatch.setattr(flower_server, "_REMIND", -1.0)
    _, experiment = written(tmp_path)
    run, said = Run(experiment, comes_later=2), list[str]()
    simulate(replace(run._task, warn=said.append), run.grid)
    assert run.server.is_over
    assert said == 2 * [
        "still waiting for nodes of Flower's simulation: 4 of 5 are there. With flwr run, add --federation-config "
        "'num-supernodes=5'."
    ]


# --- what a node may answer -------------------------------------------------------------------------------------------

GOOD = Array(dtype="uint8", shape=(1,), stype="safetensors", data=b"\x02\x00\x00\x00\x00\x00\x00\x00{}")


def reply_with(reply: Message, arrays: dict[str, Array], **fields: object) -> Message:
    """The same with another content; an array or field that is not named stays."""
    before = reply.content
    reply.content = RecordDict(
        {
            "tensors": ArrayRecord({**before.array_records["tensors"], **arrays}),
            "fields": ConfigRecord({**before.config_records["fields"], **fields}),  # type: ignore[arg-type]
        }
    )
    return reply


def nothing_at_all(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


UNREADABLE = {
    "no record": nothing_at_all,
    "pickled": lambda reply: reply_with(reply, {"model": replace(GOOD, stype="pickle", data=pickle.dumps({}))}),
    "no safetensors": lambda reply: reply_with(reply, {"model": replace(GOOD, data=b"\xff" * 100)}),
    "too long": lambda reply: reply_with(reply, {"model": replace(GOOD, data=bytes(20_000_000))}),
    "examples": lambda reply: reply_with(reply, {}, num_examples=-7),
    "examples in words": lambda reply: reply_with(reply, {}, num_examples="many"),
    "another model": lambda reply: reply_with(reply, {"model": GOOD}),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_a_refused_update(what: str, tmp_path: Path, snapshot: TextSnapshot) -> None:
    _, experiment = written(tmp_path, ["train_args.client_num_per_round=5", "train_args.comm_round=1"])
    first = iter([True])
    run = Run(experiment, spoils=lambda reply: UNREADABLE[what](reply) if next(first, False) else reply)
    run.serve()
    [record] = run.records
    assert record.clients == (1, 2, 3, 4)
    assert list(record.refused) == [0]
    snapshot(record.refused[0])


@pytest.mark.parametrize(
    ("unused", "reason"),
    [
        ({"model": packed(pack_refusal("no more")), "state": packed({})}, "client 0: no more"),
        ({"model": GOOD}, "client 0: tensor 'body.0.bias' is missing, and 7 more"),
    ],
    ids=["its own refusal", "the server's"],
)
def test_a_client_whose_update_is_not_used_keeps_what_it_kept(
    unused: dict[str, Array], reason: str, tmp_path: Path
) -> None:
    _, experiment = written(tmp_path, (*METHODS["SCAFFOLD + FedPGD"], "train_args.client_num_per_round=5"))
    sent: list[State] = []

    def refuses_later(reply: Message) -> Message:
        if reply.metadata.src_node_id != 100:
            return reply
        sent.append(tensors_of(reply, STATE))
        return reply if len(sent) == 1 else reply_with(reply, unused)

    run = Run(experiment, spoils=refuses_later)
    run.simulate()
    assert [record.refused for record in run.records] == [{}, *[{0: reason}] * 3]
    assert digest(run.states[0]) == digest(sent[0])


def unanswered(reply: Message) -> Message:
    error = Message(Error(3, "Node unavailable"), reply_to=reply)
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return error


def test_a_node_without_an_answer_ends_the_run(tmp_path: Path, snapshot: TextSnapshot) -> None:
    _, experiment = written(tmp_path)
    run = Run(experiment, spoils=unanswered)
    with pytest.raises(HostError) as refused:
        run.simulate()
    snapshot(str(refused.value))
    assert run.records == []
    assert run.states == {}


def test_an_error_for_the_user_arrives_as_one(tmp_path: Path, snapshot: TextSnapshot) -> None:
    _, experiment = written(tmp_path)
    run = Run(experiment)
    run.grid._app = any_client_app(partial(_cannot, "the data are gone: look for them"))
    with pytest.raises(HostError) as refused:
        run.simulate()
    snapshot(str(refused.value))


def _cannot(text: str) -> Worker:
    raise HostError(text)


def test_a_bug_where_a_client_trains_keeps_its_traceback(tmp_path: Path) -> None:
    _, experiment = written(tmp_path)
    run = Run(experiment)
    run.grid._app = any_client_app(_bug)
    with pytest.raises(
        RemoteTrainingError, match=r"round 1: client \d: ZeroDivisionError\(\)\nTraceback[\s\S]*ZeroDivisionError"
    ):
        run.simulate()


def _bug() -> Worker:
    raise ZeroDivisionError


# --- what Ray is asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cpus", "gpus", "in_all"),
    [
        ([], 1, 0.0, 2),
        (["calfat.runtime.threads=null"], 2, 0.0, 2),
        (["calfat.flower.client_cpus=0.5"], 0.5, 0.0, 2),
        (["train_args.client_num_per_round=1"], 1, 0.0, 1),
        (["device_args.using_gpu=true"], 1, 1.0, 2),
        (["device_args.using_gpu=true", "calfat.flower.client_gpus=0.25"], 1, 0.25, 2),
    ],
)
def test_clients_get_the_cores_and_gpus_of_the_recipe(
    changes: list[str], cpus: float, gpus: float, in_all: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calfat_plugin.host.flower.server.num_cores", lambda: 2)
    _, experiment = written(tmp_path, changes)
    asked = resources(experiment)
    assert asked == {
        "client_resources": {"num_cpus": cpus, "num_gpus": gpus},
        "init_args": {"log_to_driver": False, "num_cpus": in_all},
    }
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "num_cpus" not in resources(experiment)["init_args"]


def test_a_client_that_is_too_large_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.setattr("calfat_plugin.host.flower.server.num_cores", lambda: 2)
    _, experiment = written(tmp_path, ["calfat.flower.client_cpus=3"])
    with pytest.raises(Exception, match="3 cores") as refused:
        resources(experiment)
    snapshot(str(refused.value).replace(str(tmp_path), "DIR"))


@pytest.mark.parametrize("runtime", ["simulate", "serve"])
def test_a_run_that_stops_early_asks_nobody_to_train_any_more(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = {1: 0.4, 2: 0.6, 3: 0.6, 4: 0.5}

    def scripted(self: Measurements, state: State, round: int, clients: object) -> dict[str, EvaluationResult]:
        accuracy = course[round]
        return {"natural": EvaluationResult("natural", 10, accuracy, accuracy, (), (), {}, "a test", 0.0)}

    monkeypatch.setattr(Measurements, "of_round", scripted)
    sets = ("data_args.validation_share=0.1", "train_args.comm_round=8", "train_args.patience=2")
    run = Run(written(tmp_path, sets)[1])
    push, pushed = run.grid.push_messages, list[int]()

    def counted(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        pushed.append(len(messages))
        return push(messages)

    monkeypatch.setattr(run.grid, "push_messages", counted)
    getattr(run, runtime)()
    assert [record.round for record in run.records] == [1, 2, 3, 4]
    assert [record.stop and record.stop.best_round for record in run.records] == [None, None, None, 2]
    assert pushed == [3, 3, 3, 3]  # three clients a round
    assert run.server.is_over
