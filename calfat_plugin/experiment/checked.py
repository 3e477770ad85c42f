"""Plugins whose results are checked before the package uses them: a class for each interface, with the same methods.

What is checked while a run trains is cheap: types, shapes, names, and numbers that are on the CPU. Deeper checks are in
``calfat_plugin.testing``. Whether images stay in their ball is checked in ``trainers.watching`` and in
``evaluators.base``, which know the clean images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from calfat_plugin import returned
from calfat_plugin.entries import (
    AggregatorEntry,
    AttackerEntry,
    Entry,
    EvaluatorEntry,
    InnerAttackEntry,
    ModifierEntry,
    TrainerEntry,
)
from calfat_plugin.errors import PluginError, one_line
from calfat_plugin.exact import parse_number
from calfat_plugin.experiment.building import check_class
from calfat_plugin.interfaces import (
    ActiveCorrection,
    Aggregate,
    AggregationTask,
    Aggregator,
    Attacker,
    AttackTask,
    ClientLoss,
    EvaluationTask,
    Evaluator,
    InnerAttack,
    InnerTask,
    LocalCorrection,
    LocalTask,
    LocalTrainer,
    LossModifier,
    SetUpTask,
    State,
    TrainBatch,
)
from calfat_plugin.results import ALIGNMENT, PASSES, EvaluationResult, LocalUpdate, evaluation_as_json
from calfat_plugin.returned import attribute_errors_to
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from calfat_plugin.datasets import ImageData

P = TypeVar("P")
E = TypeVar("E", bound=Entry)


class Checked(Generic[P, E]):
    """A plugin, and its name for errors.

    Attributes:
        plugin: what the entry's ``build`` made.
        entry: declares its options and metrics.
        who: kind, name and distribution, as messages name it.
    """

    def __init__(self, plugin: P, entry: E, who: str) -> None:
        self.plugin = plugin
        self.entry = entry
        self.who = who
        self.options = getattr(plugin, "options", None)

    def named_errors(self) -> AbstractContextManager[None]:
        """Let errors of the plugin begin with its name."""
        return attribute_errors_to(self.who, self.entry.config)


class PassedToPlugins(Checked[P, E]):
    """A checked plugin that other plugins are given: they may also read attributes that its interface does not have."""

    def __getattr__(self, name: str) -> Any:
        if name == "plugin" or name.startswith("__"):  # asked for by copy.deepcopy, before there is a plugin
            raise AttributeError(name)
        return getattr(self.plugin, name)


# --- local training ---------------------------------------------------------------------------------------------------


class CheckedTrainer(Checked[LocalTrainer, TrainerEntry], LocalTrainer):
    """A local trainer; what it returns is checked before it is sent or used by the server."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        return self.plugin.adapt_model(model)  # Experiment.build_model checks it

    def fit(self, task: LocalTask) -> LocalUpdate:
        with self.named_errors():
            update = returned.instance(self.plugin.fit(task), LocalUpdate, "fit returned")
            returned.tensors(update.state, "its update's state holds", on="cpu")
            returned.tensors(update.extras, "its update's extras holds", on="cpu")
            returned.tensors(update.client_state, "its update's client_state holds", on="cpu")
            declared = {**self.entry.metrics, "loss": "mean training loss"}
            metrics = returned.metrics(update.metrics, declared, "its update has the metric", also=(ALIGNMENT, PASSES))
            return dataclasses.replace(update, metrics=metrics)

    def personal_names(self, model: nn.Module) -> frozenset[str]:
        from calfat_plugin.maths.tied import further_names

        with self.named_errors():
            names = returned.names(self.plugin.personal_names(model), model.state_dict(), "personal_names returned")
        first_name_of = further_names(model)  # of a tensor with several names
        return frozenset(first_name_of.get(name, name) for name in names)

    def evaluated_personal(self, updates: Mapping[int, LocalUpdate], names: Sequence[str]) -> dict[str, Tensor]:
        with self.named_errors():
            by_name = returned.mapping(self.plugin.evaluated_personal(updates, names), "evaluated_personal returned")
            sent = next(iter(updates.values())).state  # any client's: all have the same shapes
            tensors = {}
            for name in names:
                call = f"evaluated_personal returned, as '{name}',"
                tensors[name] = returned.like(by_name.get(name), sent[name], call)
            return tensors

    def among(self, others: Mapping[int, LocalTrainer]) -> CheckedTrainer:
        plugins = {}
        for client, trainer in others.items():
            if isinstance(trainer, CheckedTrainer):
                trainer = trainer.plugin  # a method may look at the options and the type of the others
            plugins[client] = trainer
        with self.named_errors():
            server_trainer = returned.instance(self.plugin.among(plugins), LocalTrainer, "among returned")
        return CheckedTrainer(server_trainer, self.entry, self.who)

    def broadcast(self, updates: Mapping[int, LocalUpdate]) -> dict[str, Tensor]:
        with self.named_errors():
            return dict(returned.tensors(self.plugin.broadcast(updates), "broadcast returned", on="cpu"))


class CheckedModifier(PassedToPlugins[LossModifier, ModifierEntry], LossModifier):
    """A loss modifier; the losses that it binds are tried once on a batch of two."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from torch import nn

        with self.named_errors():
            return returned.instance(self.plugin.adapt_model(model), nn.Module, "adapt_model returned")

    def bind(self, class_counts: Tensor) -> ClientLoss:
        with self.named_errors():
            loss = returned.instance(self.plugin.bind(class_counts), ClientLoss, "bind returned")
            check_class(loss)
            logits = class_counts.float().new_zeros((2, len(class_counts)))
            y = class_counts.new_zeros(2)
            for name in ("attack_logits", "kl_logits", "margin_logits"):
                method = getattr(loss, name)
                returned.like(method(logits), logits, f"{name} of its loss returned")
            returned.like(loss.cross_entropy(logits, y), logits[:, 0], "cross_entropy of its loss returned")
            if logits._version:  # torch counts what is written to it
                raise PluginError(
                    "its loss changes the logits that it is given in place; write logits + 1, not logits += 1."
                )
            return loss


class CheckedInnerAttack(PassedToPlugins[InnerAttack, InnerAttackEntry], InnerAttack):
    """An attack of training.

    The plugin's name is not put in front of errors that are raised inside ``craft`` and ``take_steps``: both call the
    method's loss, which may be what is wrong.
    """

    @property
    def has_own_steps(self) -> bool:
        return self.plugin.has_own_steps

    @property
    def looks_back(self) -> bool:
        return self.plugin.looks_back

    def begin_round(self, task: LocalTask) -> Any:
        with self.named_errors():
            return self.plugin.begin_round(task)

    def end_round(self, memory: Any) -> State:
        with self.named_errors():
            return returned.tensors(self.plugin.end_round(memory), "end_round's state holds")

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor | None:
        with self.named_errors():
            start = self.plugin.start(x_nat, threat, generator)
            if start is None:
                return None
            return returned.like(start, x_nat, "start returned")

    def draw(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor | None:
        with self.named_errors():
            drawn = self.plugin.draw(x_nat, threat, generator)
            if drawn is None:
                return None
            return returned.like(drawn, x_nat, "draw returned")

    def craft(self, task: InnerTask) -> Tensor:
        x_adv = self.plugin.craft(task)
        with self.named_errors():
            return returned.like(x_adv, task.x_nat, "craft returned")

    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor], memory: Any) -> Tensor:
        loss = self.plugin.take_steps(batch, step, memory)
        if self.has_own_steps:  # otherwise it is the method's
            with self.named_errors():
                returned.loss(loss, "take_steps returned")
        return loss

    def after_step(self, batch: TrainBatch, gradient: Tensor | None, memory: Any) -> None:
        self.plugin.after_step(batch, gradient, memory)

    def reach(self, threat: ThreatModel) -> ThreatModel:
        with self.named_errors():
            reach = returned.instance(self.plugin.reach(threat), ThreatModel, "reach returned")
            if reach.bounds != threat.bounds:
                raise PluginError(
                    f"reach returned a set with pixels in {list(reach.bounds)}; expected those of the budget, "
                    f"{list(threat.bounds)}. Take threat.scaled(factor)."
                )
            return reach


# --- aggregation, and attacks on it -----------------------------------------------------------------------------------


class CheckedAggregator(Checked[Aggregator, AggregatorEntry], Aggregator):
    """An aggregator; what it returns is checked before the server uses it."""

    def correction(self) -> LocalCorrection:
        with self.named_errors():
            correction = returned.instance(self.plugin.correction(), LocalCorrection, "correction returned")
            check_class(correction)
        return CheckedCorrection(correction, self.entry, self.who)

    def check_extras(self, extras: State, parameters: State, *, who: str) -> None:
        self.plugin.check_extras(extras, parameters, who=who)

    def combine(self, task: AggregationTask) -> Aggregate:
        with self.named_errors():
            aggregate = returned.instance(
                self.plugin.combine(task), Aggregate, "combine returned", "Return Aggregate(state=...)."
            )
            returned.tensors(aggregate.state, "its aggregate's state holds", on="cpu")
            returned.tensors(aggregate.server_state, "its aggregate's server_state holds", on="cpu")
            returned.tensors(aggregate.broadcast, "its aggregate's broadcast holds", on="cpu")
            weights = returned.shares(aggregate.weights, task.updates, "its aggregate's weights hold")
            metrics = returned.metrics(aggregate.metrics, self.entry.metrics, "its aggregate has the metric")
            return dataclasses.replace(aggregate, metrics=metrics, weights=weights)


class CheckedCorrection(PassedToPlugins[LocalCorrection, AggregatorEntry], LocalCorrection):
    """An aggregator's part of local training."""

    def begin(self, task: LocalTask) -> ActiveCorrection:
        with self.named_errors():
            active = returned.instance(self.plugin.begin(task), ActiveCorrection, "begin returned")
            check_class(active)
            return active


class CheckedAttacker(Checked[Attacker, AttackerEntry], Attacker):
    """A client that attacks the federation; what it returns is as well-formed as what honest clients have."""

    def poisoned(self, data: ImageData, num_classes: int) -> ImageData:
        with self.named_errors():
            poisoned = self.plugin.poisoned(data, num_classes)
            return returned.examples(poisoned, data, num_classes, "poisoned returned")

    def sent(self, task: AttackTask) -> State:
        with self.named_errors():
            return returned.tensors(self.plugin.sent(task), "sent returned", on="cpu")


# --- evaluation -------------------------------------------------------------------------------------------------------


class CheckedEvaluator(Checked[Evaluator, EvaluatorEntry], Evaluator):
    """An evaluator; its results are checked before they are recorded."""

    def __init__(self, plugin: Evaluator, entry: EvaluatorEntry, who: str) -> None:
        super().__init__(plugin, entry, who)
        vars(plugin)["uses_clients"] = entry.uses_clients

    # These are read where they are, since ``set_up`` may change them.

    @property
    def gives_examples(self) -> bool:  # type: ignore[override]  # the plugin's is an attribute
        return self.plugin.gives_examples

    @property
    def has_budget(self) -> bool:  # type: ignore[override]
        return self.plugin.has_budget

    @property
    def uses_clients(self) -> bool:  # type: ignore[override]
        return self.plugin.uses_clients

    def set_up(self, task: SetUpTask) -> None:
        with self.named_errors():
            self.plugin.set_up(task)

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        with self.named_errors():
            result = returned.instance(self.plugin.evaluate(task, label), EvaluationResult, "evaluate returned")
            _check_accuracies(result, task.num_classes)
            _check_budget(result.settings)
            metrics = returned.metrics(result.metrics, self.entry.metrics, "its result has the metric")
            result = dataclasses.replace(result, metrics=metrics)
            evaluation_as_json(result)  # refuses what files cannot hold
            return result


def _check_accuracies(result: EvaluationResult, num_classes: int) -> None:
    for name in ("accuracy", "accuracy_release"):
        accuracy = getattr(result, name)
        if result.not_run:
            if accuracy is not None:
                raise PluginError(
                    f"its result says that it did not run ({one_line(result.not_run)}), and has {name} "
                    f"{one_line(accuracy)}. Return EvaluationResult.without_number(...), or leave not_run empty."
                )
        elif not _is_fraction(accuracy):
            raise PluginError(
                f"its result has {name} {one_line(accuracy)}; expected a fraction in [0, 1]. An attack that cannot run "
                "returns EvaluationResult.without_number(...)."
            )
    if result.guess is not None and not _is_fraction(result.guess):
        raise PluginError(f"its result has guess {one_line(result.guess)}; expected a fraction in [0, 1], or None.")
    for name in ("per_class", "per_class_release"):
        count = len(getattr(result, name))
        if count not in (0, num_classes):
            raise PluginError(f"its result has {count} numbers in {name}; expected {num_classes}, one a class.")


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def _check_budget(settings: Mapping[str, Any]) -> None:
    """Refuse an eps that later steps could not read: findings sort results by it, and pages draw it."""
    if "eps" not in settings:
        return
    try:
        parse_number(settings["eps"])
    except ValueError as error:
        raise PluginError(f"its result's settings.eps: {error}.") from None
    norm = settings.get("norm")
    if not isinstance(norm, str):
        raise PluginError(
            f"its result's settings have eps {settings['eps']} and the norm {norm!r}; expected the norm's name, such "
            "as linf. Where it is no radius of a ball, call it something else than eps."
        )
