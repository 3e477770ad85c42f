"""FedML's ``attack_args`` are a group of attackers, the run says which, and its own recipe says it in our words."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import PluginError, RecipeError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.federation.attack import Attackers, build_attacker
from calfat_plugin.interfaces import State
from calfat_plugin.recipe.attacks import ATTACKS
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.results import LocalUpdate
from calfat_plugin.rounds_csv import read_rounds
from calfat_plugin.testing import builtin_registry
from tests.recipe.test_host_keys import host_folder
from tests.snapshot import TextSnapshot

ZERO, FLIP = ({"attack_type": "byzantine", "attack_mode": mode, "byzantine_client_num": 2} for mode in ("zero", "flip"))
LABELS = {"original_class_list": [3, 5], "target_class_list": [5, 3], "ratio_of_poisoned_client": 0.4}
ASKED = [
    (ZERO, {"share": 0.2}, {"name": "untrained", "values": "zero"}),
    ({**ZERO, "attack_mode": "random"}, {"share": 0.2}, {"name": "untrained", "values": "uniform"}),
    (FLIP, {"share": 0.2}, {"name": "sign_flip", "scale": 1.0}),
    (
        {"attack_type": "label_flipping", "attack_prob": 1, **LABELS},
        {"share": 0.4},
        {"name": "label_flip", "source": [3, 5], "target": [5, 3]},
    ),
    ({"attack_type": "model_replacement"}, {"share": 0.1}, {"name": "scaling", "factor": 10.0, "norm": None}),
    (
        {"attack_type": "model_replacement", "malicious_client_id": 3, "scale_factor_S": 2.0},
        {"ids": [3]},
        {"name": "scaling", "factor": 100.0, "norm": 2.0},
    ),
]


def resolved(keys: dict[str, Any], train: dict[str, Any] | None = None, **calfat: Any) -> Experiment:
    recipe = {
        "model_args": {"model": "cnn_small"},
        "train_args": {"client_num_in_total": 10, "comm_round": 1, **(train or {})},
        "attack_args": {"enable_attack": True, **keys},
        "calfat": {"trainer": "fedpgd", **calfat},
    }
    return assemble(parse_document(yaml.safe_dump(recipe, sort_keys=False), "r.yaml"), builtin_registry())


@pytest.mark.parametrize(("keys", "who", "attacker"), ASKED, ids=lambda value: value.get("attack_type", ""))
def test_an_attack_is_a_group(keys: dict[str, Any], who: dict[str, Any], attacker: dict[str, Any]) -> None:
    experiment = resolved(keys)
    written = experiment.as_run()
    assert written["calfat"]["clients"] == [{**who, "name": "group1", "attacker": attacker}]
    assert "attack_args" not in written
    (warning,) = experiment.warnings
    assert warning.startswith(f"r.yaml:6: attack_args: FedML's '{keys['attack_type']}' is a group of calfat.clients")
    again = assemble(parse_document(yaml.safe_dump(written), "recipe.yaml"), builtin_registry())
    assert again.as_run() == written
    assert again.warnings == ()


def test_each_attack_is_tried_above() -> None:
    assert {row[0]["attack_type"] for row in ASKED} == set(ATTACKS)


def test_they_are_the_hosts_names() -> None:
    source = (host_folder() / "core" / "security" / "constants.py").read_text(encoding="utf-8")
    names = {
        node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if str(getattr(node.targets[0], "id", "")).startswith(("ATTACK_", "BACKDOOR_"))
    }
    assert names - set(ATTACKS) == {"dlg"}  # which looks at updates, and changes none
    assert set(ATTACKS) <= names


def test_the_sentences_are_whole(snapshot: TextSnapshot) -> None:
    (drawn,), (named,) = (resolved(keys).warnings for keys in (FLIP, ASKED[-1][0]))
    snapshot(drawn)
    snapshot(named)


def test_as_many_attack_in_a_round_as_was_asked_for() -> None:
    """FedML counts attackers among a round's clients, a group among all."""
    experiment = resolved(FLIP, {"client_num_per_round": 5})
    assert experiment.clients[0].options.share == 0.4
    assert len(experiment.client_groups(torch.zeros(10, dtype=torch.int64).numpy())) == 4
    (scaled,) = resolved({"attack_type": "model_replacement"}, {"client_num_per_round": 5}).clients
    assert scaled.attacker is not None
    assert scaled.attacker.options.factor == 5
    assert scaled.options.share == 0.2


def test_honest_groups_stay_and_keep_their_places() -> None:
    honest = [{"ids": [0, 1], "epochs": 3}]
    experiment = resolved(FLIP, clients=honest)
    names = [group.name for group in experiment.client_groups(torch.zeros(10, dtype=torch.int64).numpy()).values()]
    assert sorted(names) == ["group1", "group1", "group2", "group2"]
    with pytest.raises(RecipeError, match=r"^r\.yaml:17: calfat\.clients\[0\]\.epochs: got 0 \(int\)"):
        resolved(FLIP, clients=[{"ids": [0, 1], "epochs": 0}])


WRONG = [
    (
        {"attack_type": "dlg"},
        "r.yaml:8: attack_args.attack_type: got 'dlg' (text); of FedML's attacks there are byzantine, label_flipping, "
        "model_replacement here.",
    ),
    (
        {**FLIP, "attack_mode": "sideways"},
        "r.yaml:9: attack_args.attack_mode: got 'sideways' (text), expected one of flip, random, zero for the attack "
        "'byzantine'.",
    ),
    (
        {"attack_type": "byzantine", "attack_mode": "zero"},
        "r.yaml:6: attack_args.byzantine_client_num: got nothing (null), expected a whole number, >= 1 for the attack "
        "'byzantine'.",
    ),
    (
        {**FLIP, "attack_prob": 0.5},
        "r.yaml:11: attack_args.attack_prob: got 0.5 (float), expected 1, as attackers here attack in every round, for "
        "the attack 'byzantine'.",
    ),
    (
        {"attack_type": "label_flipping", **LABELS, "poison_start_round_id": 3},
        "r.yaml:16: attack_args.poison_start_round_id: the attack 'label_flipping' has no such parameter here. It "
        "takes attack_prob, original_class_list, ratio_of_poisoned_client, target_class_list.",
    ),
    (
        {"attack_type": "label_flipping", **LABELS, "target_class_list": 3},
        "r.yaml:12: attack_args.target_class_list: got 3 (int), expected a list of labels such as [3, 5] for the "
        "attack 'label_flipping'.",
    ),
    (
        {"attack_type": "label_flipping", **LABELS, "target_class_list": [3]},
        "r.yaml:6: attack_args: calfat.clients[0].attacker: source and target: got [3, 5] and [3], expected two "
        "lists of one length, no label twice in source.",
    ),
    (
        {"attack_type": "label_flipping", **LABELS, "ratio_of_poisoned_client": 0},
        "r.yaml:15: attack_args.ratio_of_poisoned_client: got 0 (int), expected a number, 0 < value <= 1, for the "
        "attack 'label_flipping'.",
    ),
    (
        {"attack_type": "model_replacement", "malicious_client_id": 10},
        "r.yaml:6: attack_args: calfat.clients[0].ids: there is no client 10; the 10 clients of "
        "train_args.client_num_in_total are 0 to 9.",
    ),
    (
        {**FLIP, "byzantine_client_num": 10},
        "r.yaml:6: attack_args: calfat.clients: every client is an attacker; expected at least one that is not.",
    ),
]


@pytest.mark.parametrize(("keys", "text"), WRONG)
def test_wrong_attacks_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        resolved(keys)
    assert str(refused.value) == text


def test_two_answers_to_who_attacks_are_refused(snapshot: TextSnapshot) -> None:
    with snapshot.raises(RecipeError):
        resolved(FLIP, clients=[{"ids": 0, "attacker": "ipm"}])


def test_across_silos_it_is_refused_at_the_hosts_keys() -> None:
    recipe = parse_document(
        "common_args: {training_type: cross_silo}\ncomm_args: {backend: GRPC}\nmodel_args: {model: cnn_small}\n"
        "attack_args: {enable_attack: true, attack_type: byzantine, attack_mode: zero, byzantine_client_num: 1}\n"
        "calfat: {trainer: fedpgd}\n",
        "r.yaml",
    )
    with pytest.raises(RecipeError) as refused:
        assemble(recipe, builtin_registry())
    assert str(refused.value).startswith(
        "r.yaml:4: attack_args: calfat.clients[0].attacker: attackers exist in simulations only: "
    )


# --- the host's arithmetic --------------------------------------------------------------------------------------------


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
    experiment = resolved(FLIP | {"enable_attack": False}, clients=[{"ids": 1, "attacker": attacker}])
    start, updates = states()
    attackers = Attackers(experiment, {1: experiment.clients[0]}, ["w"])
    first, second = (attackers.send(round, updates, start) for round in (1, 2))
    assert all(first[client] is updates[client] for client in (0, 2))
    return first[1].state, second[1].state


@pytest.mark.parametrize(
    ("module", "name", "keys", "attacker"),
    [
        ("byzantine_attack", "ByzantineAttack", FLIP, ASKED[2][2]),
        ("byzantine_attack", "ByzantineAttack", ZERO, ASKED[0][2]),
        ("model_replacement_backdoor_attack", "ModelReplacementBackdoorAttack", {}, {"name": "scaling", "factor": 3}),
        (
            "model_replacement_backdoor_attack",
            "ModelReplacementBackdoorAttack",
            {"scale_factor_S": 2.0},
            {"name": "scaling", "norm": 2.0},
        ),
    ],
    ids=["flip", "zero", "replacement", "replacement of a length"],
)
def test_it_is_the_hosts_arithmetic(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, keys: dict[str, Any], attacker: dict[str, Any]
) -> None:
    import importlib

    from calfat_plugin.host.launch import run_host  # noqa: F401 (before all else of fedml, whose import it prepares)

    fedml = importlib.import_module("fedml")
    made = importlib.import_module(f"fedml.core.security.attack.{module}")
    monkeypatch.setattr(fedml.device, "get_device", lambda args: torch.device("cpu"))
    monkeypatch.setattr(made, "sample_some_clients", lambda *_: [1], raising=False)
    start, updates = states()
    given = [(10, {key: tensor.clone() for key, tensor in update.state.items()}) for update in updates.values()]
    theirs = getattr(made, name)(SimpleNamespace(malicious_client_id=1, **keys)).attack_model(given, start)[1][1]
    ours, _ = sent_here(attacker)
    torch.testing.assert_close(ours["w"], theirs["w"], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours["bn.running_mean"], theirs["bn.running_mean"])


def test_a_model_that_nobody_trained_is_drawn_from_the_hosts_range() -> None:
    first, second = (each["w"] for each in sent_here({"name": "untrained", "values": "uniform"}))
    assert not torch.equal(first, second)
    assert -1 <= float(first.min()) < 0 < float(first.max()) <= 1


def test_chosen_labels_become_others() -> None:
    experiment = resolved(ASKED[3][0])
    attacker = build_attacker(experiment, experiment.clients[0])
    data = ImageData(torch.zeros(4, 1, 2, 2), torch.tensor([3, 5, 0, 3]))
    assert attacker.poisoned(data, 10).y.tolist() == [5, 3, 0, 5]
    assert data.y.tolist() == [3, 5, 0, 3]
    with pytest.raises(PluginError) as refused:
        attacker.poisoned(data, 4)
    assert str(refused.value) == "there is no label 5; the 4 classes begin at 0."


def test_it_acts_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli.runner import calfat

    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "model_args: {model: cnn_small}\n"
        "train_args: {client_num_in_total: 5, comm_round: 1, batch_size: 512}\n"
        "attack_args: {enable_attack: true, attack_type: byzantine, attack_mode: zero, byzantine_client_num: 4}\n"
        "calfat: {trainer: standard, evaluators: [natural], monitor: {evaluators: [natural]}}\n"
    )
    done = calfat("run", "r.yaml", "--run-dir", "run")
    assert done.code == 0, done.err
    assert "FedML's 'byzantine' is a group of calfat.clients here: {share: 0.8, " in done.err
    attackers = json.loads(Path("run/partition.json").read_text())["attackers"]
    (honest,) = set(range(5)) - set(attackers)
    (values,) = read_rounds(Path("run/rounds.csv"))
    assert values["group/others/update_norm"] == values[f"update_norm_{honest}"]
    (evaluation,) = json.loads(Path("run/results.json").read_text())["evaluations"]
    assert evaluation["worst_clients"]["ids"] == [honest]  # nobody means to serve the others
