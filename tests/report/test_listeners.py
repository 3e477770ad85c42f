"""Who hears of a run, and that none of them can stop it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.entries import LoggerEntry
from calfat_plugin.experiment import Experiment
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.results import RunInfo, RunResult
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.session import Listeners
from tests.recipes import assembled
from tests.report.made import RECIPE, record

RUN = RunInfo("made", Path("runs/made/0-x"), {}, num_rounds=2, start_round=1)
RESULT = RunResult((), 2, 1.0)


class Recorder:
    """Hears everything, and notes it."""

    def __init__(self, options: Any = None) -> None:
        self.heard: list[str] = []

    @hookimpl
    def calfat_run_started(self, run: RunInfo) -> None:
        self.heard.append(f"started {run.name}")

    @hookimpl
    def calfat_round_finished(self, record: Any) -> None:  # fewer arguments than the hook offers
        self.heard.append(f"round {record.round}")

    @hookimpl
    def calfat_run_finished(self, run: RunInfo, result: RunResult) -> None:
        self.heard.append(f"finished {run.name} after {result.num_rounds}")

    @hookimpl
    def calfat_run_stopped(self, error: BaseException) -> None:
        self.heard.append(f"stopped by {type(error).__name__}")


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def live(listeners: Listeners) -> None:
    """A run of two rounds."""
    listeners.run_started(RUN)
    for number in (1, 2):
        listeners.round_finished(RUN, record(number, {}))
    listeners.run_finished(RUN, RESULT)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("the disk is full"), "OSError: the disk is full"),
        (SystemExit("no licence"), "SystemExit: no licence"),
        (WithoutTextError(), "WithoutTextError: it has no text, for its __str__ raises"),
        (RuntimeError("x" * 700_000), f"RuntimeError: {'x' * 296} ..."),
        (ValueError(), "ValueError"),
    ],
)
def test_a_plugin_that_raises_is_reported_once_and_the_others_continue(error: BaseException, said: str) -> None:
    class Breaks(Recorder):
        @hookimpl
        def calfat_round_finished(self, record: Any) -> None:
            self.heard.append(f"round {record.round}")
            raise error

    broken, after, warnings = Breaks(), Recorder(), list[str]()
    live(Listeners([("logger 'x'", broken), ("b", after)], warnings.append))
    assert broken.heard == ["started made", "round 1"]
    assert after.heard == ["started made", "round 1", "round 2", "finished made after 2"]
    assert warnings == [f"logger 'x' failed in calfat_round_finished and is off for this run: {said}"]


def test_an_early_end_is_heard_instead_of_the_end() -> None:
    plugin = Recorder()
    listeners = Listeners([("a", plugin)], pytest.fail)
    listeners.run_started(RUN)
    listeners.run_stopped(RUN, KeyboardInterrupt())
    assert plugin.heard == ["started made", "stopped by KeyboardInterrupt"]


def test_ctrl_c_inside_a_plugin_is_still_ctrl_c() -> None:
    class Interrupted:
        @hookimpl
        def calfat_run_started(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Listeners([("a", Interrupted())], pytest.fail).run_started(RUN)


# --- loggers of a recipe ----------------------------------------------------------------------------------------------


class Offers:
    """An installed plugin that offers a logger, and listens itself, too."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build, self.heard = build, list[str]()

    @hookimpl
    def calfat_loggers(self) -> list[LoggerEntry]:
        return [LoggerEntry("chat", build=self.build)]

    @hookimpl
    def calfat_run_started(self) -> None:
        self.heard.append("started")


def experiment(plugin: Offers, *overrides: str) -> Experiment:
    return assembled(RECIPE, *overrides, plugins=(plugin,))


def test_a_logger_hears_only_of_runs_that_name_it_and_a_plugin_of_all() -> None:
    built: list[Recorder] = []

    def build(options: Any) -> Recorder:
        built.append(Recorder())
        return built[-1]

    plugin = Offers(build)
    Listeners.of(experiment(plugin), pytest.fail).run_started(RUN)
    assert (built, plugin.heard) == ([], ["started"])
    Listeners.of(experiment(plugin, "calfat.loggers=[chat]"), pytest.fail).run_started(RUN)
    assert [logger.heard for logger in built] == [["started made"]]
    assert plugin.heard == ["started", "started"]


def test_a_plugin_is_named_as_where_it_is_listed() -> None:
    class Fails:
        @hookimpl
        def calfat_run_started(self) -> None:
            raise OSError("the disk is full")

    warnings: list[str] = []
    Listeners.of(assembled(RECIPE, plugins=(Fails(),)), warnings.append).run_started(RUN)
    failed = "failed in calfat_run_started and is off for this run: OSError: the disk is full"
    assert warnings == [f"plugin Fails (passed in Fails) {failed}"]


class Unmarked:
    """It lacks ``@hookimpl``."""

    def calfat_run_finished(self) -> None: ...


def breaks(options: Any) -> Recorder:
    raise RuntimeError("no server")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (breaks, "RuntimeError: no server"),
        (lambda options: Unmarked(), "PluginError: it implements no hook; is @hookimpl missing above"),
    ],
)
def test_a_logger_that_cannot_be_used_is_left_out_with_a_warning(build: Callable[[Any], Any], reason: str) -> None:
    warnings: list[str] = []
    live(Listeners.of(experiment(Offers(build), "calfat.loggers=[chat]"), warnings.append))
    (warning,) = warnings
    assert warning.startswith(f"logger 'chat' is not used: {reason}")


# --- what loggers leave behind ----------------------------------------------------------------------------------------


def test_a_logger_does_not_keep_the_directory_of_a_run_that_never_began(tmp_path: Path) -> None:
    made = RunDirectory.create(experiment(Offers(Recorder)), tmp_path / "runs" / "new")
    (made.path / "tensorboard").mkdir()
    (made.path / "tensorboard" / "events").write_text("")
    made.discard()
    assert list(tmp_path.iterdir()) == []
