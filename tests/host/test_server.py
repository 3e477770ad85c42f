"""What the server makes of a round: the record, the log, whom it informs, what it measures and what it hands on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.entries import AggregatorEntry, EvaluatorEntry, ModelEntry
from calfat_plugin.errors import ModelError, UpdateError
from calfat_plugin.federation import server as server_module
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.wire import Wire, pack_refusal, pack_update
from calfat_plugin.federation.worker import Worker, shards_of
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator, EvaluationTask, Evaluator
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import EvaluationResult, LocalUpdate
from calfat_plugin.threat import ThreatModel
from tests.host.federation import experiment, run
from tests.methods.helpers import CPU, Federation, small_digits
from tests.plugins import offering
from tests.report.made import evaluation
from tests.snapshot import TextSnapshot


class Overflowing(Aggregator):
    """Keeps the global model; what it hands on overflows where more than ``enough`` clients took part."""

    enough, name = 1, "broadcast"

    def __init__(self, options: Any) -> None:
        pass

    def combine(self, task: AggregationTask) -> Aggregate:
        value = math.inf if len(task.updates) > self.enough else 1.0
        kept: dict[str, Any] = {self.name: {"overflowing/sum": torch.tensor([1.0, value])}}
        return Aggregate({**task.global_state}, **kept)


class Kept(Overflowing):
    """The same in the server's own memory."""

    name = "server_state"


class Attentive(Evaluator):
    """Notes the task it is given."""

    tasks: list[EvaluationTask]

    def __init__(self, options: Any) -> None:
        pass

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        self.tasks.append(task)
        return evaluation(label, 0.5)


def two_outputs(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(in_channels * image_size[0] * image_size[1], num_classes)

        def forward(self, x: Tensor) -> Any:
            logits = self.classifier(x.flatten(1))
            return logits if self.training else (logits, logits)

    return Two()


PLUGIN = offering(
    AggregatorEntry("overflowing", build=Overflowing),
    AggregatorEntry("kept", build=Kept),
    EvaluatorEntry("attentive", build=Attentive),
    ModelEntry("two_outputs", build=two_outputs),
)


class Noting(RunObserver):
    """Keeps what it is informed of."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        self.calls.append(("round", round, clients))

    def evaluation_progress(self, label: str, done: int, total: int, correct: int) -> None:
        self.calls.append((label, done, total, correct))


def moved(federation: Federation, by: float, **metrics: float) -> tuple[int, Wire]:
    """An upload of the global model with ``by`` added to every number."""
    state = {name: tensor + by for name, tensor in federation.server.state.items()}
    return 10, pack_update(LocalUpdate(state, 10, metrics=metrics))


def test_no_client_is_refused_in_the_name_of_another() -> None:
    federation = Federation(experiment())
    reasons = {1: "client 12: no", 3: "client 3, round 1: no"}
    sent = {client: (10, pack_refusal(reason)) for client, reason in reasons.items()}
    record = federation.server.finish_round(1, {0: moved(federation, 1.0), **sent})
    assert record.refused == {1: "client 1: client 12: no", 3: "client 3, round 1: no"}


def test_the_record_of_a_round_is_complete(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([100.0, 102.5])
    federation = Federation(experiment())
    server, size = federation.server, federation.worker.model_bytes
    monkeypatch.setattr(server_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    server._alignments.read([SimpleNamespace(alignments={0: 0.06})] * 3)
    assert server.start_round(1) == (0, 1, 2, 3, 4)
    two = {
        2: moved(federation, 3.0, loss=0.5),
        0: moved(federation, 1.0, alignment=0.05),
    }
    record = server.finish_round(1, {3: (10, pack_refusal("no")), **two})
    assert (record.round, server.round, record.clients) == (1, 1, (0, 2))
    assert record.refused == {3: "client 3: no"}
    (alarm,) = record.alarms
    assert alarm.startswith("overfitted-attack: the loss of client 0 turns ")
    assert record.alignments == {0: pytest.approx(0.05)}
    assert caplog.messages == ["round 1: update refused: client 3: no", f"round 1: {alarm}"]
    assert record.losses == {0: pytest.approx(math.nan, nan_ok=True), 2: 0.5}
    count = sum(parameter.numel() for parameter in federation.worker._model.parameters())
    assert record.update_norms == pytest.approx({0: math.sqrt(count), 2: 3 * math.sqrt(count)}, rel=1e-5)
    assert record.heterogeneity == pytest.approx(2 * count, rel=1e-5)
    assert (record.bytes_down, record.bytes_up) == (3 * size, 2 * size + 2 * 8 + len("no"))
    assert record.seconds == 2.5
    assert {label: result.num_examples for label, result in record.evaluations.items()} == {"natural": 20}


def test_observers_are_informed_of_rounds_and_evaluations() -> None:
    observer = Noting()
    records = run(experiment(calfat__monitor__every=2, train_args__comm_round=5), observer).records
    assert [list(record.evaluations) for record in records] == [[], ["natural"], [], ["natural"], ["natural"]]
    everybody = (0, 1, 2, 3, 4)
    right = [round(20 * record.evaluations["natural"].accuracy) for record in records if record.evaluations]
    rounds = [("round", round, everybody) for round in range(1, 6)]
    first, second, last = (("natural", 20, 20, correct) for correct in right)
    assert observer.calls == [*rounds[:2], first, *rounds[2:4], second, rounds[4], last, last]


# --- an outcome of no use ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", ["overflowing", "kept"])
@pytest.mark.parametrize(
    ("by", "extra", "furthest"),
    [(0.0, 2.0, 1), (0.0, 0.5, 0), (0.8, 0.8, 1), (0.6, 0.6, 0), (-0.8, 0.8, 1)],
    ids=["an extra", "the model", "both together", "less together", "either way"],
)
def test_the_update_that_moves_furthest_is_refused(
    aggregator: str, by: float, extra: float, furthest: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 0 moves every number by 1; client 1 by ``by``, with an extra ``extra`` times that long."""
    federation = Federation(experiment(PLUGIN, calfat__aggregator=aggregator))
    server = federation.server
    length = math.sqrt(sum(tensor.numel() for tensor in server.state.values()))
    _, wire = moved(federation, by)
    wire["overflowing/a"] = torch.tensor([0.6 * extra * length, 0.8 * extra * length])
    uploads = {2: (10, pack_refusal("no")), 1: (10, wire), 0: moved(federation, 1.0)}
    record = server.finish_round(1, uploads)
    reason = f"client {furthest}: with its update, which moves furthest, the aggregate's 'overflowing/sum' holds "
    assert record.refused == {2: "client 2: no", furthest: f"{reason}1 nan or inf among 2 values"}
    assert list(record.refused) == sorted(record.refused)
    assert record.clients == (1 - furthest,)
    assert caplog.messages == [
        "round 1: update refused: client 2: no",
        f"round 1: update refused: {record.refused[furthest]}",
    ]
    assert list({**server.broadcast, **server.server_state}) == ["overflowing/sum"]


def test_a_round_whose_outcome_is_of_no_use_whoever_is_left_out_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.setattr(Overflowing, "enough", 0)
    federation = Federation(experiment(PLUGIN, calfat__aggregator="overflowing"))
    before = federation.server.state
    with snapshot.raises(UpdateError, "round 1: not one client delivered a usable update.", "client 0", "client 1"):
        federation.server.finish_round(1, {0: moved(federation, 1.0), 1: moved(federation, 2.0)})
    assert (federation.server.state, federation.server.round) == (before, 0)


def test_a_model_that_returns_no_tensor_is_refused_before_the_first_round(snapshot: TextSnapshot) -> None:
    with snapshot.raises(ModelError):
        Federation(experiment(PLUGIN, model_args__model="two_outputs"))


# --- what is measured, and what is kept -------------------------------------------------------------------------------


def test_evaluators_are_given_what_the_recipe_says(tmp_path: Path) -> None:
    Attentive.tasks = []
    federation = Federation(
        experiment(
            PLUGIN,
            calfat__evaluators=["attentive"],
            calfat__monitor={"evaluators": ["attentive"], "max_examples": 7},
            calfat__evaluation__batch_size=3,
            common_args__random_seed=5,
        )
    )
    server = federation.server
    server.finish_round(1, {0: moved(federation, 1.0)})
    server.finish_round(2, {0: moved(federation, 1.0)})
    (result,) = server.final_evaluation(tmp_path)
    server.final_evaluation()
    assert result.label == "attentive"
    assert [(len(task.data), task.round, task.scratch) for task in Attentive.tasks] == [
        *((7, 1, None), (7, 2, None)),
        *((20, 0, tmp_path), (20, 0, None)),
    ]
    threat = ThreatModel(eps="0.1", step_size="0.1", steps=1)
    for task in Attentive.tasks:
        assert (task.num_classes, task.batch_size, task.device, task.seed) == (10, 3, CPU, 5)
        budget = {field.name: getattr(task.threat, field.name) for field in dataclasses.fields(ThreatModel)}
        assert ThreatModel(**budget) == threat


def test_rounds_are_monitored_on_the_validation_split_and_the_test_split_is_for_the_end() -> None:
    Attentive.tasks = []
    picked = experiment(
        PLUGIN,
        calfat__evaluators=["attentive"],
        calfat__monitor={"evaluators": ["attentive"]},
        data_args__validation_share=0.3,
    )
    whole = picked.load_dataset()
    assert whole.validation is not None
    run(picked)
    *monitored, final = (task for task in Attentive.tasks if len(task.data) > 2)  # without those of the trial
    assert len(monitored) == 2
    assert all(torch.equal(task.data.x, whole.validation.x) for task in monitored)
    assert torch.equal(final.data.x, whole.test.x[:20])


def test_a_snapshot_of_another_model_is_refused() -> None:
    server = Federation(experiment()).server
    server.round = 4
    snapshot = server.snapshot()
    assert (snapshot.round, snapshot.client_states) == (4, {})
    kept = {3: {"kept": torch.ones(1)}}
    assert server.snapshot(kept).client_states == kept
    other = {**snapshot.global_state, "classifier.bias": torch.zeros(3)}
    good = snapshot.global_state
    for wrong in (Snapshot(2, other), Snapshot(2, good, trained=other), Snapshot(2, good, client_models={1: other})):
        with pytest.raises(UpdateError) as error:
            server.begin(wrong)
        assert str(error.value) == "checkpoint: tensor 'classifier.bias' has shape (3,), expected (10,)"
        assert server.round == 4


def test_parties_compute_on_their_device_and_the_global_model_stays_on_the_cpu() -> None:
    """On ``meta``, the device without memory, as nothing is computed yet."""
    meta, run = torch.device("meta"), experiment()
    dataset = small_digits()
    shards = shards_of(run, dataset, meta)
    server = Server(run, dataset, meta, RunObserver())
    worker = Worker(run, dataset, shards, meta, RunObserver())
    assert [worker.num_examples(client) for client in range(5)] == [18] * 5
    there = [*(part for shard in shards.values() for part in (shard.x, shard.y)), server._measurements._test.x]
    there += [server._measurements.subset.y, *server._model.parameters(), *worker._model.parameters()]
    assert {tensor.device for tensor in there} == {meta}
    assert {tensor.device for tensor in server.state.values()} == {CPU}
    assert not server._model.training
