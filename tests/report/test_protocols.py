"""``calfat per-class`` and the t-SNE: what they measure, on models whose answers are known."""

from __future__ import annotations

import dataclasses
import errno
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from calfat_plugin.analyses import tsne
from calfat_plugin.analyses.per_class import compare_per_class, parse_picks
from calfat_plugin.analyses.tsne import balanced, penultimate_features, write_tsne
from calfat_plugin.cli.main import main
from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import ModelError, OptionError, RunError, UpdateError
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.federation.wire import pack_update, unpack_downlink
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.models.cnn import CNNSmall
from calfat_plugin.results import LocalUpdate
from calfat_plugin.runs.checkpoints import ClientStates, load_checkpoint, save_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.cli.runner import Ended, calfat
from tests.report.made import experiment, made_run
from tests.snapshot import TextSnapshot

FROZEN = "train_args.learning_rate=1e-12"  # a local epoch leaves the model as it was


SMALL = "data_args.max_train_examples=500"


def run_with_model(path: Path, *overrides: str, round: int = 4) -> Path:
    """A run directory whose last checkpoint is an untrained model."""
    made_run(path, SMALL, *overrides)
    run = experiment(SMALL, *overrides)
    model = run.build_model(run.load_dataset(), run.build_trainer())
    save_checkpoint(RunDirectory(path).last_checkpoint, Snapshot(round, global_state=dict(model.state_dict())), {})
    return path


def compare(path: Path, *methods: Any, evaluators: tuple[str, ...] = ("natural", "fgsm")) -> dict[str, Any]:
    return compare_per_class(
        path, methods=methods, evaluators=evaluators, checkpoint="last", say=lambda line: None, warn=pytest.fail
    )


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose local training changes nothing."""
    return run_with_model(tmp_path_factory.mktemp("frozen") / "run", FROZEN)


# --- per class --------------------------------------------------------------------------------------------------------


def test_clients_begin_with_what_they_kept_if_the_method_is_the_run_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_with_model(tmp_path / "run")
    directory = RunDirectory(path)
    snapshot, _ = load_checkpoint(directory.last_checkpoint)
    states = ClientStates(directory.client_states, {}, 4)
    states[1] = {"personal/w": torch.ones(2)}
    save_checkpoint(directory.last_checkpoint, dataclasses.replace(snapshot, client_states=states), {})
    seen: list[tuple[int, list[str]]] = []

    def fit(worker: Worker, client: int, round: int, downlink: Any) -> Any:
        seen.append((client, list(worker.client_states[client])))
        return pack_update(LocalUpdate(unpack_downlink(downlink)[0], 1))

    monkeypatch.setattr(Worker, "fit", fit)
    compare(path, "calfat", "fedpgd", evaluators=("natural",))
    assert seen == [(0, []), (1, ["personal/w"]), (0, []), (1, [])]
    seen.clear()
    directory.write_recipe(experiment(SMALL, "calfat.clients=[{ids: 1, trainer: fedpgd}]"))
    compare(path, "calfat", "fedpgd", evaluators=("natural",))
    assert seen == [(0, []), (1, []), (0, []), (1, ["personal/w"])]  # of its own group's method


@pytest.mark.parametrize(
    "own",
    [
        ("train_args.lr_schedule=cosine",),
        ("train_args.lr_schedule=step", "train_args.lr_step_size=1"),
        ("train_args.warmup_rounds=3",),
        ("train_args.local_steps=3",),
        ("train_args.epochs=2",),
        ("calfat.clients=[{ids: 1, trainer: standard, epochs: 3, threat: {eps: 0.2}}]",),
        ("calfat.clients=[{ids: 1, attacker: label_flip}]",),
    ],
)
def test_every_client_trains_one_epoch_of_the_method_at_the_recipe_s_learning_rate(
    own: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_with_model(tmp_path / "run", "train_args.learning_rate=0.05", *own, round=1)
    run = experiment(SMALL)
    labels = run.load_dataset().train.y
    shards = run.split(labels.numpy())
    seen: list[int] = []

    def fit(trainer: AdversarialTrainer, task: LocalTask) -> LocalUpdate:
        settings = task.settings
        assert (settings.epochs, settings.local_steps, settings.learning_rate) == (1, None, 0.05)
        assert (type(trainer), float(task.threat.eps)) == (FedPGD, 0.1)
        assert torch.equal(task.data.y, labels[shards[task.client]])
        seen.append(task.client)
        return LocalUpdate(task.model.state_dict(), len(task.data))

    monkeypatch.setattr(AdversarialTrainer, "fit", fit)
    compare(path, "fedpgd", evaluators=("natural",))
    assert seen == [0, 1]


def test_every_client_is_measured_on_the_whole_test_split_from_the_global_model(frozen: Path) -> None:
    content = compare(frozen, "calfat", "fedgairat")
    run = experiment(SMALL, FROZEN)
    dataset = run.load_dataset()
    expected = measure(
        run.build_model(dataset, run.build_trainer()).eval(),
        dataset.test,
        run.build_evaluators(experiment("calfat.evaluators=[natural, fgsm]").evaluators),
        num_classes=10,
        threat=run.threat,
        batch_size=500,
        device=torch.device("cpu"),
        seed=0,
    )
    for method in ("calfat", "fedgairat"):
        clients = content["methods"][method]
        assert [client["client"] for client in clients] == [0, 1]
        assert sum(client["num_examples"] for client in clients) == len(dataset.train)
        for client in clients:
            for label in ("natural", "fgsm"):
                assert client[label] == list(expected[label].per_class)
    assert (content["checkpoint"], content["round"]) == ("last", 4)
    assert content == json.loads((frozen / "per_class.json").read_text())


def test_methods_start_from_one_model_and_nothing_is_aggregated(tmp_path: Path) -> None:
    path = run_with_model(tmp_path / "run", "train_args.learning_rate=0.05")
    before = RunDirectory(path).last_checkpoint.read_bytes()
    content = compare(path, "fedpgd", "standard", evaluators=("natural",))
    again = compare(path, "standard", evaluators=("natural",))
    assert content["methods"]["standard"] == again["methods"]["standard"]  # whatever else was trained before
    first, second = content["methods"]["standard"]
    assert first["natural"] != second["natural"]  # each client keeps its own model
    assert RunDirectory(path).last_checkpoint.read_bytes() == before


def test_the_runs_own_method_keeps_its_options_and_schedules_count_as_started(frozen: Path) -> None:
    content = compare(frozen, "calfat", {"name": "fedgairat", "lam": -2}, "fedpgd", evaluators=("natural",))
    trainers = content["trainers"]
    assert trainers["calfat"] == experiment().as_run()["calfat"]["trainer"]
    assert trainers["calfat"]["scale"] == 10
    assert (trainers["fedgairat"]["start_round"], trainers["fedgairat"]["lam"]) == (1, -2.0)


@pytest.mark.parametrize(
    "method", [{"name": "fedawp", "gamma": 0.5}, {"name": "fedpgd", "awp": {"gamma": 0.5}, "label": "added"}]
)
def test_weights_are_perturbed_also_after_a_model_of_an_early_round(tmp_path: Path, method: dict[str, Any]) -> None:
    path = run_with_model(tmp_path / "run", "train_args.learning_rate=0.05")
    at_once = {"name": "fedawp", "gamma": 0.5, "warmup": 0, "label": "at once"}
    perturbed, expected, plain = compare(path, method, at_once, "fedpgd", evaluators=("natural",))["methods"].values()
    assert perturbed == expected != plain


def test_clients_without_an_attack_use_the_borrowed_branch_at_once(tmp_path: Path) -> None:
    path = run_with_model(tmp_path / "run", "calfat.trainer={name: fedrbn, at_fraction: 0.5}")
    assert compare(path, "fedrbn", evaluators=("natural",))["trainers"]["fedrbn"]["pnc_warmup"] == 0


def test_one_method_twice_needs_two_labels(frozen: Path, snapshot: TextSnapshot) -> None:
    with snapshot.raises(OptionError):
        compare(frozen, "calfat", "calfat")
    twice = parse_picks("{name: fedgairat, lam: -1},{name: fedgairat, lam: -2, label: lam -2}", "--methods")
    content = compare(frozen, *twice, evaluators=("natural",))
    assert {label: trainer["lam"] for label, trainer in content["trainers"].items()} == {"fedgairat": -1, "lam -2": -2}
    assert list(content["methods"]) == ["fedgairat", "lam -2"]
    for label in (2, " ", "a\nb"):
        with snapshot.raises(OptionError):
            compare(frozen, {"name": "calfat", "label": label})


def test_a_method_with_another_architecture_is_refused_before_anything_is_trained(
    frozen: Path, snapshot: TextSnapshot
) -> None:
    with snapshot.raises(ModelError, run=frozen):
        compare(frozen, "calfat", {"name": "fedpgd", "loss": "robal"})


def test_a_client_whose_training_diverges_is_reported_by_name(tmp_path: Path) -> None:
    path = run_with_model(tmp_path / "run", "train_args.learning_rate=1e30")
    with pytest.raises(UpdateError, match=r"^standard: client 0 has no model to measure: "):
        compare(path, "standard")


def test_the_command_takes_no_checkpoint_file(frozen: Path, tmp_path: Path) -> None:
    file = RunDirectory(frozen).last_checkpoint
    ended = calfat("per-class", str(file))
    assert ended == Ended(2, "", f"error: {file}: this is a file, expected a run directory, such as {frozen}.\n")
    (tmp_path / "weights.pt").write_bytes(b"")
    ended = calfat("per-class", str(tmp_path / "weights.pt"))
    assert (ended.code, ended.err.endswith(" what model it is of. Give a run directory.\n")) == (2, True)


def test_a_checkpoint_that_is_not_there(frozen: Path, tmp_path: Path, snapshot: TextSnapshot) -> None:
    with pytest.raises(RunError) as caught:
        compare_per_class(frozen, methods=["calfat"], evaluators=["natural"], checkpoint="best", say=print, warn=print)
    assert str(caught.value).startswith(f"{frozen}/checkpoints/best.safetensors: no such checkpoint. ")
    with snapshot.raises(RunError):
        compare(tmp_path, "calfat")


@pytest.mark.parametrize(
    ("text", "picks"),
    [
        ("calfat", ["calfat"]),
        ("calfat,fedgairat", ["calfat", "fedgairat"]),
        ("calfat, {name: fedgairat, lam: -1}", ["calfat", {"name": "fedgairat", "lam": -1}]),
    ],
)
def test_methods_are_written_as_in_recipes(text: str, picks: list[Any]) -> None:
    assert parse_picks(text, "--methods") == picks


@pytest.mark.parametrize("text", ["", "{name: calfat", "1,2", "{lam: -1}"])
def test_what_is_no_list_of_methods_is_refused(text: str, snapshot: TextSnapshot) -> None:
    with snapshot.raises(OptionError):
        parse_picks(text, "--methods")


@pytest.mark.usefixtures("no_figures")
def test_the_command_writes_the_numbers_and_the_page(frozen: Path) -> None:
    result = CliRunner().invoke(
        main,
        ["per-class", str(frozen), "--methods", "calfat,fedpgd", "--evaluators", "natural"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.partition(" ")[0] for line in lines[:4]] == ["calfat,", "calfat,", "fedpgd,", "fedpgd,"]
    assert lines[-2:] == [f"results: {frozen / 'per_class.json'}", f"report: {frozen / 'report.html'}"]
    assert "Clients, class by class" in (frozen / "report.html").read_text()
    unknown = CliRunner().invoke(main, ["per-class", str(frozen), "--methods", "calfatt"])
    assert unknown.exit_code == 2
    assert "no local trainer called 'calfatt'. Did you mean 'calfat'?" in unknown.output


@pytest.mark.usefixtures("no_figures")
def test_earlier_numbers_are_kept(tmp_path: Path) -> None:
    run = run_with_model(tmp_path / "run", FROZEN)
    kept = []
    for earlier in (None, "per_class-1.json", "per_class-2.json"):
        result = CliRunner().invoke(main, ["per-class", str(run), "--methods", "fedpgd", "--evaluators", "natural"])
        assert result.exit_code == 0, result.output
        assert ("earlier results" in result.output) == (earlier is not None)
        assert earlier is None or f"earlier results: {run / earlier}\n" in result.output
        kept.append((run / "per_class.json").read_bytes())
    assert [(run / name).read_bytes() for name in ("per_class-1.json", "per_class-2.json", "per_class.json")] == kept


@pytest.mark.parametrize("command", [("per-class",), ("report", "--tsne")], ids=" ".join)
def test_a_run_that_cannot_be_written_to_is_refused_before_anything_is_computed(
    command: tuple[str, ...], frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    monkeypatch.setattr(Worker, "fit", lambda *_: pytest.fail("a client trained"))
    monkeypatch.setattr(tsne, "penultimate_features", lambda *_: pytest.fail("features were computed"))
    result = CliRunner().invoke(main, [*command, str(frozen)], catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {frozen}: cannot be written to (Permission denied); the results go into the run. Change its "
        "permissions, or give a copy of it.\n"
    )


# --- t-SNE ------------------------------------------------------------------------------------------------------------


def test_classes_are_balanced_and_the_choice_is_fixed() -> None:
    y = torch.tensor([0] * 50 + [1] * 20 + [3] * 5)
    data = ImageData(torch.arange(75, dtype=torch.float32).view(75, 1, 1, 1) / 75, y)
    chosen = balanced(data, 5, 2000)
    assert chosen.y.bincount(minlength=5).tolist() == [5, 5, 0, 5, 0]
    assert torch.equal(balanced(data, 5, 2000).x, chosen.x)
    assert balanced(data, 5, 9).y.bincount(minlength=5).tolist() == [3, 3, 0, 3, 0]


def test_features_are_what_the_last_layer_sees() -> None:
    torch.manual_seed(0)
    model = CNNSmall().eval()
    data = ImageData(torch.rand(7, 1, 8, 8), torch.zeros(7, dtype=torch.int64))
    found = penultimate_features(model, data, batch_size=3)
    with torch.no_grad():
        np.testing.assert_allclose(found, model.features(data.x).numpy(), rtol=1e-5, atol=1e-6)
        assert model.classifier is not None
        np.testing.assert_allclose(
            torch.from_numpy(found) @ model.classifier.weight.T + model.classifier.bias,
            model(data.x),
            rtol=1e-4,
            atol=1e-5,
        )


def test_features_of_somebody_elses_model_are_the_input_of_its_last_linear_layer(snapshot: TextSnapshot) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    data = ImageData(torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    with torch.no_grad():
        np.testing.assert_allclose(penultimate_features(model, data, 4), model[:3](data.x).numpy(), rtol=1e-6)
    with snapshot.raises(ModelError):
        penultimate_features(nn.Sequential(nn.Flatten()), data, 4)


def test_a_tsne_is_kept_with_the_run_and_is_the_same_again(frozen: Path) -> None:
    content = write_tsne(frozen, examples=60, warn=pytest.fail)
    assert np.bincount(content["labels"]).tolist() == [6] * 10
    assert np.asarray(content["points"]).shape == (60, 2)
    assert content["perplexity"] == pytest.approx(59 / 3)
    assert write_tsne(frozen, examples=60, warn=pytest.fail)["points"] == content["points"]
    assert json.loads((frozen / "tsne.json").read_text()) == content
