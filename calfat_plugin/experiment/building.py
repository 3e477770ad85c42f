"""Calls of plugins that build something: checks of what they give, and errors with their names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from calfat_plugin import returned
from calfat_plugin.errors import PluginError, one_line
from calfat_plugin.exact import parse_number
from calfat_plugin.interfaces import (
    ActiveCorrection,
    Aggregate,
    AggregationTask,
    Aggregator,
    Attacker,
    ClientLoss,
    EvaluationTask,
    Evaluator,
    InnerAttack,
    LocalCorrection,
    LocalTrainer,
    LossModifier,
)
from calfat_plugin.results import ALIGNMENT, PASSES, EvaluationResult, LocalUpdate, evaluation_as_json
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from calfat_plugin.entries import AggregatorEntry, EvaluatorEntry, InnerAttackEntry, ModifierEntry, TrainerEntry
    from calfat_plugin.interfaces import LocalTask

T = TypeVar("T")


def build_plugin(
    build: Callable[..., Any], wanted: Callable[..., T], /, *arguments: Any, names: str = "options", **options: Any
) -> T:
    """What ``build`` makes of its arguments."""
    call = ", ".join([names, *options])
    try:
        inspect.signature(build).bind(*arguments, **options)
    except TypeError as error:
        hint = f" Give the class __init__(self, {call})." if inspect.isclass(build) else ""
        raise PluginError(
            f"its build, {getattr(build, '__name__', build)}{inspect.signature(build)}, cannot be called as "
            f"build({call}): {error}.{hint}"
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
    """The clients' positions in the training set, if they are a partition of it."""
    import numpy as np

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


# --- what plugins return ----------------------------------------------------------------------------------------------


def checked(plugin: T, entry: Any, who: str) -> T:
    """The same plugin; errors of its methods begin with its name, and what they return is checked.

    Which methods these are, and what they may return, is the table ``_RETURNS``; an interface's own defaults are right.
    The plugin becomes an instance of a subclass, so that a copy of it is checked, too.
    """
    cls = type(plugin)
    cls = getattr(cls, "_before_checks", cls)  # a build may give the same object again
    kind = next((kind for kind in _RETURNS if issubclass(cls, kind)), object)
    checks = {
        name: check for name, check in _RETURNS.get(kind, {}).items() if getattr(cls, name) is not getattr(kind, name)
    }
    if not checks:
        return plugin

    def checking(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        # An error in an inner attack's steps may be one of the method's loss, which they call.
        named = name not in ("craft", "take_steps")

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            with returned.attribute_errors_to(who, entry.config) if named else nullcontext():
                value = getattr(super(made, self), name)(*arguments, **keywords)
            with returned.attribute_errors_to(who, entry.config):
                value = check(entry, value, *arguments, **keywords)
            return checked(value, entry, who) if isinstance(value, LocalCorrection | LocalTrainer) else value

        return call

    body = {name: checking(name, check) for name, check in checks.items()}
    named_as = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(cls)
    made = metaclass(cls.__name__, (cls,), {**named_as, **body, "_before_checks": cls})
    object.__setattr__(plugin, "__class__", made)
    return plugin


def _evaluation(entry: EvaluatorEntry, result: Any, task: EvaluationTask, label: str) -> EvaluationResult:
    found = returned.instance(result, EvaluationResult, "evaluate returned")
    for name in ("accuracy", "accuracy_release"):
        value = getattr(found, name)
        if found.not_run:
            if value is not None:
                raise PluginError(
                    f"its result says that it did not run ({one_line(found.not_run)}), and has {name} "
                    f"{one_line(value)}. Return EvaluationResult.without_number(...), or leave not_run empty."
                )
        elif not (isinstance(value, float) and 0 <= value <= 1):
            raise PluginError(
                f"its result has {name} {one_line(value)}; expected a fraction in [0, 1]. An attack that cannot run "
                "returns EvaluationResult.without_number(...)."
            )
    if found.guess is not None and not (isinstance(found.guess, float) and 0 <= found.guess <= 1):
        raise PluginError(f"its result has guess {one_line(found.guess)}; expected a fraction in [0, 1], or None.")
    for name in ("per_class", "per_class_release"):
        if (number := len(getattr(found, name))) not in (0, task.num_classes):
            raise PluginError(f"its result has {number} numbers in {name}; expected {task.num_classes}, one a class.")
    if "eps" in found.settings:  # by which findings sort it, and pages draw it, after hours of work
        eps, norm = found.settings["eps"], found.settings.get("norm")
        try:
            parse_number(eps)
        except ValueError as error:
            raise PluginError(f"its result's settings.eps: {error}.") from None
        if not isinstance(norm, str):
            raise PluginError(
                f"its result's settings have eps {eps} and the norm {norm!r}; expected the norm's name, such as linf. "
                "Where it is no radius of a ball, call it something else than eps."
            )
    metrics = returned.metrics(found.metrics, entry.metrics, "its result has the metric")
    found = dataclasses.replace(found, metrics=metrics)
    evaluation_as_json(found)
    return found


def _adapted(entry: Any, model: Any, given: nn.Module) -> nn.Module:
    from torch import nn

    return returned.instance(model, nn.Module, "adapt_model returned")


def _bound(entry: ModifierEntry, bound: Any, class_counts: Tensor) -> ClientLoss:
    """Refuse losses that take or give other shapes than two rows of logits have, or change these in place."""
    loss = returned.instance(bound, ClientLoss, "bind returned")
    returned.overrides(loss)
    logits, y = class_counts.float().new_zeros((2, len(class_counts))), class_counts.new_zeros(2)
    for name in ("attack_logits", "kl_logits", "margin_logits"):
        returned.like(getattr(loss, name)(logits), logits, f"{name} of its loss returned")
    returned.like(loss.cross_entropy(logits, y), logits[:, 0], "cross_entropy of its loss returned")
    if logits._version:
        raise PluginError("its loss changes the logits that it is given in place; write logits + 1, not logits += 1.")
    return loss


def _update(entry: TrainerEntry, fitted: Any, task: LocalTask) -> LocalUpdate:
    found = returned.instance(fitted, LocalUpdate, "fit returned")
    for name in ("state", "extras", "client_state"):
        returned.tensors(getattr(found, name), f"its update's {name} holds", on="cpu")
    declared = {**entry.metrics, "loss": "mean training loss"}
    metrics = returned.metrics(found.metrics, declared, "its update has the metric", also=(ALIGNMENT, PASSES))
    return dataclasses.replace(found, metrics=metrics)


def _personal_names(entry: TrainerEntry, found: Any, model: nn.Module) -> frozenset[str]:
    from calfat_plugin.maths.tied import further_names

    names = returned.names(found, model.state_dict(), "personal_names returned")
    further = further_names(model)
    return frozenset(further.get(name, name) for name in names)


def _evaluated_personal(
    entry: TrainerEntry, found: Any, updates: Mapping[int, LocalUpdate], names: Sequence[str]
) -> dict[str, Tensor]:
    what, sent = "evaluated_personal returned", next(iter(updates.values())).state
    known = returned.mapping(found, what)
    return {name: returned.like(known.get(name), sent[name], f"{what}, as '{name}',") for name in names}


def _aggregate(entry: AggregatorEntry, combined: Any, task: AggregationTask) -> Aggregate:
    found = returned.instance(combined, Aggregate, "combine returned", "Return Aggregate(state=...).")
    for name in ("state", "server_state", "broadcast"):
        returned.tensors(getattr(found, name), f"its aggregate's {name} holds", on="cpu")
    weights = returned.shares(found.weights, task.updates, "its aggregate's weights hold")
    metrics = returned.metrics(found.metrics, entry.metrics, "its aggregate has the metric")
    return dataclasses.replace(found, metrics=metrics, weights=weights)


def _made(wanted: type[T], what: str) -> Callable[..., T]:
    """The check of what must be an instance of a class that misspells nothing."""

    def check(entry: AggregatorEntry, value: Any, *given: Any) -> T:
        found = returned.instance(value, wanted, what)
        returned.overrides(found)
        return found

    return check


def _reach(entry: InnerAttackEntry, reached: Any, threat: ThreatModel) -> ThreatModel:
    found = returned.instance(reached, ThreatModel, "reach returned")
    if found.bounds != threat.bounds:
        raise PluginError(
            f"reach returned a set with pixels in {list(found.bounds)}; expected those of the budget, "
            f"{list(threat.bounds)}. Take threat.scaled(factor)."
        )
    return found


#: What methods of plugins may return: a check is given the entry, the value, and the arguments of the call.
_RETURNS: dict[type, dict[str, Callable[..., Any]]] = {
    Evaluator: {"set_up": lambda entry, found, task: found, "evaluate": _evaluation},
    LossModifier: {"adapt_model": _adapted, "bind": _bound},
    LocalTrainer: {
        "fit": _update,
        "among": lambda entry, trainer, others: returned.instance(trainer, LocalTrainer, "among returned"),
        "personal_names": _personal_names,
        "evaluated_personal": _evaluated_personal,
        "broadcast": lambda entry, extras, updates: returned.tensors(extras, "broadcast returned", on="cpu"),
    },
    Attacker: {
        "poisoned": lambda entry, found, data, num_classes: returned.examples(
            found, data, num_classes, "poisoned returned"
        ),
        "sent": lambda entry, state, task: returned.tensors(state, "sent returned", on="cpu"),
    },
    Aggregator: {"correction": _made(LocalCorrection, "correction returned"), "combine": _aggregate},
    LocalCorrection: {"begin": _made(ActiveCorrection, "begin returned")},
    InnerAttack: {
        "begin_round": lambda entry, memory, task: memory,
        "end_round": lambda entry, state, memory: returned.tensors(state, "end_round's state holds"),
        "start": lambda entry, found, x_nat, threat, generator: (
            None if found is None else returned.like(found, x_nat, "start returned")
        ),
        "draw": lambda entry, found, x_nat, threat, generator: (
            None if found is None else returned.like(found, x_nat, "draw returned")
        ),
        "craft": lambda entry, x_adv, task: returned.like(x_adv, task.x_nat, "craft returned"),
        "take_steps": lambda entry, value, batch, step, memory: returned.loss(value, "take_steps returned"),
        "reach": _reach,
    },
}
