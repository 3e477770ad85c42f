"""Mistakes of plugin authors, one at a time: each error names the plugin and its distribution, and says what to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    AttackEvaluator,
    CalfatError,
    ClientLoss,
    DatasetEntry,
    EvaluatorEntry,
    LossModifier,
    ModelEntry,
    ModifierEntry,
    PartitionEntry,
    PluginError,
    Registry,
    RoundEnd,
    TrainerEntry,
    hookimpl,
    option,
)
from calfat_plugin.entries import Entry
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.host.task import ServerTask
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import KINDS
from calfat_plugin.trainers.base import AdversarialTrainer
from tests.cli.runner import COMMAND, python
from tests.contract.distributions import install
from tests.methods import helpers
from tests.methods.helpers import RECIPE, Federation

KEYS = {
    TrainerEntry: ("calfat", "trainer"),
    ModifierEntry: ("calfat", "trainer"),
    AggregatorEntry: ("calfat", "aggregator"),
    EvaluatorEntry: ("calfat", "evaluators"),
    ModelEntry: ("model_args", "model"),
    PartitionEntry: ("data_args", "partition_method"),
    DatasetEntry: ("data_args", "dataset"),
}


def experiment(entry: Entry) -> Experiment:
    """The tiny recipe with this plugin in it."""
    plugin = SimpleNamespace(**{KINDS[type(entry)]: hookimpl(lambda: [entry])}, __name__="wrong")
    written: Any = entry.name
    if isinstance(entry, ModifierEntry):
        written = {"name": "fedpgd", "loss": entry.name}
    if isinstance(entry, EvaluatorEntry):
        written = [entry.name]
    document = parse_document(RECIPE, "test.yaml").with_value(KEYS[type(entry)], written, "test.yaml:1")
    return assemble(document, Registry.load(entry_points=False, plugins=[plugin]))


def play(entry: Entry) -> None:
    """All that a run does, in this process: evaluators tried, a round, the final evaluation."""
    federation = Federation(experiment(entry))
    federation.server.try_evaluators()
    federation.play()
    federation.server.final_evaluation()


def split(entry: Entry) -> None:
    experiment(entry).split(np.arange(30) % 10)


def trainer(metrics: Any = None, config: type | None = None, **overrides: Any) -> TrainerEntry:
    """A method that is right, but for what is overridden."""

    def train_loss(self: Any, batch: Any) -> Any:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()

    build = type("Wrong", (AdversarialTrainer,), {"train_loss": train_loss, **overrides})
    declared: dict[str, Any] = {"metrics": metrics or {}, **({} if config is None else {"config": config})}
    return TrainerEntry("wrong", build=build, **declared)


def aggregator(combine: Callable[..., Any]) -> AggregatorEntry:
    build = type("Wrong", (Aggregator,), {"combine": combine, "__init__": lambda self, options: None})
    return AggregatorEntry("wrong", build=build)


def evaluator(craft: Callable[..., Any], **more: Any) -> EvaluatorEntry:
    body = {"craft": craft, "settings": lambda self, task: {}, **more}
    return EvaluatorEntry("wrong", build=type("Wrong", (AttackEvaluator,), body))


def partition(*shards: Iterable[int], **more: Any) -> PartitionEntry:
    return PartitionEntry("wrong", build=lambda labels, num_clients: [np.array(shard) for shard in shards], **more)


def model(forward: Callable[..., Any]) -> ModelEntry:
    def build(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        made = nn.Linear(in_channels * image_size[0] * image_size[1], num_classes)
        made.forward = lambda x: forward(nn.functional.linear(x.flatten(1), made.weight, made.bias))  # type: ignore
        return made

    return ModelEntry("wrong", build=build)


@dataclass(frozen=True)
class Options:
    share: float = option(0.5, help="of a test")


class NoOptionsTaken(Aggregator):
    def combine(self, task: Any) -> Aggregate:
        return Aggregate(task.global_state)


class NoClientLoss(LossModifier):
    def __init__(self, options: Any) -> None:
        pass

    def bind(self, class_counts: Any) -> Any:
        return ClientLoss


def keeps(value: Any) -> Callable[..., RoundEnd]:
    return lambda self, task, context: value


TRAINER = "local trainer 'wrong' (passed in wrong): "
AGGREGATOR = "aggregator 'wrong' (passed in wrong): "
EVALUATOR = "evaluator 'wrong' (passed in wrong): "
PARTITION = "test.yaml:1: data_args.partition_method: partition 'wrong' (passed in wrong): "
MODEL = "test.yaml:1: model_args.model: model 'wrong' (passed in wrong): "
RIGHT = range(10), range(10, 20), range(20, 30)

MISTAKES: dict[str, tuple[Callable[[Any], None], Entry, str]] = {
    "a loss for each example": (
        play,
        trainer(train_loss=lambda self, batch: batch.loss.cross_entropy(batch.logits_adv, batch.y)),
        f"{TRAINER}train_loss returned a tensor of shape (16,); expected one number, a tensor of shape ().",
    ),
    "a loss that is a float": (
        play,
        trainer(train_loss=lambda self, batch: 0.5),
        f"{TRAINER}train_loss returned a float (0.5); expected one number, a tensor of shape ().",
    ),
    "a loss that is detached": (
        play,
        trainer(train_loss=lambda self, batch: batch.logits_adv.detach().mean()),
        f"{TRAINER}train_loss returned a number that depends on no parameter of the model; was it detached, or made "
        "under torch.no_grad()?",
    ),
    "backward gives nothing": (
        play,
        trainer(backward=lambda self, batch: None),
        f"{TRAINER}backward returned nothing (None); expected one number, a tensor of shape ().",
    ),
    "the steps give nothing": (
        play,
        trainer(take_steps=lambda self, batch, step: None),
        f"{TRAINER}take_steps returned nothing (None); expected one number, a tensor of shape ().",
    ),
    "an attack's loss for each example": (
        play,
        trainer(attack_loss=lambda self, batch: batch.logits_adv.sum(dim=1)),
        f"{TRAINER}attack_loss returned a tensor of shape (16,); expected one number, a tensor of shape ().",
    ),
    "no start": (
        play,
        trainer(start=lambda self, x_nat, task, generator: None),
        f"{TRAINER}start returned nothing (None); expected a tensor of shape (16, 1, 8, 8).",
    ),
    "a start of another shape": (
        play,
        trainer(start=lambda self, x_nat, task, generator: x_nat[0]),
        f"{TRAINER}start returned a tensor of shape (1, 8, 8); expected a tensor of shape (16, 1, 8, 8).",
    ),
    "a start of another type": (
        play,
        trainer(start=lambda self, x_nat, task, generator: x_nat.double()),
        f"{TRAINER}start returned a tensor of dtype torch.float64; expected torch.float32.",
    ),
    "attacked rows by number": (
        play,
        trainer(attacked_rows=lambda self, index, task, generator: index[:3]),
        f"{TRAINER}attacked_rows returned a tensor of shape (3,) and type torch.int64; expected a tensor of shape "
        "(16,) and type torch.bool.",
    ),
    "an optimiser's class": (
        play,
        trainer(make_optimizer=lambda self, parameters, task: torch.optim.AdamW),
        f"{TRAINER}make_optimizer returned the class AdamW; expected an Optimizer.",
    ),
    "a schedule that is a number": (
        play,
        trainer(make_schedule=lambda self, optimizer, task, num_batches: 0.1),
        f"{TRAINER}make_schedule returned a float (0.1); expected a LRScheduler.",
    ),
    "an end that is a dict": (
        play,
        trainer(end_round=keeps({"teacher": torch.zeros(1)})),
        f"{TRAINER}end_round returned a dict; expected a RoundEnd.",
    ),
    "client state that is no tensor": (
        play,
        trainer(end_round=keeps(RoundEnd(state={"seen": 3}))),  # type: ignore[dict-item]
        f"{TRAINER}end_round's state holds an int (3) under 'seen'; expected tensors, each under a text.",
    ),
    "a metric that is text": (
        play,
        trainer({"margin": "of a test"}, end_round=keeps(RoundEnd(metrics={"margin": "wide"}))),  # type: ignore
        f"{TRAINER}its update has the metric a str ('wide') under 'margin'; expected a number.",
    ),
    "a metric that is not declared": (
        play,
        trainer({"margin": "of a test"}, end_round=keeps(RoundEnd(metrics={"margins": 1.0}))),
        f"{TRAINER}its update has the metric 'margins', which its entry does not declare. Declared: loss, margin. "
        "Add it to the entry: metrics={'margins': 'what it is'}.",
    ),
    "an update that is a dict": (
        play,
        trainer(fit=lambda self, task: task.model.state_dict()),
        f"{TRAINER}fit returned an OrderedDict; expected a LocalUpdate.",
    ),
    "the config is forgotten": (
        play,
        trainer(train_loss=lambda self, batch: self.options.share * batch.logits_adv.mean()),
        f"{TRAINER}its code reads the option 'share', which its entry does not declare: the config is NoOptions. Add "
        "the option to that class, or give the entry the class that has it (config=...).",
    ),
    "another option is read": (
        play,
        trainer(config=Options, train_loss=lambda self, batch: self.options.shares * batch.logits_adv.mean()),
        f"{TRAINER}its code reads the option 'shares', which its entry does not declare: the config is Options. Add "
        "the option to that class, or give the entry the class that has it (config=...).",
    ),
    "a trainer that takes no modifier": (
        play,
        TrainerEntry("wrong", build=lambda options: None),
        f"{TRAINER}its build, <lambda>(options), cannot be called as build(options, modifier): too many positional "
        "arguments.",
    ),
    "a trainer that adapts no model": (
        play,
        trainer(adapt_model=lambda self, model: None),
        f"test.yaml:3: model_args.model: {TRAINER}adapt_model returned nothing (None); expected a Module.",
    ),
    "a modifier that binds no losses": (
        play,
        ModifierEntry("wrong", build=NoClientLoss, methods=("fedpgd",)),
        "loss modifier 'wrong' (passed in wrong): bind returned the class ClientLoss; expected a ClientLoss.",
    ),
    "an aggregator that takes no options": (
        play,
        AggregatorEntry("wrong", build=NoOptionsTaken),
        f"{AGGREGATOR}its build, NoOptionsTaken(), cannot be called as build(options): too many positional arguments.",
    ),
    "an aggregator that returns a dict": (
        play,
        aggregator(lambda self, task: dict(task.global_state)),
        f"{AGGREGATOR}combine returned a dict; expected an Aggregate. Return Aggregate(state=...).",
    ),
    "an aggregator that keeps a number": (
        play,
        aggregator(lambda self, task: Aggregate(task.global_state, server_state={"steps": 1})),  # type: ignore
        f"{AGGREGATOR}its aggregate's server_state holds an int (1) under 'steps'; expected tensors, each under a "
        "text.",
    ),
    "an aggregator that gives weights to others": (
        play,
        aggregator(lambda self, task: Aggregate(task.global_state, weights={99: 1.0})),
        f"{AGGREGATOR}its aggregate's weights hold a float (1.0) for client 99; expected finite numbers for clients of "
        "the round.",
    ),
    "an aggregator whose weight is nan": (
        play,
        aggregator(lambda self, task: Aggregate(task.global_state, weights=dict.fromkeys(task.updates, math.nan))),
        f"{AGGREGATOR}its aggregate's weights hold a float (nan) for client 0; expected finite numbers for clients of "
        "the round.",
    ),
    "an aggregator that looks at the server's images": (
        play,
        aggregator(lambda self, task: task.monitored()),
        f"{AGGREGATOR}combine asks for the server's images (task.monitored), which its entry does not declare. Give "
        "the AggregatorEntry uses_monitored_data=True; results say so where these are test images.",
    ),
    "an attack that crafts nothing": (
        play,
        evaluator(lambda self, task, x, y, noise: None),
        f"{EVALUATOR}craft returned nothing (None); expected a tensor of shape (2, 1, 8, 8).",
    ),
    "an attack that crafts another shape": (
        play,
        evaluator(lambda self, task, x, y, noise: x[:, 0]),
        f"{EVALUATOR}craft returned a tensor of shape (2, 8, 8); expected a tensor of shape (2, 1, 8, 8).",
    ),
    "a metric of an evaluator that is not declared": (
        play,
        evaluator(lambda self, task, x, y, noise: task.record("change", y) or x),
        f"{EVALUATOR}its result has the metric 'change', which its entry does not declare. Declared: none. Add it to "
        "the entry: metrics={'change': 'what it is'}.",
    ),
    "a result that is a number": (
        play,
        evaluator(lambda self, *arguments: None, evaluate=lambda self, task, label: 0.5),
        f"{EVALUATOR}evaluate returned a float (0.5); expected an EvaluationResult.",
    ),
    "a result that files cannot hold": (
        play,
        evaluator(lambda self, task, x, y, noise: x, settings=lambda self, task: {"seen": torch.zeros(1)}),
        f"{EVALUATOR}its result's settings.seen is a Tensor, which results.json cannot hold; expected numbers, texts, "
        "lists and mappings of them.",
    ),
    "a model of three outputs": (
        play,
        model(lambda logits: logits[:, :3]),
        f"{MODEL}images of shape (2, 1, 8, 8) gave (2, 3); expected logits of shape (2, 10).",
    ),
    "a model without the keywords": (
        play,
        ModelEntry("wrong", build=lambda: nn.Identity()),
        f"{MODEL}calling it with in_channels, image_size, num_classes failed: <lambda>() got an unexpected keyword "
        "argument 'in_channels'.",
    ),
    "a data set that is a pair": (
        lambda entry: experiment(entry).load_dataset() and None,
        DatasetEntry("wrong", build=lambda root: (1, 2)),
        "data set 'wrong' (passed in wrong): build(root) returned a tuple; expected a Dataset.",
    ),
    "a partition for fewer clients": (
        split,
        partition(range(30)),
        f"{PARTITION}it returned 1 index arrays for 3 clients; expected one a client.",
    ),
    "a partition that gives no list": (
        split,
        PartitionEntry("wrong", build=lambda labels, num_clients: None),
        f"{PARTITION}it returned nothing (None); expected a list of one index array a client.",
    ),
    "a partition that overlaps": (
        split,
        partition(range(11), range(10, 20), range(20, 30)),
        f"{PARTITION}it gave 1 of 30 training examples out more than once, such as example 10 to clients 0 and 1; "
        "expected each with one client.",
    ),
    "a partition that leaves examples out": (
        split,
        partition(range(10), range(12, 20), range(20, 30)),
        f"{PARTITION}it gave 2 of 30 training examples to no client, such as example 10. If that is meant, give its "
        "PartitionEntry may_leave_out=True.",
    ),
    "a partition beyond the data": (
        split,
        partition(range(10), range(10, 20), range(20, 31)),
        f"{PARTITION}it gave client 2 positions from 20 to 30; expected 0 to 29, as there are 30 training examples.",
    ),
    "a partition of fractions": (
        split,
        PartitionEntry("wrong", build=lambda labels, num_clients: [np.zeros(1)] * 3),
        f"{PARTITION}it gave client 0 an array of shape (1,) and type float64; expected (examples,) positions in the "
        "training set, whole numbers.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_names_plugin_and_remedy(mistake: str) -> None:
    act, entry, text = MISTAKES[mistake]
    with pytest.raises(CalfatError) as raised:
        act(entry)
    assert str(raised.value) == text


def test_what_is_right_passes() -> None:
    play(trainer({"margin": "of a test"}, end_round=keeps(RoundEnd({"seen": torch.ones(1)}, {"margin": 1}))))
    split(partition(*RIGHT))
    split(partition(range(10), range(12, 20), range(20, 30), may_leave_out=True))


def test_an_evaluator_without_a_budget_is_not_checked_against_one() -> None:
    """Corruptions change more than eps, and their base reports none."""

    def brightest(self: Any, task: Any, x: Any, y: Any, noise: Any) -> Any:
        return torch.ones_like(x)

    play(evaluator(brightest, has_budget=False))
    with pytest.raises(CalfatError, match=r"^evaluator 'wrong': 2 of 2 adversarial examples left the linf ball"):
        play(evaluator(brightest))


def test_a_new_run_tries_its_evaluators_and_a_resumed_one_does_not() -> None:
    run = experiment(evaluator(lambda self, task, x, y, noise: None))
    task = ServerTask(run, helpers.small_digits(), helpers.CPU, RunObserver(), lambda record, snapshot: None)
    with pytest.raises(PluginError) as raised:
        task.start_server()
    assert str(raised.value) == MISTAKES["an attack that crafts nothing"][2]
    snapshot = Federation(run).server.snapshot()
    assert dataclasses.replace(task, resume_from=snapshot).start_server().round == 0


def test_a_plugin_without_a_hook_is_refused_by_name() -> None:
    forgotten = SimpleNamespace(calfat_local_trainers=lambda: [], __name__="wrong")
    with pytest.raises(PluginError) as raised:
        Registry.load(entry_points=False, plugins=[forgotten])
    assert str(raised.value) == "it implements no hook; is @hookimpl missing above 'calfat_local_trainers'?"
    with pytest.raises(PluginError) as raised:
        Registry.load(entry_points=False, plugins=[SimpleNamespace(__name__="wrong")])
    assert str(raised.value) == (
        "it implements no hook; is @hookimpl missing? Hooks: calfat_aggregators, calfat_datasets, calfat_evaluators, "
        "calfat_local_trainers, calfat_loggers, calfat_loss_modifiers, calfat_models, calfat_partitions, "
        "calfat_round_finished, calfat_run_finished, calfat_run_started, calfat_run_stopped."
    )


def test_penultimate_features_need_a_model_that_gives_them() -> None:
    class Plain(nn.Module):
        def __init__(self, **shapes: Any) -> None:
            super().__init__()
            self.last = nn.Linear(64, shapes["num_classes"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.last(x.flatten(1))
            return logits

    def train_loss(self: Any, batch: Any) -> Any:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean() + batch.features_adv.square().mean()

    entry, plain = trainer(train_loss=train_loss), ModelEntry("plain", build=Plain)
    play(entry)  # on a built-in model
    run = experiment(entry)
    with pytest.raises(CalfatError) as raised:
        Federation(dataclasses.replace(run, model=dataclasses.replace(run.model, entry=plain, name="a:Plain"))).play()
    assert str(raised.value) == (
        "the method reads penultimate features, which the model Plain does not give. Choose a model that derives from "
        "calfat_plugin.ImageClassifier, as all built-in ones do; in a model of your own, derive from it and pass it "
        "the body and the last layer."
    )


def test_an_own_optimiser_is_refused_beside_a_correction_that_needs_sgd() -> None:
    own = trainer(make_optimizer=lambda self, parameters, task: torch.optim.AdamW(parameters, lr=0.1))
    run = experiment(own)
    scaffold = helpers.experiment("fedpgd", "scaffold").aggregator
    with pytest.raises(PluginError) as raised:
        Federation(dataclasses.replace(run, aggregator=scaffold)).play()
    assert str(raised.value) == (
        f"{TRAINER}it makes an optimiser of its own (AdamW), but this aggregator's correction of local steps holds for "
        "the recipe's SGD on unclipped gradients only. Choose another aggregator, such as fedavg."
    )


def test_a_command_ends_with_the_text_and_2(tmp_path: Path) -> None:
    source = """
    from calfat_plugin import AdversarialTrainer, TrainerEntry, hookimpl

    class Wrong(AdversarialTrainer):
        def train_loss(self, batch):
            return batch.loss.cross_entropy(batch.logits_adv, batch.y)

    @hookimpl
    def calfat_local_trainers():
        yield TrainerEntry("wrong", build=Wrong)
    """
    install(tmp_path, "my-wrong", "0.3", {"my_wrong": source}, my_wrong="my_wrong")
    (tmp_path / "test.yaml").write_text(RECIPE.replace("calfat:\n", "calfat:\n  trainer: wrong\n"))
    ended = python(COMMAND, "run", "test.yaml", "--run-dir", "run", cwd=tmp_path, path=(tmp_path,))
    assert ended.code == 2
    assert ended.err.splitlines()[0] == (
        "error: local trainer 'wrong' (my-wrong 0.3): train_loss returned a tensor of shape (16,); expected one "
        "number, a tensor of shape ()."
    )
    assert "Traceback" not in ended.err
