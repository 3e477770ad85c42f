"""What every logger must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calfat_plugin import hookspecs
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult, RoundRecord, RunInfo, RunResult
from calfat_plugin.runs.session import Listeners
from calfat_plugin.testing.tiny import NUM_CLASSES, require, tiny_experiment

_ROUNDS = 2


def check_logger(name: str, folder: Path, *, registry: Registry | None = None, **options: Any) -> Path:
    """Hold a logger to its contract: it hears of a run that finishes and of one that is stopped, and never fails.

    Args:
        name: as recipes name it.
        folder: for the run directories.
        registry: where it is; None: among the built-ins and what is installed.
        options: instead of its defaults.

    Returns:
        The directory of the finished run, for tests of what was written.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    experiment = tiny_experiment(registry, loggers=[{"name": name, **options}])
    built = experiment.loggers[0].entry.load()(experiment.loggers[0].options)
    heard = [hook for hook in hookspecs.LIFE if hasattr(built, hook)]
    require(bool(heard), f"{name}: it has none of the hooks {', '.join(hookspecs.LIFE)}.")
    recipe = experiment.as_run()
    for how in ("finished", "stopped"):
        run = RunInfo("tiny", folder / how, recipe, _ROUNDS, start_round=1, class_counts=((3, 2, 1, 0),) * 3)
        run.directory.mkdir(parents=True)
        _live(name, Listeners.of(experiment, _refuse), run, stopped=how == "stopped")
    return folder / "finished"


def _live(name: str, listeners: Listeners, run: RunInfo, *, stopped: bool) -> None:
    listeners.run_started(run)
    natural = _result("natural")
    for round in range(1, _ROUNDS + 1):
        listeners.round_finished(run, _record(round, natural))
    if stopped:
        listeners.run_stopped(run, KeyboardInterrupt())
    else:
        listeners.run_finished(run, RunResult((natural,), _ROUNDS, 2.0))


def _record(round: int, result: EvaluationResult) -> RoundRecord:
    return RoundRecord(
        round=round,
        clients=(0, 1),
        refused={2: "of a check"},
        losses={0: 0.5, 1: 0.7},
        update_norms={0: 0.1, 1: 0.2},
        heterogeneity=0.3,
        evaluations={result.label: result},
        seconds=1.0,
        bytes_down=10,
        bytes_up=20,
    )


def _result(label: str) -> EvaluationResult:
    shares = (0.5,) * (NUM_CLASSES - 1) + (None,)
    return EvaluationResult(label, 12, 0.5, 0.5, shares, shares, {}, "calfat_plugin.testing", 0.1)


def _refuse(warning: str) -> None:
    raise AssertionError(warning)
