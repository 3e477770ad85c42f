"""An installed plugin that ends its process, or makes it misbehave, at a chosen point of a run.

The point comes from the environment variable ``SABOTAGE``, as JSON: {"at": ..., "round": ..., "signal": ...}. Without
it the plugin does nothing, so that a run and its resume have the same recipe and the same plugins. With
``WITHOUT_REPORT`` set, runs leave out drawing their report, which takes longer than everything else in these tests.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calfat_plugin import report
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.progress import ShownProgress

TIMEOUT = 300.0  # seconds; longer than what is waited for takes on any machine


@hookimpl
def calfat_run_started(run: Any) -> None:
    """A hook, so that this is a plugin; not one after each round, which would wait for the disk."""


def _after(owner: Any, method: str, then: Callable[..., None]) -> None:
    """Call ``then`` with the same arguments whenever ``method`` was called."""
    original = getattr(owner, method)

    def both(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        then(*arguments, **keywords)
        return result

    setattr(owner, method, both)


def _before(owner: Any, method: str, first: Callable[..., None]) -> None:
    """Call ``first`` with the same arguments whenever ``method`` is about to be called."""
    original = getattr(owner, method)

    def both(*arguments: Any, **keywords: Any) -> Any:
        first(*arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, method, both)


class Saboteur:
    """Knows the round and strikes once."""

    def __init__(self, at: str, round: int, signal: str) -> None:
        self.round, self.signal = round, signal
        self.now, self.clients, self.struck = 0, set[int](), False
        getattr(self, f"arm_{at}")()

    def strike(self) -> None:
        if self.struck:
            return
        self.struck = True
        os.kill(os.getpid(), getattr(signal, self.signal))
        time.sleep(0.05)  # a signal that Python handles comes between two instructions

    def arm_training(self) -> None:
        """While the third client of the round trains."""
        _after(ShownProgress, "round_started", self._note_round)
        _after(ShownProgress, "client_progress", self._during_training)

    def arm_row(self) -> None:
        """When the round's row is on disk and its checkpoint is not."""
        from calfat_plugin.rounds import RoundsFile

        _after(RoundsFile, "append", lambda file, record: record.round == self.round and self.strike())

    def arm_best(self) -> None:
        """When the round's best checkpoint is in its place and its ``last`` is not."""
        _after(os, "replace", lambda _, path: path.stem.startswith("best-") and self._strike_in_round_of(path))

    def arm_last(self) -> None:
        """When the round's ``last`` is in its place, and what it no longer names is still there, too."""
        _after(os, "replace", lambda _, path: path.stem == "last" and self._strike_in_round_of(path))

    def arm_written(self) -> None:
        """When the round's ``last`` is written and not in its place."""
        from calfat_plugin.runs import writer

        _after(
            writer,
            "write_checkpoint",
            lambda path, snapshot, notes: snapshot.round == self.round and path.stem == "last" and self.strike(),
        )

    def arm_behind(self) -> None:
        """While the third client of the round trains, and the round before it is not on its disk yet."""
        from calfat_plugin import disk

        self.arm_training()

        def wait(paths: Any) -> None:
            last = [path for path in paths if path.name == "last.safetensors.tmp"]
            if last and self._round_of(last[0]) == self.round - 1:
                time.sleep(TIMEOUT)

        _before(disk, "sync_together", wait)

    def arm_state(self) -> None:
        """When the state of the round's first client is written and its digest is not known yet."""
        from calfat_plugin.runs import checkpoints

        _after(
            checkpoints,
            "write_tensors",
            lambda path, state, facts: facts["round"] == self.round and "client" in facts and self.strike(),
        )

    def arm_evaluation(self) -> None:
        """In the final evaluation: the round is then the last one, and over."""
        _after(ShownProgress, "round_finished", lambda _, record: setattr(self, "now", record.round))
        _after(ShownProgress, "run_started", lambda _, run: setattr(self, "now", run.start_round - 1))
        _after(ShownProgress, "evaluation_progress", lambda *_: self.now == self.round and self.strike())

    def arm_refusals(self) -> None:
        """No client has an update in the round."""
        from calfat_plugin.federation import wire
        from calfat_plugin.federation import worker as module

        fit = module.Worker.fit

        def refuse(worker: Any, client: int, round: int, downlink: Any) -> Any:
            if round == self.round:
                return wire.pack_refusal(f"client {client}: nothing today")
            return fit(worker, client, round, downlink)

        module.Worker.fit = refuse  # type: ignore[method-assign]

    def arm_bug(self) -> None:
        """Something breaks while the round's clients train."""

        def break_down(progress: Any, round: int, clients: Any) -> None:
            if round == self.round:
                raise ZeroDivisionError("a bug")

        _after(ShownProgress, "round_started", break_down)

    def arm_page(self) -> None:
        """While the page is made, in its scratch folder."""
        from calfat_plugin.report import run_page

        draw = run_page.run_page

        def struck(run: Any, figures: Any) -> str:
            self.strike()
            return draw(run, figures)

        run_page.run_page = struck

    def arm_data(self) -> None:
        """While the data set is read, before anything has begun."""
        from calfat_plugin.experiment import Experiment

        _after(Experiment, "load_dataset", lambda *_, **__: self.strike())

    def _strike_in_round_of(self, checkpoint: Path) -> None:
        if self._round_of(checkpoint) == self.round:
            self.strike()

    def _round_of(self, checkpoint: Path) -> int:
        from calfat_plugin.tensor_files import read_facts

        return int(read_facts(checkpoint)["round"])

    def _note_round(self, progress: Any, round: int, clients: Any) -> None:
        self.now, self.clients = round, set()

    def _during_training(self, progress: Any, batch: Any) -> None:
        self.clients.add(batch.client)
        if self.now == self.round and len(self.clients) == 3:
            self.strike()


if os.environ.get("SABOTAGE"):
    Saboteur(**json.loads(os.environ["SABOTAGE"]))
if os.environ.get("WITHOUT_REPORT"):
    report.write_run_report = lambda path, out=None: path
