"""Attackers that FedML has, too, send what its own would."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import PluginError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.updates import Attackers, build_attacker
from calfat_plugin.interfaces import State
from calfat_plugin.results import LocalUpdate
from tests.cli.runner import calfat
from tests.recipes import assembled
from tests.runs.remains import read_rows


def attacked_by(attacker: dict[str, Any]) -> Experiment:
    recipe = {
        "model_args": {"model": "cnn_small"},
        "train_args": {"client_num_in_total": 10, "comm_round": 1},
        "calfat": {"trainer": "fedpgd", "clients": [{"ids": 1, "attacker": attacker}]},
    }
    return assembled(yaml.safe_dump(recipe))


def states() -> tuple[State, dict[int, LocalUpdate]]:
    """A global model with a buffer, and what three clients trained."""
    stream = torch.Generator().manual_seed(0)
    made = [
        {"w": torch.randn(4, 3, generator=stream), "bn.running_mean": torch.randn(3, generator=stream)}
        for _ in range(4)
    ]
    return made[0], {client: LocalUpdate(state, 10) for client, state in enumerate(made[1:])}


def sent_here(attacker: dict[str, Any]) -> tuple[State, State]:
    """(what client 1 sends, what it sends in the next round)."""
    experiment = attacked_by(attacker)
    start, updates = states()
    attackers = Attackers(experiment, {1: experiment.clients[0]}, ["w"])
    first, second = (attackers.send(round, updates, start) for round in (1, 2))
    assert all(first[client] is updates[client] for client in (0, 2))
    return first[1].state, second[1].state


BYZANTINE = "byzantine_attack", "ByzantineAttack"
REPLACEMENT = "model_replacement_backdoor_attack", "ModelReplacementBackdoorAttack"


@pytest.mark.parametrize(
    ("module", "name", "keys", "attacker"),
    [
        (*BYZANTINE, {"attack_mode": "flip"}, {"name": "sign_flip", "scale": 1}),
        (*BYZANTINE, {"attack_mode": "zero"}, {"name": "untrained", "values": "zero"}),
        (*REPLACEMENT, {}, {"name": "scaling", "factor": 3}),
        (*REPLACEMENT, {"scale_factor_S": 2.0}, {"name": "scaling", "norm": 2.0}),
    ],
    ids=["flip", "zero", "replacement", "replacement of a length"],
)
def test_it_is_the_hosts_arithmetic(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, keys: dict[str, Any], attacker: dict[str, Any]
) -> None:
    from calfat_plugin.host.launch import run_host  # noqa: F401 (before all else of fedml, whose import it prepares)

    fedml = importlib.import_module("fedml")
    made = importlib.import_module(f"fedml.core.security.attack.{module}")
    monkeypatch.setattr(fedml.device, "get_device", lambda args: torch.device("cpu"))
    monkeypatch.setattr(made, "sample_some_clients", lambda *_: [1], raising=False)
    start, updates = states()
    given = [(10, {key: tensor.clone() for key, tensor in update.state.items()}) for update in updates.values()]
    args = SimpleNamespace(malicious_client_id=1, byzantine_client_num=2, **keys)
    theirs = getattr(made, name)(args).attack_model(given, start)[1][1]
    ours, _ = sent_here(attacker)
    torch.testing.assert_close(ours["w"], theirs["w"], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours["bn.running_mean"], theirs["bn.running_mean"])


def test_a_model_that_nobody_trained_is_drawn_from_the_hosts_range() -> None:
    first, second = (each["w"] for each in sent_here({"name": "untrained", "values": "uniform"}))
    assert not torch.equal(first, second)
    assert -1 <= float(first.min()) < 0 < float(first.max()) <= 1


def test_attackers_that_do_not_train_in_a_round_hide_nobody() -> None:
    """Of seven clients two may send more than one of six: but one of the two is not there."""
    experiment, (start, updates), sent = attacked_by({"name": "alie"}), states(), []
    updates = {client: updates[client % 3] for client in range(6)}
    for ids in ((1,), (1, 9)):
        attackers = Attackers(experiment, dict.fromkeys(ids, experiment.clients[0]), ["w"])
        sent.append(attackers.send(1, updates, start)[1].state["w"])
    assert torch.equal(*sent)


def test_gradients_that_no_layer_could_mask_are_not_left_alone_in_silence() -> None:
    experiment = attacked_by({"name": "masked_gradients"})
    start, updates = states()
    with pytest.raises(PluginError) as refused:
        Attackers(experiment, {1: experiment.clients[0]}, ["bn.running_mean"]).send(1, updates, start)
    assert str(refused.value).endswith(
        ": the model has no linear layer to multiply; choose another attacker, such as scaling."
    )


def test_chosen_labels_become_others() -> None:
    experiment = attacked_by({"name": "label_flip", "source": [3, 5], "target": [5, 3]})
    attacker = build_attacker(experiment, experiment.clients[0])
    data = ImageData(torch.zeros(4, 1, 2, 2), torch.tensor([3, 5, 0, 3]))
    assert attacker.poisoned(data, 10).y.tolist() == [5, 3, 0, 5]
    assert data.y.tolist() == [3, 5, 0, 3]
    with pytest.raises(PluginError) as refused:
        attacker.poisoned(data, 4)
    assert str(refused.value).endswith("there is no label 5; the 4 classes begin at 0.")


def test_whom_a_run_serves_worst_and_its_rare_classes_are_of_those_who_do_not_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "data_args: {partition_method: longtail, partition_alpha: 0.5}\n"
        "model_args: {model: cnn_small}\n"
        "train_args: {client_num_in_total: 5, comm_round: 1, batch_size: 512}\n"
        "calfat:\n"
        "  trainer: standard\n"
        "  clients: [{share: 0.8, attacker: {name: untrained, values: zero}}]\n"
        "  evaluators: [natural]\n"
        "  monitor: {evaluators: [natural]}\n"
    )
    done = calfat("run", "r.yaml", "--run-dir", "run")
    assert done.code == 0, done.err
    partition = json.loads(Path("run/partition.json").read_text())
    (honest,) = set(range(5)) - set(partition["attackers"])
    (values,) = read_rows(Path("run/rounds.csv"))
    assert values["group/others/update_norm"] == values[f"update_norm_{honest}"]
    (evaluation,) = json.loads(Path("run/results.json").read_text())["evaluations"]
    assert evaluation["worst_clients"]["ids"] == [honest]
    counts = partition["class_counts"][honest]
    order = sorted(range(10), key=lambda label: (-counts[label], label))
    assert order != [*range(10)]  # as it is for all clients together
    assert [evaluation[part]["ids"] for part in ("head", "middle", "tail")] == [order[:4], order[4:7], order[7:]]
    assert "Head, middle and tail" in done.out
    assert "Head, middle and tail" in Path("run/report.html").read_text()
