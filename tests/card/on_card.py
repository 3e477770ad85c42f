"""What ``test_card.py`` runs in a process of its own, whose torch has a card that is not there (``card.py``).

Every built-in plugin that computes goes through two rounds, or measures a dozen images, on ``cuda:0``. A tensor that
was left on the CPU is an error there, as it is on a card; and tensors and numbers must be the CPU's, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import calfat_plugin
from calfat_plugin import entries, testing
from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.attackers.label_flip import LabelFlip, LabelFlipOptions
from calfat_plugin.datasets import Augmentation, Dataset, ImageData
from calfat_plugin.errors import OptionError, PluginError
from calfat_plugin.evaluators.gradient import FGSM, FGSMOptions
from calfat_plugin.evaluators.measure import evaluation_task, measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.interfaces import (
    ActiveCorrection,
    ClientLoss,
    InnerAttack,
    InnerTask,
    LocalCorrection,
    LocalTask,
    LossModifier,
    TrainBatch,
)
from calfat_plugin.judging import examine, questions
from calfat_plugin.models.networks import CNNSmall
from calfat_plugin.options import describe_options
from calfat_plugin.recipe.schema import Recipe
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult
from calfat_plugin.testing.evaluators import TinyClients, tiny_set_up
from calfat_plugin.testing.federation import TinyFederation
from calfat_plugin.testing.tiny import (
    THREATS,
    balanced_images,
    balanced_model,
    in_each_norm,
    same_bits,
    tiny_dataset,
    tiny_experiment,
)
from calfat_plugin.trainers.standard import Standard
from tests.card.card import CARD, Card, install
from tests.cli.runner import calfat
from tests.evaluators.trust_models import weak_battery

install()
CPU = torch.device("cpu")
registry = cache(testing.builtin_registry)


def names(kind: type[entries.Entry], *others: str) -> list[str]:
    """Those of all built-ins of a kind but ``others``."""
    return [name for name in registry().names(kind) if name not in others]


def few(kind: type[entries.Entry], name: str, **values: int) -> dict[str, Any]:
    """Those of ``values`` that are options of the plugin."""
    entry, _ = registry().find(kind, name)
    return {info.name: values[info.name] for info in describe_options(entry.config) if info.name in values}


# --- training and aggregation -----------------------------------------------------------------------------------------


def assert_the_cpus_bits(experiment: Experiment, dataset: Dataset | None = None) -> None:
    """Two rounds of a federation, the second of which goes on with what clients and server keep."""
    with Card():
        there = played(CARD, experiment, dataset)
    here = played(CPU, experiment, dataset)
    assert there.keys() == here.keys()
    assert [name for name in here if not torch.equal(there[name], here[name])] == []


def played(device: torch.device, experiment: Experiment, dataset: Dataset | None = None) -> dict[str, Tensor]:
    """All that is left of a federation."""
    federation = TinyFederation(experiment, dataset=dataset, device=device)
    federation.server.begin(None)
    records = [federation.play() for _ in range(2)]
    assert not [record.refused for record in records if record.refused]
    server, clients = federation.server, federation.worker.client_states
    kept = {"global": server.evaluated, "server": server.server_state, "broadcast": server.broadcast, **clients}
    numbers = [number for record in records for number in (*record.losses.values(), *record.metrics.values())]
    numbers += [result.accuracy for result in (*records[-1].evaluations.values(), *server.final_evaluation())]
    return {
        "numbers": torch.tensor(numbers, dtype=torch.float64),
        **{f"{who} {name}": tensor for who, state in kept.items() for name, tensor in state.items()},
    }


def tiny(**sections: Any) -> Experiment:
    """Two batches a client, two steps an attack: each operation costs Python's time here."""
    defaults = {"threat": {**THREATS[0], "steps": 2}, "trainer": "standard"}
    return tiny_experiment(registry(), **{**defaults, **sections, "train_args": TRAIN | sections.get("train_args", {})})


TRAIN = {"batch_size": 8, "comm_round": 2}
IN_FULL: dict[str, dict[str, Any]] = {  # options with which a method does in two rounds all that it ever does
    "fedawp": {"warmup": 0},
    "fedgairat": {"start_round": 1},
    "fedrbn": {"at_fraction": 0.5, "pnc": 0.2, "pnc_warmup": 0, "debias": 0.1},
}


@pytest.mark.parametrize("name", names(entries.TrainerEntry))
def test_trainers(name: str) -> None:
    assert_the_cpus_bits(tiny(trainer={"name": name, **IN_FULL.get(name, {})}))


@pytest.mark.parametrize("name", names(entries.ModifierEntry))
def test_modifiers(name: str) -> None:
    assert_the_cpus_bits(tiny(trainer={"name": "fedtrades", "loss": name}))


@pytest.mark.parametrize("name", names(entries.InnerAttackEntry))
def test_inner_attacks(name: str) -> None:
    inner = {"name": name, **few(entries.InnerAttackEntry, name, warmup=1, replays=2)}
    for experiment in in_each_norm(registry(), inner, trainer="fedpgd", train_args=TRAIN):
        assert_the_cpus_bits(experiment)


@pytest.mark.parametrize("name", names(entries.AggregatorEntry, "sfat"))  # it needs an attack: see ADDED
def test_aggregators(name: str) -> None:
    none = few(entries.AggregatorEntry, name, f=0)  # three clients bear no more attackers
    assert_the_cpus_bits(tiny(aggregator={"name": name, **none}))


@pytest.mark.parametrize("name", names(entries.AttackerEntry))
def test_attackers(name: str) -> None:
    labels = {"source": [0, 1], "target": [1, 2]} if name == "label_flip" else {}
    assert_the_cpus_bits(tiny(clients=[{"ids": [1], "attacker": {"name": name, **labels}}]))


def test_an_aggregator_sees_logits_on_the_cpu() -> None:
    """Those of the server's images, whose model is on the card."""
    with Card():
        server = TinyFederation(tiny(), device=CARD).server
        assert server._measurements.monitored().logits(server.state).device == CPU


ADDED: list[dict[str, Any]] = [
    {"trainer": {"name": "calfat", "awp": {"gamma": 0.01}, "label_smoothing": 0.1}, "ema": {"decay": 0.5}},
    {
        "trainer": {"name": "mixfat", "sampling": "fixed"},
        "train_args": {"client_optimizer": "adamw", "max_grad_norm": 0.1},
    },
    {"trainer": "fedpgd", "train_args": {"nesterov": True, "local_steps": 3}, "clients": [{"ids": [1], "epochs": 2}]},
    {"trainer": "fedpgd", "aggregator": {"name": "scaffold", "variant": "I", "pairing": "gradient"}},
    {"trainer": "fedpgd", "aggregator": {"name": "sfat", "start_round": 1}},
    {"runtime": {"precision": "tf32"}, "evaluators": ["personalised"]},
]


@pytest.mark.parametrize("sections", ADDED)
def test_what_is_added_to_a_method(sections: dict[str, Any]) -> None:
    dataset = dataclasses.replace(tiny_dataset(), augment=Augmentation(crop_padding=1, flip=True))
    assert_the_cpus_bits(tiny(**sections), dataset)


def test_bfloat16() -> None:
    """Which operations compute in it differs between devices, so the CPU has other bits."""
    with Card():
        played(CARD, tiny(trainer="calfat", runtime={"precision": "bf16"}))


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names(entries.EvaluatorEntry))
def test_evaluators(name: str, tmp_path: Path) -> None:
    options = few(entries.EvaluatorEntry, name, iterations=2, queries=5, steps=3)
    if name == "transfer":
        torch.save(balanced_model().state_dict(), tmp_path / "source.pt")
        options |= {"source": str(tmp_path / "source.pt"), "model": f"{__name__}:balanced"}
    with Card():
        found, x_adv = measured(CARD, name, options)
    expected, points = measured(CPU, name, options)
    found, expected = (dataclasses.replace(each, seconds=0, details={}) for each in (found, expected))
    assert found == expected
    assert torch.equal(x_adv, points)


def balanced(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    return balanced_model()


def measured(device: torch.device, name: str, options: dict[str, Any]) -> tuple[EvaluationResult, Tensor]:
    """(what an evaluator finds, its examples)."""
    experiment = tiny(evaluators=[{"name": name, **options}])
    model, data = balanced_model().to(device).eval(), balanced_images().to(device)
    x_adv = data.x.clone()

    def keep(where: Tensor, points: Tensor) -> None:
        x_adv[where] = points

    set_up = tiny_set_up(data)
    evaluators = experiment.ready_evaluators(experiment.evaluators, set_up)
    task = evaluation_task(model, data, experiment, set_up)
    task = replace(task, batch_size=5, on_examples=keep, clients=lambda: TinyClients(model))
    (result,) = measure(task, evaluators).values()
    return result, x_adv.cpu()


SMALLEST: dict[str, dict[str, Any]] = {
    "cnn": {"image_size": (28, 28)},
    "cnn_mcmahan": {"image_size": (32, 32)},
}


@pytest.mark.parametrize("name", names(entries.ModelEntry, "alexnet64"))  # that one has 57 million parameters
def test_models(name: str) -> None:
    with Card():
        testing.check_model(name, registry=registry(), device="cuda:0", **SMALLEST.get(name, {}))


# --- the checks of plugins --------------------------------------------------------------------------------------------


def stays(tensor: Tensor) -> None:
    """What a plugin does that computes where it is called, and wants to be called on the card."""
    assert tensor.device == CARD


def leaves(tensor: Tensor) -> None:
    """What a plugin does that makes a tensor on the CPU."""
    tensor + torch.zeros(1)


def plugins(name: str, look: Callable[[Tensor], None]) -> list[entries.Entry]:
    """A plugin of each kind, which looks at each tensor that it is given to compute with."""

    class Trainer(Standard):
        def train_loss(self, batch: TrainBatch) -> Tensor:
            look(batch.x_nat)
            return super().train_loss(batch)

    class Aggregator(FedAvg):
        def correction(self) -> LocalCorrection:
            return Correction()

    class Correction(LocalCorrection):
        def begin(self, task: LocalTask) -> ActiveCorrection:
            look(next(task.model.parameters()))
            return ActiveCorrection()

    class Poisoner(LabelFlip):
        def poisoned(self, data: ImageData, num_classes: int) -> ImageData:
            look(data.x)
            return super().poisoned(data, num_classes)

    class Evaluator(FGSM):
        def loss(self, logits: Tensor, y: Tensor) -> Tensor:
            look(logits)
            return super().loss(logits, y)

    class Inner(InnerAttack):
        def craft(self, task: InnerTask) -> Tensor:
            look(task.x_nat)
            return super().craft(task)

    class Modifier(LossModifier):
        def __init__(self, options: object) -> None: ...

        def bind(self, class_counts: Tensor) -> ClientLoss:
            look(class_counts)
            return Loss()

    class Loss(ClientLoss):
        def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
            look(logits)
            return super().cross_entropy(logits, y)

    def model(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        made = CNNSmall(in_channels, image_size, num_classes)
        # What builds it tries it on the CPU, without gradients.
        made.register_forward_pre_hook(lambda module, inputs: look(inputs[0]) if torch.is_grad_enabled() else None)
        return made

    def in_linf(options: object, recipe: Recipe) -> None:
        if recipe.threat.norm != "linf":
            raise OptionError("in linf alone, which is quicker.")

    return [
        entries.TrainerEntry(name, build=Trainer),
        entries.AggregatorEntry(name, build=Aggregator, config=FedAvgOptions),
        entries.AttackerEntry(name, build=Poisoner, config=LabelFlipOptions),
        entries.EvaluatorEntry(name, build=Evaluator, config=FGSMOptions),
        entries.InnerAttackEntry(name, build=Inner, check=in_linf),
        entries.ModifierEntry(name, build=Modifier, methods=("fedpgd",)),
        entries.ModelEntry(name, build=model),
    ]


@cache
def with_plugins() -> Registry:
    """The built-ins, and of each kind a plugin ``right`` and one that is ``wrong``."""
    offered = [*plugins("right", stays), *plugins("wrong", leaves)]

    def offering(kind: type[entries.Entry]) -> Callable[[object], list[entries.Entry]]:
        return hookimpl(lambda self: [entry for entry in offered if type(entry) is kind])

    hooks = {kind.hook: offering(kind) for kind in entries.KINDS}
    return testing.builtin_registry(type("Plugin", (), hooks)())


CHECKS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (testing.check_trainer, {}),
    (testing.check_aggregator, {"trainer": "standard"}),
    (testing.check_attacker, {}),
    (testing.check_evaluator, {}),
    (testing.check_inner_attack, {}),
    (testing.check_modifier, {}),
    (testing.check_model, {}),
]


@pytest.mark.parametrize(("check", "options"), CHECKS, ids=[check.__name__ for check, _ in CHECKS])
def test_a_check_computes_on_the_device_that_it_is_given(check: Callable[..., Any], options: dict[str, Any]) -> None:
    with Card():
        check("right", registry=with_plugins(), device="cuda", **options)
        with pytest.raises((RuntimeError, PluginError), match="on the same device, but found cuda:0 and cpu"):
            check("wrong", registry=with_plugins(), device="cuda:0", **options)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match=r"device cuda:1: torch sees 1 GPU here\."):
        testing.check_modifier("plain", device="cuda:1")


# --- commands ---------------------------------------------------------------------------------------------------------

RECIPE = """\
common_args: {training_type: simulation, random_seed: 0}
data_args: {dataset: digits, partition_method: dirichlet, partition_alpha: 0.3, max_train_examples: 60,
  max_test_examples: 20}
device_args: {using_gpu: true}
model_args: {model: 'calfat_plugin.testing.tiny:build_tiny_model'}
train_args: {client_num_in_total: 2, comm_round: 2, batch_size: 32, learning_rate: 0.05}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural, pgd2]
  runtime: {threads: 1}
"""


ON_CPU = ("--set", "device_args.using_gpu=false")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The battery of ``calfat trust`` in a moment: every check, each too weak to publish."""
    monkeypatch.setattr(questions, "EPOCHS", 1)
    monkeypatch.setattr(questions, "MORE", 20)
    monkeypatch.setattr(examine, "battery", weak_battery)


def test_a_recipe_and_what_is_asked_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, no_page: None
) -> None:
    """As a user starts it, on FedML; the run's numbers and its model are the CPU's."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    with Card():
        command("run", "tiny.yaml", "--run-dir", "card", "--profile")
        command("run", "tiny.yaml", "--run-dir", "card", "--resume", "--set", "train_args.comm_round=3")
        command("attack", "card", "--attacks", "fgsm", "--examples", "10")
        command("trust", "card", "--examples", "6", "--full")
    command("run", "tiny.yaml", "--run-dir", "cpu", "--set", "train_args.comm_round=3", *ON_CPU)
    found, expected = map(Path, ("card", "cpu"))
    devices = [json.loads((run / "environment.json").read_text())["device"] for run in (found, expected)]
    assert devices == ["cuda:0", "cpu"]
    models = [load_file(run / "checkpoints/last.safetensors") for run in (found, expected)]
    assert same_bits(*models)
    results = [json.loads((run / "results.json").read_text())["evaluations"] for run in (found, expected)]
    assert [each["accuracy"] for each in results[0]] == [each["accuracy"] for each in results[1]]


def command(*arguments: str) -> None:
    ended = calfat(*arguments)
    assert (ended.code, "computing on the CPU" in ended.err) == (0, False), ended


@pytest.mark.parametrize("device", ["cpu", "cuda:0"], ids=["images on the CPU", "images on the card"])
def test_python_takes_a_model_that_lies_on_the_card(device: str) -> None:
    images = balanced_images()
    with Card():
        data = images.to(device)
        found = calfat_plugin.evaluate(balanced_model().eval().to(CARD), data.x, data.y, "pgd2", eps=0.1)
    expected = calfat_plugin.evaluate(balanced_model().eval(), images.x, images.y, "pgd2", eps=0.1)
    assert found["pgd2"].per_class == expected["pgd2"].per_class
