"""FedML's own simulator drives our parties, and its wrong results do not reach our users (docs/host.md)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from calfat_plugin.entries import DatasetEntry, TrainerEntry
from calfat_plugin.errors import HostError, RecipeError
from calfat_plugin.federation import measurements
from calfat_plugin.federation.server import Server, sample_clients
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host import launch, simulation  # before all else of fedml

# isort: split
from fedml.simulation.sp.fedavg.client import Client

from calfat_plugin.host.launch import host_arguments
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.interfaces import LocalTask, LocalTrainer
from calfat_plugin.results import LocalUpdate
from tests.host.federation import experiment, run
from tests.methods.helpers import same_bits
from tests.plugins import offering
from tests.snapshot import TextSnapshot


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: list[tuple[str, Any]]) -> None:
    """Note (name, arguments) of every call of a method, and call it."""
    original = getattr(owner, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append((name, arguments[1:]))
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("per_round", [5, 2])
def test_the_hosts_own_round_loop_drives_our_parties(monkeypatch: pytest.MonkeyPatch, per_round: int) -> None:
    calls: list[tuple[str, Any]] = []
    for owner, name in (
        (launch.fedml.FedMLRunner, "run"),
        (simulation.FedAvgAPI, "train"),
        (Server, "start_round"),
        (Client, "train"),
        (Worker, "fit"),
        (Server, "aggregate_round"),
    ):
        count_calls(monkeypatch, owner, name, calls)
    ran = run(experiment(train_args__comm_round=3, train_args__client_num_per_round=per_round))

    names = [name for name, _ in calls]
    # The host's runner calls the API's run, which calls the host's train: two methods are called "train".
    assert names == ["run", "train", *(["start_round", *["train", "fit"] * per_round, "aggregate_round"] * 3)]
    assert all(isinstance(arguments[2], OrderedDict) for name, arguments in calls if name == "fit")  # no map per client
    fits = [arguments[:2] for name, arguments in calls if name == "fit"]
    assert fits == [(client, record.round) for record in ran.records for client in record.clients]
    assert [record.round for record in ran.records] == [1, 2, 3]
    assert {len(record.clients) for record in ran.records} == {per_round}


class Drifter(LocalTrainer):
    """Notes the weights that each client starts from, then moves far away from them."""

    starts: list[tuple[int, int, torch.Tensor]]

    def __init__(self, options: Any, modifier: Any) -> None:
        pass

    def fit(self, task: LocalTask) -> LocalUpdate:
        weights = torch.cat([parameter.detach().flatten() for parameter in task.model.parameters()])
        self.starts.append((task.round, task.client, weights.clone()))
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter.add_(task.client + 1)
        return LocalUpdate(dict(task.model.state_dict()), len(task.data))  # not copied, on purpose


DRIFTER = offering(TrainerEntry("drifter", build=Drifter), name="drifter")


def test_every_client_starts_from_the_global_weights() -> None:
    """Defect 5: in its first round the host hands client k the weights that client k-1 ended with."""
    Drifter.starts = []
    drift = experiment(DRIFTER, calfat__trainer="drifter")
    ran = run(drift)
    dataset = drift.load_dataset()
    initial = drift.build_model(dataset, drift.build_trainer())
    first = torch.cat([parameter.detach().flatten() for parameter in initial.parameters()])
    second = torch.cat([tensor.flatten() for tensor in ran.snapshots[0].global_state.values()])

    assert [(round, client) for round, client, _ in Drifter.starts] == [(r, c) for r in (1, 2) for c in range(5)]
    for round, _, weights in Drifter.starts:
        assert torch.equal(weights, first if round == 1 else second)
    # The clients moved by 1 to 5, with equally many examples each: the mean moved by 3.
    assert torch.allclose(second, first + 3, atol=1e-5)


def test_a_client_whose_update_the_server_refuses_keeps_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between silos, whose clients hear which of their updates was used last."""
    fit = Worker.fit

    def spoilt(worker: Worker, client: int, round: int, downlink: Any) -> Any:
        wire = fit(worker, client, round, downlink)
        if (client, round) == (1, 2):
            del wire["classifier.bias"]
        return wire

    monkeypatch.setattr(Worker, "fit", spoilt)
    ran = run(experiment(calfat__aggregator="scaffold"))
    assert [record.refused for record in ran.records] == [{}, {1: "client 1: tensor 'classifier.bias' is missing"}]
    first, second = (snapshot.client_states for snapshot in ran.snapshots)
    assert [client for client in first if same_bits(first[client], second[client])] == [1]


def test_clients_are_drawn_by_the_runs_seed_and_round() -> None:
    """Defect 7: the host draws by the round alone, whatever the seed, and alike in its rounds 0 and 1."""

    def drawn(seed: int) -> list[tuple[int, ...]]:
        settings = {"client_num_in_total": 10, "client_num_per_round": 3, "comm_round": 4}
        train = {f"train_args__{key}": value for key, value in settings.items()}
        return [record.clients for record in run(experiment(common_args__random_seed=seed, **train)).records]

    one, other = drawn(0), drawn(1)
    assert one == drawn(0)
    assert one != other
    assert one[0] != one[1]
    for clients in (*one, *other):
        assert len(set(clients)) == 3
        assert list(clients) == sorted(clients)
        assert set(clients) <= set(range(10))
    hosts_own = [sorted(np.random.RandomState(round).choice(range(10), 3, replace=False)) for round in range(4)]
    assert [list(clients) for clients in one] != hosts_own


def test_drawing_clients_is_fair_and_leaves_numpys_generator_alone() -> None:
    before = np.random.get_state()
    drawn = [sample_clients(7, round, 10, 3) for round in range(1, 2001)]
    after = np.random.get_state()
    assert before[0] == after[0]
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]
    counts = np.bincount(np.concatenate(drawn), minlength=10)
    assert np.all(np.abs(counts - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5)  # five standard deviations
    assert sample_clients(7, 1, 10, 10) == sample_clients(8, 5, 10, 12) == tuple(range(10))


def test_the_global_model_is_evaluated_once_a_round_on_all_test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 8: the host tests every client on the full test set, and drops its last batch."""
    calls: list[tuple[str, Any]] = []
    count_calls(monkeypatch, measurements, "measure", calls)
    ran = run(experiment(calfat__evaluation={"batch_size": 7}))
    assert len(calls) == 5  # the two lists of evaluators, tried on two images; two rounds and the end
    assert [evaluation.num_examples for evaluation in ran.evaluations] == [20]
    assert ran.records[1].evaluations["natural"].accuracy == ran.evaluations[0].accuracy


def test_a_data_set_whose_name_the_host_treats_apart() -> None:
    """The host evaluates data sets called ``stackoverflow...`` in another place, on a data loader we do not have."""

    entry = DatasetEntry("stackoverflow-tags", build="calfat_plugin.datasets.published:load_digits")
    ran = run(experiment(offering(entry), data_args__dataset="stackoverflow-tags"))
    assert [record.round for record in ran.records] == [1, 2]


@pytest.mark.parametrize("aggregator", ["fedavg", "scaffold"])  # without and with states of clients
def test_resuming_from_a_snapshot_gives_the_same_rounds(aggregator: str) -> None:
    """Defect 15: the host has no way back into a run."""
    four = experiment(train_args__comm_round=4, train_args__client_num_per_round=3, calfat__aggregator=aggregator)
    whole = run(four)
    rest = run(four, resume_from=whole.snapshots[1])
    assert [record.round for record in rest.records] == [3, 4]
    assert [record.clients for record in rest.records] == [record.clients for record in whole.records[2:]]
    for name, tensor in whole.snapshots[-1].global_state.items():
        assert torch.equal(rest.snapshots[-1].global_state[name], tensor)


def test_the_hosts_flat_arguments_have_what_it_acts_on_and_nothing_of_ours() -> None:
    """Defect 9: all sections become attributes of one object, where an attack's epsilon would be read as privacy's."""
    off = {"enable_wandb": False, "wandb_project": "fat"}
    own = {"calfat__threat": {"eps": "8/255"}, "train_args__server_lr": 0.5, "dp_args": {"enable_dp": False}}
    args = vars(host_arguments(experiment(tracking_args=off, **own)))
    assert not {"calfat", "trainer", "threat", "eps", "epsilon", "aggregator", "evaluators", "monitor"} & set(args)
    assert not {"server_lr", "enable_dp", "wandb_project"} & set(args)
    assert args["learning_rate"] == 0.05
    assert args["client_num_per_round"] == args["worker_num"] == 5
    assert args["using_mlops"] is args["enable_wandb"] is False


def test_another_host_version_and_a_backend_that_carries_no_simulation_are_refused(snapshot: TextSnapshot) -> None:
    launch.check_version("0.9.6")
    with snapshot.raises(HostError):
        launch.check_version("0.9.7")
    for backend in ("GRPC", "MQTT_S3"):
        with snapshot.raises(RecipeError, backend):
            supported_runtime(experiment(comm_args__backend=backend))


def test_the_hosts_events_are_not_logged_and_their_function_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    event = launch.fedml.mlops.event
    run(experiment(train_args__comm_round=1))
    assert any("Communication round" in message for message in caplog.messages)  # other messages of the host are
    assert not [message for message in caplog.messages if "event_name" in message]
    assert launch.fedml.mlops.event is event


def test_the_host_is_kept_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    fetch = launch.fedml.core.mlops.fetch_config

    def init(args: SimpleNamespace, check_env: bool, should_init_logs: bool) -> SimpleNamespace:
        assert not check_env
        assert not should_init_logs  # it would replace sys.stdout.write
        seen.append(launch.fedml.core.mlops.fetch_config is not fetch)
        return args

    monkeypatch.setattr(launch.fedml, "init", init)
    monkeypatch.setattr(launch.fedml.FedMLRunner, "run", lambda runner: None)
    run(experiment())
    assert seen == [True]
    assert launch.fedml.core.mlops.fetch_config is fetch
