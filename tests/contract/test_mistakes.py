"""Mistakes of plugin authors, one at a time: each error names the plugin and its distribution, and says what to do."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calfat_plugin import (
    Aggregate,
    Aggregator,
    AggregatorEntry,
    CalfatError,
    DatasetEntry,
    EvaluatorEntry,
    InnerAttackEntry,
    ModelEntry,
    PartitionEntry,
    PluginError,
    Preset,
    Registry,
    RoundEnd,
    TrainerEntry,
)
from calfat_plugin.entries import Entry
from calfat_plugin.evaluators.base import AttackEvaluator
from calfat_plugin.experiment import assemble
from calfat_plugin.federation.server import Server
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.interfaces import AggregationTask
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import LocalUpdate
from calfat_plugin.trainers.base import AdversarialTrainer
from tests.cli.runner import calfat
from tests.contract import plugin_mistakes
from tests.contract.plugin_mistakes import evaluator, experiment, inner, trainer
from tests.methods import helpers
from tests.methods.helpers import RECIPE, Federation
from tests.runs.remains import read_rows
from tests.snapshot import TextSnapshot


def play(entry: Entry) -> None:
    """All that a run does, in this process: evaluators tried, a round, the final evaluation."""
    list(plugin_mistakes.play(entry)())


def split(entry: Entry) -> None:
    experiment(entry).split(np.arange(30) % 10)


def aggregator(combine: Callable[..., Any]) -> AggregatorEntry:
    return plugin_mistakes.aggregator(lambda task: combine(None, task))


def moved(change: float, low: float = 0.0) -> Callable[..., Any]:
    """A ``craft`` that moves each pixel by this much."""
    return lambda self, *given: (_task(*given).x_nat + change).clamp(low, 1)


def _task(*given: Any) -> Any:
    """The InnerTask among what ``craft`` of a method or of an inner attack is given."""
    return given[0] if len(given) == 1 else given[1]


def changing(what: str, then: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that changes a tensor of the batch, its first argument, in place."""

    def hook(self: Any, batch: Any, *others: Any) -> Any:
        getattr(batch, what).mul_(0)
        return then(self, batch, *others)

    return hook


def later(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward`` that is right when it is called first."""
    calls = count()
    return lambda self, batch: hook(self, batch) if next(calls) else AdversarialTrainer.backward(self, batch)


def on_inverted_images(self: Any, batch: Any) -> Any:
    batch.x_adv = 1 - batch.x_nat
    return AdversarialTrainer.backward(self, batch)


def by_numpy(self: Any, task: Any) -> Any:
    task.x_nat.numpy()[:] = 0.5
    return task.x_nat.clone()


def from_the_second_batch_on(self: Any, task: Any) -> Any:
    """Adds to what it remembers without end."""
    task.memory.append(0.06)
    return (task.x_nat + sum(task.memory)).clamp(0, 1)


def weighing(*shares: float) -> AggregatorEntry:
    return aggregator(
        lambda self, task: Aggregate(task.global_state, weights=dict(zip(task.updates, shares, strict=False)))
    )


def writing(write: Callable[[Any], None]) -> AggregatorEntry:
    """An aggregator that writes to what it is given."""

    def combine(self: Any, task: Any) -> Aggregate:
        state = {name: tensor.clone() for name, tensor in task.global_state.items()}
        write(task)
        return Aggregate(state)

    return aggregator(combine)


def replace_a_tensor(task: Any) -> None:
    task.updates[2].state["classifier.bias"] = task.updates[2].state["classifier.bias"] * 1.0


def partition(*shards: Iterable[int], **more: Any) -> PartitionEntry:
    return PartitionEntry("wrong", build=lambda labels, num_clients: [np.array(shard) for shard in shards], **more)


def model(forward: Callable[..., Any]) -> ModelEntry:
    def build(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        made = nn.Linear(in_channels * image_size[0] * image_size[1], num_classes)
        made.forward = lambda x: forward(nn.functional.linear(x.flatten(1), made.weight, made.bias))  # type: ignore
        return made

    return ModelEntry("wrong", build=build)


class NoOptionsTaken(Aggregator):
    def __init__(self):
        pass

    def combine(self, task: Any) -> Aggregate:
        return Aggregate(task.global_state)


def without_a_ball(**settings: Any) -> EvaluatorEntry:
    """What an evaluator that is held to no budget says of one."""
    return evaluator(has_budget=False, settings=lambda self, task: settings)


def keeps(value: Any) -> Callable[..., RoundEnd]:
    return lambda self, task, context: value


MODEL = "test.yaml:1: model_args.model: model 'wrong' (passed in wrong): "
PERSONAL = {"personal_names": lambda self, model: {next(iter(model.state_dict()))}}
RIGHT = range(10), range(10, 20), range(20, 30)

MISTAKES: dict[str, Entry | tuple[Callable[[Any], None], Entry]] = {
    "backward gives nothing": trainer(backward=lambda self, batch: None),
    "the steps give nothing": trainer(take_steps=lambda self, batch, step: None),
    "an attack's loss for each example": trainer(attack_loss=lambda self, batch: batch.logits_adv.sum(dim=1)),
    "no start": trainer(start=lambda self, x_nat, task, generator: None),
    "a start of another shape": trainer(start=lambda self, x_nat, task, generator: x_nat[0]),
    "a start of another type": trainer(start=lambda self, x_nat, task, generator: x_nat.double()),
    "attacked rows by number": trainer(attacked_rows=lambda self, index, task, generator: index[:3]),
    "an inner attack beyond the pixels": inner(craft=moved(-0.05, low=-1)),
    "an inner attack beyond the budget from the second batch on": inner(
        begin_round=lambda self, task: [], craft=from_the_second_batch_on
    ),
    "an inner attack whose own steps go beyond the budget": inner(
        take_steps=lambda self, batch, step, memory: step(batch.again((batch.x_nat + 0.3).clamp(0, 1)))
    ),
    "an inner attack that steps on images of another type": inner(
        take_steps=lambda self, batch, step, memory: step(batch.again(batch.x_adv.double()))
    ),
    "an inner attack that changes the images by numpy": inner(craft=by_numpy),
    "a start that changes the images in place": inner(
        start=lambda self, x_nat, threat, generator: x_nat.mul_(0.5).clone()
    ),
    "an inner attack that reaches a number": inner(reach=lambda self, threat: 2.0),
    "an inner attack that reaches beyond the pixels": inner(
        reach=lambda self, threat: dataclasses.replace(threat, bounds=(-1, 2))
    ),
    "a method's attack beyond the budget": trainer(craft=moved(0.3)),
    "a method's steps beyond the budget": trainer(
        take_steps=lambda self, batch, step: step(batch.again((batch.x_nat + 0.3).clamp(0, 1)))
    ),
    "a step on other images beyond the budget": trainer(backward=on_inverted_images),
    "an attack's loss that changes the images in place": trainer(
        attack_loss=changing("x_nat", AdversarialTrainer.attack_loss)
    ),
    **{
        f"a step that changes {what} in place": trainer(backward=changing(what, AdversarialTrainer.backward))
        for what in ("x_adv", "y")
    },
    "a step that changes x_adv in place from the second batch on": trainer(
        backward=later(changing("x_adv", AdversarialTrainer.backward))
    ),
    "an optimiser's class": trainer(make_optimizer=lambda self, parameters, task: torch.optim.AdamW),
    "a schedule that is a number": trainer(make_schedule=lambda self, optimizer, task, num_batches: 0.1),
    "an end that is a dict": trainer(end_round=keeps({"teacher": torch.zeros(1)})),
    "client state that is no tensor": trainer(end_round=keeps(RoundEnd(state={"seen": 3}))),
    "a metric that is text": trainer({"margin": "of a test"}, end_round=keeps(RoundEnd(metrics={"margin": "wide"}))),
    "a metric that is not declared": trainer(
        {"margin": "of a test"}, end_round=keeps(RoundEnd(metrics={"margins": 1.0}))
    ),
    "an update that is a dict": trainer(fit=lambda self, task: task.model.state_dict()),
    "personal tensors that are none": trainer(personal_names=lambda self, model: {"bias": None}),
    "personal tensors by a pattern": trainer(personal_names=lambda self, model: "bn"),
    "personal means of nothing": trainer(**PERSONAL, evaluated_personal=lambda self, updates, names: None),
    "personal means under other names": trainer(**PERSONAL, evaluated_personal=lambda self, updates, names: {}),
    "a trainer that takes no modifier": TrainerEntry("wrong", build=lambda options: None),
    "a trainer that adapts no model": trainer(adapt_model=lambda self, model: None),
    "an aggregator that takes no options": AggregatorEntry("wrong", build=NoOptionsTaken),
    "an aggregator that keeps a number": aggregator(
        lambda self, task: Aggregate(task.global_state, server_state={"steps": 1})
    ),
    "an aggregator that gives weights to others": aggregator(
        lambda self, task: Aggregate(task.global_state, weights={99: 1.0})
    ),
    "an aggregator whose weight is nan": aggregator(
        lambda self, task: Aggregate(task.global_state, weights=dict.fromkeys(task.updates, math.nan))
    ),
    "an aggregator whose weights sum to less": weighing(0.5),
    "an aggregator with a weight below 0": weighing(1.5, -0.5),
    "an aggregator that adds up in the first update by numpy": writing(
        lambda task: task.updates[0].state["classifier.bias"].numpy().__iadd__(1)
    ),
    "an aggregator that replaces a tensor of an update": writing(replace_a_tensor),
    "an aggregator that changes the global model in place": writing(
        lambda task: task.global_state["classifier.bias"].add_(1)
    ),
    "an attack that crafts nothing": evaluator(lambda self, task, x, y, noise: None),
    "a result that is a number": evaluator(lambda self, *arguments: None, evaluate=lambda self, task, label: 0.5),
    "a result of a whole number": plugin_mistakes.counting(1),
    "a result of nan": plugin_mistakes.counting(math.nan),
    "a result that files cannot hold": evaluator(
        lambda self, task, x, y, noise: x, settings=lambda self, task: {"seen": torch.zeros(1)}
    ),
    "a result of too few classes": evaluator(
        evaluate=lambda self, task, label: dataclasses.replace(
            AttackEvaluator.evaluate(self, task, label), per_class=(1.0, None)
        )
    ),
    "a result whose eps has no norm": without_a_ball(eps="0.1"),
    "a result whose eps is no number": without_a_ball(eps="large", norm="linf"),
    "a model of three outputs": model(lambda logits: logits[:, :3]),
    "a model whose smallest image is none": (
        lambda entry: supported_runtime(experiment(entry)) and None,
        ModelEntry("wrong", build=dict, min_size=lambda options: None),
    ),
    "a data set that is a pair": (
        lambda entry: experiment(entry).load_dataset() and None,
        DatasetEntry("wrong", build=lambda root: (1, 2)),
    ),
    "a partition that gives no list": (split, PartitionEntry("wrong", build=lambda labels, num_clients: None)),
    "a partition beyond the data": (split, partition(range(10), range(10, 20), range(20, 31))),
    "a partition of nested lists": (split, PartitionEntry("wrong", build=lambda labels, num_clients: [[[1], [2, 3]]])),
    "a partition of fractions": (split, PartitionEntry("wrong", build=lambda labels, num_clients: [np.zeros(1)] * 3)),
    "an inner attack of so many steps": (experiment, InnerAttackEntry("wrong", build=dict, steps=lambda options: "3")),
    "a preset of nothing": (
        lambda entry: experiment(entry, calfat__trainer={"name": "wrong", "preset": "odd"}) and None,
        TrainerEntry("wrong", build=dict, presets={"odd": Preset("of a test", recipe=lambda dataset: None)}),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_names_plugin_and_remedy(mistake: str, snapshot: TextSnapshot) -> None:
    made = MISTAKES[mistake]
    act, entry = made if isinstance(made, tuple) else (play, made)
    with snapshot.raises(CalfatError, "'wrong' (passed in wrong): "):
        act(entry)


def test_what_is_right_passes() -> None:
    play(trainer({"margin": "of a test"}, end_round=keeps(RoundEnd({"seen": torch.ones(1)}, {"margin": 1}))))
    split(partition(*RIGHT))
    split(partition(range(10), range(12, 20), range(20, 30), may_leave_out=True))


@pytest.mark.parametrize(
    ("write", "whose"),
    [
        (lambda task: task.updates[3].extras["a/b"].add_(1), "'a/b' of the extras of client 3"),
        (lambda task: task.server_state["kept"].add_(1), "'kept' of server_state"),
    ],
)
def test_what_an_aggregator_is_given_beside_models_stays_as_it_is(write: Callable[[Any], None], whose: str) -> None:
    server = Federation(experiment(writing(write))).server
    updates = {3: LocalUpdate(server.state, 1, extras={"a/b": torch.zeros(2)})}
    task = AggregationTask(server.state, updates, {"kept": torch.zeros(2)}, [], num_clients=3, round=2)
    with pytest.raises(PluginError, match=rf"'wrong' \(passed in wrong\): round 2: combine changed {whose} in place\."):
        server.combined(task)


def test_an_attack_that_leaves_the_ball_by_design_says_how_far() -> None:
    play(inner(craft=moved(0.3), reach=lambda self, threat: threat.scaled(3)))
    with pytest.raises(PluginError, match=r"left the linf ball of eps 0\.2;"):
        play(inner(craft=moved(0.3), reach=lambda self, threat: threat.scaled(2)))


@pytest.mark.parametrize(
    ("threat", "found"),
    [({"eps": 0.05}, "linf ball of eps 0.05"), ({"norm": "l2", "eps": 0.1, "step_size": 0.05}, "l2 ball of eps 0.1")],
)
def test_a_group_is_held_to_its_own_budget(threat: dict[str, Any], found: str) -> None:
    run = experiment(inner(craft=moved(0.1)))
    document = run.document.with_value(("calfat", "clients"), [{"ids": "2", "threat": threat}], "test.yaml:2")
    Federation(run).play()
    with pytest.raises(
        PluginError, match=rf"'wrong' \(passed in wrong\): client 2, round 1, batch 1: .* left the {found};"
    ):
        Federation(assemble(document, run.registry)).play()


def test_what_is_not_finite_costs_the_client_its_update(snapshot: TextSnapshot) -> None:
    """It may come of the model, too, and one client must not end the run of the others."""
    bad = inner(
        begin_round=lambda self, task: task.client,
        craft=lambda self, task: task.x_nat + (math.nan if task.memory in task_clients else 0.0),
    )
    task_clients = [1]
    record = Federation(experiment(bad)).play()
    assert record.clients == (0, 2)
    snapshot(record.refused[1])
    task_clients[:] = range(3)
    with snapshot.raises(CalfatError, "inner attack 'wrong' (passed in wrong)"):
        Federation(experiment(bad)).play()


def test_a_model_that_diverged_is_no_mistake_of_the_attack() -> None:
    run = experiment(inner(craft=moved(0.05)))
    diverging = run.document.with_value(("train_args", "learning_rate"), 1e30, "test.yaml:2")
    with pytest.raises(CalfatError, match="the training loss is"):
        Federation(assemble(diverging, run.registry)).play()


def test_steps_of_the_method_are_no_mistake_of_the_inner_attack() -> None:
    run = experiment(trainer(take_steps=lambda self, batch, step: None), calfat__threat__inner="n-fgsm")
    with pytest.raises(PluginError, match=r"^local trainer 'wrong' .*take_steps returned nothing"):
        Federation(run).play()


def test_an_evaluator_without_a_budget_is_not_checked_against_one() -> None:
    """What changes more than eps, such as a rotation, and whose base reports none."""

    def brightest(self: Any, task: Any, x: Any, y: Any, noise: Any) -> Any:
        return torch.ones_like(x)

    play(evaluator(brightest, has_budget=False))
    with pytest.raises(CalfatError, match=r"^evaluator 'wrong': 2 of 2 adversarial examples left the linf ball"):
        play(evaluator(brightest))


def test_a_new_run_tries_its_evaluators_and_a_resumed_one_does_not() -> None:
    run = experiment(evaluator(lambda self, task, x, y, noise: None))
    server = Server(run, helpers.small_digits(), helpers.CPU, RunObserver())
    with pytest.raises(PluginError, match="craft returned nothing"):
        server.begin(None)
    server.begin(Federation(run).server.snapshot())
    assert server.round == 0


def test_a_plugin_without_a_hook_is_refused_by_name(snapshot: TextSnapshot) -> None:
    for hooks in ({"calfat_local_trainers": lambda: []}, {}):
        with snapshot.raises(PluginError, "wrong: it implements no hook"):
            Registry.load(entry_points=False, plugins=[SimpleNamespace(**hooks, __name__="wrong")])


def test_penultimate_features_need_a_model_that_gives_them(snapshot: TextSnapshot) -> None:
    def train_loss(self: Any, batch: Any) -> Any:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean() + batch.features_adv.square().mean()

    entry, plain = trainer(train_loss=train_loss), model(lambda logits: logits)
    play(entry)  # on a built-in model
    run = experiment(entry)
    with snapshot.raises(CalfatError):
        Federation(dataclasses.replace(run, model=dataclasses.replace(run.model, entry=plain, name="a:Plain"))).play()


def test_an_own_optimiser_is_refused_beside_a_correction_that_needs_sgd(snapshot: TextSnapshot) -> None:
    own = trainer(make_optimizer=lambda self, parameters, task: torch.optim.AdamW(parameters, lr=0.1))
    run = experiment(own)
    scaffold = helpers.experiment("fedpgd", "scaffold").aggregator
    with snapshot.raises(PluginError):
        Federation(dataclasses.replace(run, aggregator=scaffold)).play()


def test_a_run_ends_where_an_attack_leaves_the_budget_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    """Wrong from the second round on, with PGD's projection before."""
    source = """
from calfat_plugin import InnerAttack, InnerAttackEntry, hookimpl


class Wrong(InnerAttack):
    def begin_round(self, task):
        return task.round

    def craft(self, task):
        found = super().craft(task)
        return found if task.memory == 1 else (task.x_nat + 0.3).clamp(0, 1)


@hookimpl
def calfat_inner_attacks():
    yield InnerAttackEntry("wrong", build=Wrong)
"""
    (tmp_path / "strays.py").write_text(source)
    (tmp_path / "test.yaml").write_text(RECIPE.replace("threat: {", "threat: {inner: wrong, "))
    monkeypatch.chdir(tmp_path)
    for again in ([], ["--resume"]):
        ended = calfat("run", "test.yaml", "--plugin", "strays.py", "--run-dir", "run", *again)
        assert ended.code == 2
        error = next(line for line in ended.err.splitlines() if line.startswith("error: "))
        snapshot(re.sub("sha256:[0-9a-f]+", "sha256", error))
        assert "Traceback" not in ended.err
        assert [row["round"] for row in read_rows(Path("run/rounds.csv"))] == ["1"]
