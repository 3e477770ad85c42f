"""What can be added to every method: weight perturbation and label smoothing; and the average of the global models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from calfat_plugin import testing
from calfat_plugin.entries import TrainerEntry
from calfat_plugin.errors import CalfatError
from calfat_plugin.experiment import assemble
from calfat_plugin.federation.measurements import Measurements
from calfat_plugin.interfaces import ClientLoss, LocalTask, LocalTrainer
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.recipe.training import AWPOptions
from calfat_plugin.results import PASSES, LocalUpdate
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.loaded_run import LoadedRun
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import tiny_experiment
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.additions import perturbation, smoothed
from tests.methods.helpers import (
    COUNTS,
    CPU,
    RECIPE,
    SETTINGS,
    Z_ADV,
    Federation,
    TinyNet,
    Y,
    build_method,
    build_modifier,
    experiment,
    local_task,
    registry,
    same_bits,
    tasks_of,
    tiny_data,
    train,
)
from tests.plugins import offering
from tests.snapshot import TextSnapshot

PLAIN_SGD = dataclasses.replace(SETTINGS, momentum=0.0, weight_decay=0.0)
AWP = AWPOptions(gamma=0.3, warmup=0)
METHODS = registry().names(TrainerEntry)


# --- adversarial weight perturbation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_weights_are_put_back_to_the_bit(name: str) -> None:
    method, task = build_method(name), local_task(settings=dataclasses.replace(PLAIN_SGD, learning_rate=0.0))
    start = {key: value.clone() for key, value in method.adapt_model(TinyNet()).state_dict().items()}
    task = dataclasses.replace(task, round=99, awp=None if name == "fedawp" else AWP)
    state = train(method, task).state
    others = [key for key in state if any(part in key for part in ("running", "tracked", "extra_state"))]
    assert same_bits(*({k: v for k, v in each.items() if k not in others} for each in (state, start)))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedawp"])
def test_it_acts_on_every_method_after_its_warm_up(name: str) -> None:
    def trained(round: int, awp: AWPOptions | None) -> Any:
        return train(build_method(name), local_task(round=round, awp=awp)).state

    awp = AWPOptions(gamma=0.3, warmup=70)
    assert same_bits(trained(70, awp), trained(70, None))
    assert not same_bits(trained(71, awp), trained(71, None))


@pytest.mark.parametrize(
    ("gradient", "gamma", "expected"),
    [
        ([0.0, 2.0], 0.005, [0.0, 0.025]),
        *(([3 * size, 4 * size], 0.1, [0.3, 0.4]) for size in (1.0, 1e-25, 1e25)),
        ([0.0, 0.0], 0.1, [0.0, 0.0]),
    ],
)
def test_the_length_is_gamma_times_the_weights(gradient: list[float], gamma: float, expected: list[float]) -> None:
    found = perturbation(torch.tensor([3.0, 4.0]), torch.tensor(gradient), gamma)
    assert found.tolist() == pytest.approx(expected)


def test_added_to_fedpgd_it_is_fedawp() -> None:
    """And statistics count one pass a batch."""
    update = build_method("fedawp", warmup=0).fit(local_task(TinyNet(norm=True), tiny_data(count=8)))
    assert [int(of) for name, of in update.state.items() if name.endswith("num_batches_tracked")] == [2]
    runs = [{"name": "fedawp", "warmup": 1}, {"name": "fedpgd", "awp": {"warmup": 1}}]
    one, other = (Federation(experiment(trainer)) for trainer in runs)
    for _ in range(2):
        assert one.play().losses == other.play().losses
    assert same_bits(one.server.state, other.server.state)


# --- label smoothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_plain_smoothing_is_torchs(share: float) -> None:
    found = smoothed(ClientLoss(), share).cross_entropy(Z_ADV, Y)
    assert torch.allclose(found, F.cross_entropy(Z_ADV, Y, reduction="none", label_smoothing=share), atol=1e-6)


@pytest.mark.parametrize("name", ["calibrated", "logitadj", "fedlc", "gear", "fedrs"])
def test_the_uniform_term_sees_raw_logits_and_the_other_one_the_modifiers(name: str) -> None:
    loss = build_modifier(name).bind(COUNTS)
    uniform = -Z_ADV.log_softmax(dim=1).mean(dim=1)
    found = smoothed(loss, 0.25)
    wanted = 0.75 * loss.cross_entropy(Z_ADV, Y) + 0.25 * uniform
    assert torch.allclose(found.cross_entropy(Z_ADV, Y), wanted, atol=1e-6)
    for part in ("attack_logits", "kl_logits", "margin_logits"):
        assert torch.equal(getattr(found, part)(Z_ADV), getattr(loss, part)(Z_ADV))
    assert torch.equal(loss.cross_entropy(Z_ADV, Y), build_modifier(name).bind(COUNTS).cross_entropy(Z_ADV, Y))


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), ("calfat", {"outer": "plain"})])
def test_it_acts_on_every_method(name: str, options: dict[str, Any]) -> None:
    states = [train(build_method(name, **options), local_task(label_smoothing=s)).state for s in (0.0, 0.3)]
    assert not same_bits(*states)


# --- clean rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_no_method_attacks_in_clean_rounds(name: str) -> None:
    """A budget changes nothing then; and afterwards the method is the one without clean rounds."""

    def trained(round: int, clean_rounds: int, eps: str) -> Any:
        threat = ThreatModel(eps=eps, steps=2)
        task = local_task(TinyNet(norm=True), round=round, clean_rounds=clean_rounds, threat=threat)
        task = dataclasses.replace(task, model=build_method(name).adapt_model(task.model))
        return build_method(name).fit(task)

    clean, wider = trained(3, 3, "0.1"), trained(3, 3, "0.3")
    assert same_bits(clean.state, wider.state)
    assert clean.metrics == wider.metrics
    attacked = trained(4, 3, "0.1")
    if name != "standard":
        assert attacked.metrics[PASSES] > clean.metrics[PASSES]
    if name != "fedlat":  # which is linear from then on
        assert same_bits(attacked.state, trained(4, 0, "0.1").state)


def test_in_clean_rounds_fedpgd_is_standard_training() -> None:
    """To the bit in a whole federation, whatever the inner attack remembers; and then it is FedPGD from there."""
    threat = {"eps": "0.1", "inner": "atas"}
    chosen = {"name": "fedpgd", "clean_rounds": 1}
    one, other = (Federation(experiment(trainer, calfat__threat=threat)) for trainer in (chosen, "standard"))
    assert one.play().losses == other.play().losses
    assert same_bits(one.server.state, other.server.state)
    one.play()
    other.play()
    assert not same_bits(one.server.state, other.server.state)


def test_a_run_with_clean_rounds_resumes_to_the_same_bits() -> None:
    threat = {"eps": "0.1", "inner": "atas"}
    check_federation(tiny_experiment(registry(), trainer={"name": "calfat", "clean_rounds": 1}, threat=threat))


@pytest.mark.parametrize(
    ("trainer", "aggregator"),
    [
        ({"name": "fedpgd", "clean_rounds": 2}, "fedavg"),
        ({"name": "fedpgd", "clean_rounds": -1}, "fedavg"),
        ({"name": "fedpgd", "clean_rounds": 1}, {"name": "sfat", "start_round": 1}),
    ],
    ids=["no round left", "negative", "sfat"],
)
def test_clean_rounds_that_are_refused(trainer: Any, aggregator: Any, snapshot: TextSnapshot) -> None:
    assert experiment({"name": "fedpgd", "clean_rounds": 1}, {"name": "sfat", "start_round": 2}).warnings == ()
    with snapshot.raises(CalfatError):
        experiment(trainer, aggregator)


def test_clean_rounds_of_a_method_without_attack_draw_a_warning(snapshot: TextSnapshot) -> None:
    assert experiment({"name": "fedpgd", "clean_rounds": 1}).warnings == ()
    (warning,) = experiment({"name": "standard", "clean_rounds": 1}).warnings
    snapshot(warning)


# --- in recipes -------------------------------------------------------------------------------------------------------


def test_a_recipe_shows_what_is_added_and_nothing_else() -> None:
    def written(**added: Any) -> dict[str, Any]:
        run = experiment({"name": "fedpgd", **added})
        shown: dict[str, Any] = run.as_run()["calfat"]["trainer"]
        return {key: value for key, value in shown.items() if key not in ("name", "loss")}

    assert written() == written(label_smoothing=0, awp=None) == {}
    assert written(label_smoothing=0.1, awp={"gamma": 0.01}) == {
        "label_smoothing": 0.1,
        "awp": {"gamma": 0.01, "warmup": 10},
    }
    assert "ema" not in experiment("fedpgd").as_run()["calfat"]
    assert experiment("fedpgd", calfat__ema={}).as_run()["calfat"]["ema"] == {"decay": 0.9}


def test_a_warm_up_as_long_as_the_run_draws_a_warning(snapshot: TextSnapshot) -> None:
    assert not any("awp" in text for text in experiment({"name": "fedpgd", "awp": {"warmup": 1}}).warnings)
    (warning,) = (text for text in experiment({"name": "fedpgd", "awp": {"warmup": 2}}).warnings if "awp" in text)
    snapshot(warning)


def test_groups_have_their_own() -> None:
    group = {"ids": 1, "trainer": {"name": "fedpgd", "label_smoothing": 0.2, "awp": {"gamma": 0.3, "warmup": 0}}}
    trainer = {"name": "fedpgd", "label_smoothing": 0.1, "clean_rounds": 1}
    tasks = tasks_of(Federation(experiment(trainer, calfat__clients=[group])))
    seen = {client: (task.label_smoothing, task.awp, task.clean_rounds) for client, task in tasks.items()}
    assert seen == {0: (0.1, None, 1), 1: (0.2, AWP, 0), 2: (0.1, None, 1)}


@pytest.mark.parametrize(
    "added",
    [{"awp": {}}, {"label_smoothing": 0.1}, {"clean_rounds": 1}],
    ids=["awp", "label smoothing", "clean rounds"],
)
def test_a_loop_of_its_own_is_refused(added: dict[str, Any], snapshot: TextSnapshot) -> None:
    class Own(LocalTrainer):
        def __init__(self, *given: Any) -> None: ...

        def fit(self, task: LocalTask) -> LocalUpdate:
            raise NotImplementedError

    found = [TrainerEntry("own", build=Own), TrainerEntry("later", build=lambda *given: Own(*given))]
    with_it = testing.builtin_registry(offering(*found))
    for name in ("own", "later"):  # what builds the second one does not say that it has a loop
        document = parse_document(RECIPE, "test.yaml").with_value(("calfat", "trainer"), {"name": name}, "test.yaml:1")
        assemble(document, with_it).build_trainer()
        trainer = {"name": name, **added}
        with snapshot.raises(CalfatError):
            assemble(document.with_value(("calfat", "trainer"), trainer, "test.yaml:2"), with_it).build_trainer()


# --- the moving average -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_the_average_weighs_each_round_by_the_decay_of_its_age(decay: float) -> None:
    """Also statistics of batch normalisation, in a model that has some; counters are rounded."""
    settings = {"calfat__ema": {"decay": decay}, "model_args__model": "cnn_small", "calfat__model__norm": "batch"}
    federation = Federation(experiment("standard", **settings))
    states = []
    for done in range(1, 4):
        federation.play()
        states.append(federation.server.state)
        weights = [decay ** (done - 1 - index) for index in range(done)]
        for name, found in federation.server.evaluated.items():
            parts = (weight * state[name].double() for weight, state in zip(weights, states, strict=True))
            wanted = sum(parts, torch.zeros(())) / sum(weights)
            rounding = 1e-6 if found.is_floating_point() else 1
            assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=rounding), name
    if decay == 0:
        assert same_bits(federation.server.evaluated, federation.server.state)
    else:
        assert not same_bits(federation.server.evaluated, federation.server.state)


def test_clients_train_as_without_it() -> None:
    runs = [Federation(experiment("fedpgd", **ema)) for ema in ({}, {"calfat__ema": {}})]
    for _ in range(2):
        records = [run.play() for run in runs]
        assert same_bits(*(run.server.downlink() for run in runs))
    assert records[0].losses == records[1].losses
    assert same_bits(runs[0].server.evaluated, runs[0].server.state)


def test_the_average_is_what_is_measured_and_given_to_evaluators_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    own = Measurements._measuring

    def measuring(self: Measurements, state: Any, *given: Any, **more: Any) -> Any:
        seen.append(state)
        return own(self, state, *given, **more)

    monkeypatch.setattr(Measurements, "_measuring", measuring)
    run = experiment("fedpgd", calfat__ema={}, calfat__monitor__every=1, calfat__evaluators=["personalised"])
    federation = Federation(run)
    for _ in range(2):
        federation.play()
    federation.server.final_evaluation()
    assert len(seen) == 3
    assert same_bits(seen[0], federation.server.state) is False
    assert same_bits(seen[1], federation.server.average)
    assert same_bits(seen[2], federation.server.average)
    clients = federation.server._clients()
    assert clients is not None
    assert same_bits({k: v for k, v in clients.downlink.items() if k in federation.server.state}, seen[2])


def test_a_checkpoint_is_the_average_with_the_trained_model_beside_it_and_resumes(tmp_path: Path) -> None:
    whole = Federation(experiment("fedpgd", calfat__ema={"decay": 0.7}, train_args__comm_round=3))
    for _ in range(2):
        whole.play()
    path, state, average = tmp_path / "last.safetensors", whole.server.state, whole.server.average
    save_checkpoint(path, whole.snapshot(), {})
    loaded, _ = load_checkpoint(path)
    assert same_bits(loaded.global_state, average)
    assert same_bits(loaded.trained, state)
    model = LoadedRun(whole.server.experiment, path, None, CPU).model()
    assert same_bits(model.state_dict(), average)
    resumed = Federation(whole.server.experiment, loaded)
    assert same_bits(resumed.server.evaluated, average)
    for each in (whole, resumed):
        each.play()
    assert same_bits(whole.server.state, resumed.server.state)
    assert same_bits(whole.server.average, resumed.server.average)
