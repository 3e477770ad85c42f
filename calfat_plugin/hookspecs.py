"""The hooks: everything a third party can add to ``calfat_plugin``.

Register a module or object that implements some of them under the entry-point group ``calfat_plugin``:

    [options.entry_points]
    calfat_plugin =
        my-fat = my_fat.hooks

Hooks that offer something are called once, while the registry is built. Hooks of a run's life are called in the
process that holds the global model, in the order ``run_started``, ``round_finished`` (once a round), then
``run_finished`` or ``run_stopped``. If a plugin raises an exception there, it is reported once, and the plugin is not
called again for that run; the run itself continues. docs/hooks.md has an example of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

from calfat_plugin.errors import PluginError, did_you_mean, listed

if TYPE_CHECKING:
    from calfat_plugin.entries import (
        AggregatorEntry,
        AttackerEntry,
        DatasetEntry,
        EvaluatorEntry,
        InnerAttackEntry,
        LoggerEntry,
        ModelEntry,
        ModifierEntry,
        PartitionEntry,
        TrainerEntry,
    )
    from calfat_plugin.results import RoundRecord, RunInfo, RunResult

PROJECT = "calfat_plugin"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as the implementation of the hook of that name; it may leave out arguments that it does not need."""


# --- what can be offered ----------------------------------------------------------------------------------------------


@hookspec
def calfat_local_trainers() -> Iterable[TrainerEntry]:
    """Offer local trainers: yield one ``TrainerEntry`` per method."""


@hookspec
def calfat_loss_modifiers() -> Iterable[ModifierEntry]:
    """Offer loss modifiers: yield one ``ModifierEntry`` per way to change the losses of other methods."""


@hookspec
def calfat_inner_attacks() -> Iterable[InnerAttackEntry]:
    """Offer inner attacks: yield one ``InnerAttackEntry`` per way to find the images that methods train on."""


@hookspec
def calfat_aggregators() -> Iterable[AggregatorEntry]:
    """Offer aggregators: yield one ``AggregatorEntry`` per way to combine client updates."""


@hookspec
def calfat_evaluators() -> Iterable[EvaluatorEntry]:
    """Offer evaluators: yield one ``EvaluatorEntry`` per attack or measurement of the global model."""


@hookspec
def calfat_datasets() -> Iterable[DatasetEntry]:
    """Offer data sets: yield one ``DatasetEntry`` per name that ``data_args.dataset`` may take."""


@hookspec
def calfat_models() -> Iterable[ModelEntry]:
    """Offer models: yield one ``ModelEntry`` per name that ``model_args.model`` may take."""


@hookspec
def calfat_partitions() -> Iterable[PartitionEntry]:
    """Offer partitions: yield one ``PartitionEntry`` per name that ``data_args.partition_method`` may take."""


@hookspec
def calfat_attackers() -> Iterable[AttackerEntry]:
    """Offer attackers: yield one ``AttackerEntry`` per kind of client that sends what harms the others."""


@hookspec
def calfat_loggers() -> Iterable[LoggerEntry]:
    """Offer loggers: yield one ``LoggerEntry`` per name that ``calfat.loggers`` may list.

    What ``build(options)`` returns implements hooks of a run's life, as a plugin does; it is called only in runs whose
    recipe names the logger.
    """


# --- a run's life -----------------------------------------------------------------------------------------------------

LIFE = ("calfat_run_started", "calfat_round_finished", "calfat_run_finished", "calfat_run_stopped")


@hookspec
def calfat_run_started(run: RunInfo) -> None:
    """Called once before the first round (and once more when a run is resumed).

    Args:
        run: the run: name, directory, recipe, rounds.
    """


@hookspec
def calfat_round_finished(run: RunInfo, record: RoundRecord) -> None:
    """Called after each round, when its row and checkpoint are on disk.

    Args:
        run: the run: name, directory, recipe, rounds.
        record: the round.
    """


@hookspec
def calfat_run_finished(run: RunInfo, result: RunResult) -> None:
    """Called once, after the final evaluation was written.

    Args:
        run: the run: name, directory, recipe, rounds.
        result: the final evaluation.
    """


@hookspec
def calfat_run_stopped(run: RunInfo, error: BaseException) -> None:
    """Called instead of ``calfat_run_finished`` when an error or Ctrl-C (``KeyboardInterrupt``) ends a run early.

    Args:
        run: the run: name, directory, recipe, rounds.
        error: what ended it.
    """


def check_hooks(manager: pluggy.PluginManager, plugin: Any, *, needs_hooks: bool = True) -> None:
    """Refuse a registered plugin with a function that pluggy would never call: misspelt, or without ``@hookimpl``."""
    hooks = [name for name in globals() if name.startswith("calfat_")]
    unmarked = []
    for name in sorted(hooks):
        function = getattr(plugin, name, None)
        if callable(function) and not hasattr(function, f"{PROJECT}_impl"):  # set by @hookimpl
            unmarked.append(name)
    callers = manager.get_hookcallers(plugin) or []
    if not callers and needs_hooks:
        if unmarked:
            raise PluginError(f"it implements no hook; is @hookimpl missing above '{unmarked[0]}'?")
        raise PluginError(f"it implements no hook; is @hookimpl missing? Hooks: {listed(hooks)}.")
    for caller in callers:
        if caller.name not in hooks:
            raise PluginError(f"there is no hook '{caller.name}'.{did_you_mean(caller.name, hooks)}")
    if unmarked:
        raise PluginError(f"nothing calls its '{unmarked[0]}'; is @hookimpl missing above it?")
