"""Who is informed of a run's life: installed plugins with such hooks, and the loggers that the recipe switches on.

None of them can stop a run: one that raises is reported to the user once and is off for the rest of this run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pluggy

from calfat_plugin import hookspecs
from calfat_plugin.experiment import Experiment
from calfat_plugin.results import RoundRecord, RunInfo, RunResult

log = logging.getLogger(__name__)

Warn = Callable[[str], None]


class Listeners:
    """Calls the hooks of a run's life, each plugin apart from the others.

    Args:
        plugins: (name for messages, plugin object).
        warn: shows the user a finding that does not stop the run.
    """

    def __init__(self, plugins: Iterable[tuple[str, Any]], warn: Warn) -> None:
        self._warn = warn
        self._managers: dict[str, pluggy.PluginManager] = {}
        for name, plugin in plugins:
            with self._reporting(name, "is not used"):
                self._add(name, plugin)

    @classmethod
    def of(cls, experiment: Experiment, warn: Warn) -> Listeners:
        """Everyone who listens to a run of ``experiment``; a logger that cannot be built is reported and left out."""
        registry = experiment.registry
        listeners = cls(((f"plugin {plugin} ({provider})", plugin) for provider, plugin in registry.listeners()), warn)
        for pick in experiment.loggers:
            name = f"logger '{pick.label}'"
            with listeners._reporting(name, "is not used"):
                listeners._add(name, pick.entry.load()(pick.options))
        return listeners

    def run_started(self, run: RunInfo) -> None:
        """Before the first round."""
        self._call("calfat_run_started", run=run)

    def round_finished(self, run: RunInfo, record: RoundRecord) -> None:
        """After each round."""
        self._call("calfat_round_finished", run=run, record=record)

    def run_finished(self, run: RunInfo, result: RunResult) -> None:
        """After the final evaluation."""
        self._call("calfat_run_finished", run=run, result=result)

    def run_stopped(self, run: RunInfo, error: BaseException) -> None:
        """Instead of ``run_finished``, when the run ends early."""
        self._call("calfat_run_stopped", run=run, error=error)

    @property
    def wants_rounds(self) -> bool:
        """Whether a plugin is called after each round."""
        return any(manager.hook.calfat_round_finished.get_hookimpls() for manager in self._managers.values())

    def _add(self, name: str, plugin: Any) -> None:
        # A manager of its own for each: pluggy then checks its hooks, fills in the arguments that they take, and what
        # one raises does not keep the next from being called.
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(plugin)
        manager.check_pending()
        self._managers[name] = manager

    def _call(self, hook: str, **arguments: Any) -> None:
        for name, manager in list(self._managers.items()):
            with self._reporting(name, f"failed in {hook} and is off for this run"):
                getattr(manager.hook, hook)(**arguments)

    @contextmanager
    def _reporting(self, name: str, verdict: str) -> Iterator[None]:
        """Report what a third party's code raises, which may be anything, and call that plugin no more."""
        try:
            yield
        except Exception as error:
            log.exception("%s %s", name, verdict)
            self._warn(f"{name} {verdict}: {type(error).__name__}: {error}")
            self._managers.pop(name, None)
