"""How plugins are called to build something, and how what they give is checked and errors are named."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from calfat_plugin import returned
from calfat_plugin.errors import OptionError, PluginError
from calfat_plugin.interfaces import (
    ActiveCorrection,
    ClientLoss,
    EvaluationTask,
    Evaluator,
    InnerAttack,
    InnerTask,
    LocalCorrection,
    LossModifier,
    MiniBatch,
    SetUpTask,
)
from calfat_plugin.results import EvaluationResult, State, evaluation_as_json
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Generator, Tensor, nn

    from calfat_plugin.entries import Entry, EvaluatorEntry, InnerAttackEntry
    from calfat_plugin.interfaces import LocalTask

T = TypeVar("T")


def build_plugin(
    build: Callable[..., Any], wanted: Callable[..., T], /, *arguments: Any, names: str = "options", **options: Any
) -> T:
    """What ``build`` makes of its arguments; ``names``: what the contract calls them."""
    call = ", ".join([names, *options])
    try:
        inspect.signature(build).bind(*arguments, **options)
    except TypeError as error:
        raise PluginError(
            f"its build, {getattr(build, '__name__', build)}{inspect.signature(build)}, cannot be called as "
            f"build({call}): {error}."
        ) from None
    except ValueError:  # written in C: it has no signature
        pass
    try:
        made = build(*arguments, **options)
    except TypeError as error:
        if "abstract class" not in str(error):
            raise
        raise PluginError(f"its build makes no object: {error}.") from None  # a factory's class: see returned.overrides
    return returned.instance(made, wanted, f"build({call}) returned")


def checked_split(
    shards: Any, num_examples: int, num_clients: int, *, may_leave_out: bool
) -> list[npt.NDArray[np.int64]]:
    """The clients' positions in the training set, if what a partition gave is a partition of it."""
    if not isinstance(shards, Iterable) or isinstance(shards, Mapping):
        raise PluginError(f"it returned {returned.described(shards)}; expected a list of one index array a client.")
    wanted = "expected (examples,) positions in the training set, whole numbers"
    arrays = []
    for shard in shards:
        try:
            arrays.append(np.asarray(shard))
        except (TypeError, ValueError):  # a tensor on a GPU, lists of different lengths
            raise PluginError(
                f"it gave client {len(arrays)} {returned.described(shard)} that is no array; {wanted}."
            ) from None
    if len(arrays) != num_clients:
        raise PluginError(f"it returned {len(arrays)} index arrays for {num_clients} clients; expected one a client.")
    for client, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PluginError(
                f"it gave client {client} an array of shape {array.shape} and type {array.dtype}; {wanted}."
            )
        if array.size and not (array.min() >= 0 and array.max() < num_examples):
            raise PluginError(
                f"it gave client {client} positions from {array.min()} to {array.max()}; expected 0 to "
                f"{num_examples - 1}, as there are {num_examples} training examples."
            )
    indices = [array.astype(np.int64) for array in arrays]
    counts = np.bincount(np.concatenate(indices), minlength=num_examples)
    twice, unused = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)
    if twice.size:
        holders = [client for client, array in enumerate(indices) for _ in range(int((array == twice[0]).sum()))]
        raise PluginError(
            f"it gave {twice.size} of {num_examples} training examples out more than once, such as example {twice[0]} "
            f"to clients {' and '.join(map(str, holders[:2]))}; expected each with one client."
        )
    if unused.size and not may_leave_out:
        raise PluginError(
            f"it gave {unused.size} of {num_examples} training examples to no client, such as example {unused[0]}. If "
            "that is meant, give its PartitionEntry may_leave_out=True."
        )
    return indices


class _Checked:
    """What a plugin built: errors in it are named after the plugin, and not after those that it works with."""

    def __init__(self, made: Any, entry: Entry, who: str) -> None:
        self._made, self._entry, self._who = made, entry, who

    def _named(self) -> AbstractContextManager[None]:
        return returned.attribute_errors_to(self._who, self._entry.config)


class CheckedEvaluator(_Checked, Evaluator):
    """A plugin's evaluator, whose result is checked."""

    def __init__(self, made: Evaluator, entry: EvaluatorEntry, who: str) -> None:
        super().__init__(made, entry, who)
        self.evaluator = made
        self.gives_examples, self.takes_targets = made.gives_examples, made.takes_targets
        self.has_budget: bool = getattr(made, "has_budget", True)
        self.uses_clients = entry.uses_clients

    def set_up(self, task: SetUpTask) -> None:
        """Set the evaluator up."""
        with self._named():
            if self.uses_clients and not task.has_clients:
                raise OptionError(
                    f"'{self._entry.name}' measures the clients of a round, which are there only while a federation "
                    "trains: a finished run keeps its global model, and a model alone has none. Name it in a recipe, "
                    "under calfat.evaluators or calfat.monitor.evaluators."
                )
            self.evaluator.set_up(task)

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """The evaluator's result."""
        with self._named():
            result = returned.instance(self.evaluator.evaluate(task, label), EvaluationResult, "evaluate returned")
            metrics = returned.metrics(result.metrics, self._entry.metrics, "its result has the metric")
            result = dataclasses.replace(result, metrics=metrics)
            evaluation_as_json(result)
        return result


class CheckedModifier(_Checked, LossModifier):
    """A plugin's loss modifier, which trainers compose with."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from torch import nn

        with self._named():
            return returned.instance(self._made.adapt_model(model), nn.Module, "adapt_model returned")

    def bind(self, class_counts: Tensor) -> ClientLoss:
        with self._named():
            loss = returned.instance(self._made.bind(class_counts), ClientLoss, "bind returned")
            returned.overrides(loss)
            # On two rows of logits: shapes, and whether they are left as they are.
            logits, y = class_counts.float().new_zeros((2, len(class_counts))), class_counts.new_zeros(2)
            for name in ("attack_logits", "kl_logits", "margin_logits"):
                returned.like(getattr(loss, name)(logits), logits, f"{name} of its loss returned")
            returned.like(loss.cross_entropy(logits, y), logits[:, 0], "cross_entropy of its loss returned")
            if logits._version:
                text = "its loss changes the logits that it is given in place; write logits + 1, not logits += 1."
                raise PluginError(text)
            return loss


class CheckedCorrection(_Checked, LocalCorrection):
    """An aggregator's part of local training, beside the trainer's."""

    def begin(self, task: LocalTask) -> ActiveCorrection:
        with self._named():
            active = returned.instance(self._made.begin(task), ActiveCorrection, "begin returned")
            returned.overrides(active)
            return active


class CheckedInnerAttack(_Checked, InnerAttack):
    """A plugin's inner attack, which trainers call. An error in ``craft`` or ``take_steps`` may be of their loss."""

    def __init__(self, made: InnerAttack, entry: InnerAttackEntry, who: str) -> None:
        _Checked.__init__(self, made, entry, who)
        InnerAttack.__init__(self, made.options)
        self.who = "" if type(made) is InnerAttack else who  # PGD projects: others made what lies outside

    @property
    def has_own_steps(self) -> bool:
        own: bool = self._made.has_own_steps
        return own

    def begin_round(self, task: LocalTask) -> Any:
        with self._named():
            return self._made.begin_round(task)

    def end_round(self, memory: Any) -> State:
        with self._named():
            return returned.tensors(self._made.end_round(memory), "end_round's state holds")

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor | None:
        with self._named():
            found = self._made.start(x_nat, threat, generator)
            return None if found is None else returned.like(found, x_nat, "start returned")

    def craft(self, task: InnerTask) -> Tensor:
        x_adv = self._made.craft(task)
        with self._named():
            return returned.like(x_adv, task.x_nat, "craft returned")

    def take_steps(self, batch: MiniBatch, step: Callable[[Any], Tensor], memory: Any) -> Tensor:
        if not self.has_own_steps:
            return step(batch)
        value = self._made.take_steps(batch, step, memory)
        with self._named():
            return returned.loss(value, "take_steps returned")

    def reach(self, threat: ThreatModel) -> ThreatModel:
        with self._named():
            found = returned.instance(self._made.reach(threat), ThreatModel, "reach returned")
            if found.bounds != threat.bounds:
                raise PluginError(
                    f"reach returned a set with pixels in {list(found.bounds)}; expected those of the budget, "
                    f"{list(threat.bounds)}. Take threat.scaled(factor)."
                )
            return found
