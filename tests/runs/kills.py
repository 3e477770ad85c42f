"""Kills runs with SIGKILL at random times and resumes them.

Killed are a simulation while it runs or resumes, one whose clients keep states and do not all train in each round, one
while its page is made, and the server or a client of a run over gRPC.
After each kill the run is resumed to its end. Then no finished round may be lost, the model must have the bits of an
uninterrupted run, there must be a page, and neither a file of a killed process nor a process may be left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.cli.runner import Ended
from tests.runs import remains
from tests.runs.processes import RECIPE, WarmServer
from tests.silo.federation import Federation, global_model

PLACES = ("simulation", "states", "resume", "page", "server", "client")
ROUNDS = ("--set", "train_args.comm_round=6")
RUN = ("run", "tiny.yaml", *ROUNDS, "--run-dir", "run")
WHOLE_PAGE = {"WITHOUT_REPORT": ""}


#: Of a run whose clients keep states, two of them a round.
WITH_STATES = (
    *("--set", "calfat.aggregator=scaffold", "--set", "data_args.partition_method=iid"),
    *("--set", "train_args.client_num_per_round=2"),
)


def rows(run: Path) -> list[dict[str, str]]:
    """The finished rounds, timings aside: those that the last checkpoint holds."""
    last = run / "checkpoints" / "last.safetensors"
    done = load_checkpoint(last)[0].round if last.exists() else 0
    return remains.rows(run)[:done] if done else []


def checkpoints(run: Path) -> dict[str, bytes]:
    """All files below ``checkpoints``, those of clients included."""
    folder = run / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def complaints(run: Path, finished: list[dict[str, str]], different: list[str]) -> list[str]:
    """What is wrong with a run that was killed after its ``finished`` rows, and resumed."""
    files = [path for path in run.rglob("*") if path.name.startswith((".report-", ".tmp")) or path.suffix == ".tmp"]
    wrong = {
        "a finished round was lost": rows(run)[: len(finished)] != finished,
        f"other bits than the uninterrupted run: {different[:5]}": bool(different),
        "no page": not (run / "report.html").exists(),
        "no results": not (run / "results.json").exists(),
        f"files left: {files}": bool(files) or (run / "evaluation").exists(),
    }
    return [complaint for complaint, is_so in wrong.items() if is_so]


class Simulations:
    """Kills in a single process. The uninterrupted run is made once."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self._run = folder, (*RUN, *words)
        folder.mkdir()
        self._warm = WarmServer(folder)
        self._number = 0
        for _ in range(2):  # the first one also reads what is then in memory
            started = time.monotonic()
            self._whole = self._new_folder() / "run"
            done = self._warm.run(*self._run, cwd=self._whole.parent)
            assert (done.code, done.err) == (0, "")
            self.seconds = time.monotonic() - started  # without the page, which takes longer than everything else

    def close(self) -> None:
        self._warm.close()

    def kill(self, place: str, chance: random.Random) -> tuple[str, list[str]]:
        """(where it was killed, what is wrong afterwards)."""
        run = self._new_folder() / "run"
        arguments = self._run
        if place == "resume":
            self._kill(run, arguments, lambda: self._sleep(0.8 * chance.random()))
            arguments = self._next(run)
        if place == "page":
            self._kill(run, arguments, lambda: self._wait_for_page(run, chance.random()))
        else:
            self._kill(run, arguments, lambda: self._sleep(chance.random()))
        finished = rows(run)
        where = "after the results" if (run / "results.json").exists() else f"after round {len(finished)}"
        for _ in range(2):  # to the end of the run, then perhaps its page
            if not (run / "report.html").exists():
                done = self._warm.run(*self._next(run), cwd=run.parent, **WHOLE_PAGE)
                if (done.code, done.err) != (0, ""):
                    return where, [f"it cannot be resumed: {done}"]
        ours, theirs = checkpoints(run), checkpoints(self._whole)
        different = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        different += [] if rows(run) == rows(self._whole) else ["rounds.csv"]
        return where, complaints(run, finished, different)

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        (folder / "tiny.yaml").write_text(RECIPE)
        return folder

    def _next(self, run: Path) -> tuple[str, ...]:
        """The command that a user would give now."""
        if (run / "results.json").exists():
            return ("report", "run")
        return (*self._run, "--resume") if (run / "recipe.yaml").exists() else self._run

    def _kill(self, run: Path, arguments: tuple[str, ...], wait: Callable[[], None]) -> Ended:
        process = self._warm.start(*arguments, cwd=run.parent, **WHOLE_PAGE)
        wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        return process.wait()

    def _sleep(self, share: float) -> None:
        time.sleep(share * self.seconds)

    def _wait_for_page(self, run: Path, share: float) -> None:
        until = time.monotonic() + 300
        while not (run / "results.json").exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(share * 2)


def kill_party(folder: Path, place: str, chance: random.Random) -> tuple[str, list[str]]:
    """(where the server or a client was killed, what is wrong after all have ended)."""
    with Federation(folder, aggregator={"name": "scaffold"}) as federation:
        rank = 0 if place == "server" else chance.choice((1, 2))
        federation.start_all()
        if chance.random() < 0.7:  # else while it starts
            federation.wait_for_round(chance.choice((1, 2)))
        time.sleep(chance.random())
        federation.kill(rank)
        run = federation.directory(0)
        finished = rows(run)
        if not (federation.directory(rank) / ("results.json" if rank == 0 else "finished.json")).exists():
            federation.start(rank, resume=(federation.directory(rank) / "recipe.yaml").exists())
        ended = {rank: federation.exit_status(rank) for rank in federation.processes}
        if not (run / "report.html").exists():
            from calfat_plugin.report import write_run_report

            write_run_report(run)
        simulated, model = federation.simulate(), global_model(run)
        same = simulated.keys() == model.keys() and all(model[name].equal(simulated[name]) for name in model)
        found = complaints(run, finished, [] if same else ["the model"])
        bad = {rank: status for rank, status in ended.items() if status not in (0, -signal.SIGKILL)}
        found += [f"exit status {status} of rank {rank}: {federation.output(rank)}" for rank, status in bad.items()]
        return f"after round {len(finished)}", found


def kill_many(folder: Path, kills: int, seed: int) -> list[str]:
    """Kill so many runs at random times, a place after the other; what was wrong with any of them."""
    chance, found = random.Random(seed), list[str]()
    simulations, states = Simulations(folder / "simulations"), Simulations(folder / "states", *WITH_STATES)
    try:
        for number in range(kills):
            place = PLACES[number % len(PLACES)]
            if place in ("server", "client"):
                where, wrong = kill_party(folder / f"{place}-{number}", place, chance)
            else:
                where, wrong = (states if place == "states" else simulations).kill(place, chance)
            found += [f"{place}, {where}: {complaint}" for complaint in wrong]
    finally:
        simulations.close()
        states.close()
    return found
