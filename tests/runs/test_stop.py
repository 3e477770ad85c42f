"""Ctrl-C and a polite kill end a run cleanly, lose no finished round, and say how to go on; and so do errors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.cli.runner import Ended
from tests.runs.processes import TIMEOUT, WarmServer, environment, sabotage
from tests.runs.remains import read_rows
from tests.snapshot import TextSnapshot


def resume_command(text: str) -> list[str]:
    """The command after "Resume with:", without how to call the program."""
    command = shlex.split(text.split("Resume with:\n", 1)[1].strip())
    return command[command.index("run") :]


def test_importing_what_runs_need_starts_no_thread_and_no_gpu(warm: WarmServer) -> None:
    """What a suite's warm process does before it forks, too."""
    assert warm.ask({"imported": True}) == [1, 1, False, False]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_stopped_in_a_round_says_how_to_resume(warm: WarmServer, recipe: Path, name: str) -> None:
    changes = ("--set", "train_args.comm_round=3", "--set", "calfat.threat.steps=3")
    stopped = warm.run("run", "tiny.yaml", "--seed", "3", *changes, cwd=recipe.parent, **sabotage("training", 2, name))
    (run,) = (recipe.parent / "runs" / "tiny").iterdir()
    shown = run.relative_to(recipe.parent)
    assert stopped.code == 130
    assert stopped.out.splitlines()[1].startswith("round 1/3  natural ")
    assert len(stopped.out.splitlines()) == 2
    assert stopped.err == (
        f"stopped. Finished rounds are kept in {shown}. Resume with:\n"
        "  calfat run tiny.yaml --set train_args.comm_round=3 --set calfat.threat.steps=3 --seed 3 "
        f"--resume --run-dir {shown}\n"
    )
    assert [row["round"] for row in read_rows(run / "rounds.csv")] == ["1"]

    resumed = warm.run(*resume_command(stopped.err), cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    assert [row["round"] for row in read_rows(run / "rounds.csv")] == ["1", "2", "3"]


def from_a_pipe(warm: WarmServer, recipe: Path, name: str, *words: str, **env: str) -> Ended:
    """A run of the recipe, which comes through a pipe of this name."""
    os.mkfifo(recipe.parent / name)
    held = os.open(recipe.parent / name, os.O_RDWR)
    os.write(held, recipe.read_bytes())
    started = warm.start("run", name, *words, cwd=recipe.parent, **env)
    while select.select([held], [], [], 0)[0]:  # until it is read
        time.sleep(0.01)
    os.close(held)
    return started.wait()


def test_a_recipe_from_a_pipe_is_resumed_from_the_run_s_own(
    warm: WarmServer, recipe: Path, snapshot: TextSnapshot
) -> None:
    words = ("--set", "train_args.comm_round=2", "--run-dir", "run")
    stopped = from_a_pipe(warm, recipe, "pipe", *words, **sabotage("training", 2, "SIGTERM"))
    command = "calfat run run/recipe.yaml --set train_args.comm_round=2 --resume --run-dir run\n"
    assert (stopped.code, stopped.err.endswith(f"Resume with:\n  {command}")) == (130, True), stopped.err
    assert warm.run(*resume_command(stopped.err), cwd=recipe.parent).code == 0
    silos = ("--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC", "--local")
    snapshot(from_a_pipe(warm, recipe, "another", *silos).err)


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(warm: WarmServer, recipe: Path) -> None:
    """Who ignores SIGHUP means it."""
    program = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'calfat_plugin.cli.main', *sys.argv[1:]])"
    )
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--run-dir", "run")
    env = environment(recipe.parent / "home") | sabotage("training", 2, "SIGHUP")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=recipe.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_ends_the_run_with_a_hint(warm: WarmServer, recipe: Path) -> None:
    """As ``calfat run RECIPE | head -2``: the rounds that were finished are kept, and the hint goes to stderr."""
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=200", "--run-dir", "run")
    pipe = recipe.parent / "pipe"
    os.mkfifo(pipe)
    started = warm.start(*arguments, cwd=recipe.parent, out=pipe)
    with pipe.open() as shown:
        assert [shown.readline()[:6] for _ in range(2)] == ["tiny: ", "round "]
    pipe.unlink()
    ended = started.wait()
    assert ended.code == 2
    assert ended.err == (
        "error: standard output cannot be written (Broken pipe).\n"
        "stopped. Finished rounds are kept in run. Resume with:\n"
        "  calfat run tiny.yaml --set train_args.comm_round=200 --resume --run-dir run\n"
    )
    rounds = len(read_rows(recipe.parent / "run" / "rounds.csv"))
    more = ("--set", f"train_args.comm_round={rounds + 1}", "--resume")
    assert warm.run(*arguments, *more, cwd=recipe.parent).code == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_stopped_while_the_page_is_made(warm: WarmServer, recipe: Path, name: str) -> None:
    """The results are there: what is missing is said, and the next attempt leaves no scratch folder behind."""
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=1", "--run-dir", "run")
    stopped = warm.run(*arguments, cwd=recipe.parent, WITHOUT_REPORT="", **sabotage("page", 1, name))
    run = recipe.parent / "run"
    missing = "There is no page of run yet; make it with: calfat report run\n"
    if name == "SIGINT":
        assert (stopped.code, stopped.err) == (130, f"stopped. The run itself is finished: run. {missing}")
    else:
        assert stopped.code == -9
        assert len(list(run.glob(".report-*"))) == 1
    assert not (run / "report.html").exists()
    resumed = warm.run(*arguments, "--resume", cwd=recipe.parent)
    assert resumed.code == 2
    assert resumed.err.endswith(f"resume it with --set train_args.comm_round=11. {missing}")
    made = warm.run("report", "run", cwd=recipe.parent, WITHOUT_REPORT="")
    assert (made.code, made.err) == (0, "")
    assert (run / "report.html").exists()
    assert not list(run.glob(".report-*"))


@pytest.mark.parametrize(("at", "round"), [("data", 0), ("training", 1)])
def test_stopped_before_the_first_round_is_over_leaves_nothing(
    warm: WarmServer, recipe: Path, at: str, round: int
) -> None:
    stopped = warm.run("run", "tiny.yaml", cwd=recipe.parent, **sabotage(at, round, "SIGINT"))
    assert (stopped.code, stopped.err) == (130, "stopped. No round was finished, so nothing is kept.\n")
    assert [path.name for path in recipe.parent.iterdir()] == ["tiny.yaml"]


def test_stopped_in_the_final_evaluation(warm: WarmServer, recipe: Path) -> None:
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--run-dir", "here")
    stopped = warm.run(*arguments, cwd=recipe.parent, **sabotage("evaluation", 2, "SIGINT"))
    assert stopped.code == 130
    resumed = warm.run(*resume_command(stopped.err), cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")
    assert resumed.out.splitlines()[0] == "tiny: all 2 rounds are done, resuming at the final evaluation in here"
    assert (recipe.parent / "here" / "results.json").exists()


def test_a_folder_that_was_there_keeps_what_is_not_the_runs(warm: WarmServer, recipe: Path) -> None:
    """A run that ends early removes its own files only, wherever --run-dir points."""
    results = recipe.parent / "results"
    (results / "checkpoints").mkdir(parents=True)
    (results / "thesis.tex").write_text("years of work")
    (results / "checkpoints" / "other.pt").write_text("weeks of work")
    words = ("run", "tiny.yaml", "--run-dir", "results")
    assert warm.run(*words, cwd=recipe.parent, **sabotage("training", 1, "SIGTERM")).code == 130
    left = sorted(str(path.relative_to(results)) for path in results.rglob("*"))
    assert left == ["checkpoints", "checkpoints/other.pt", "thesis.tex"]


def test_a_round_without_any_update_ends_the_run_and_keeps_the_rounds_before(warm: WarmServer, recipe: Path) -> None:
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=3", "--run-dir", "run")
    failed = warm.run(*arguments, cwd=recipe.parent, **sabotage("refusals", 3))
    reasons = "".join(f"  client {client}: nothing today\n" for client in range(5))
    reasons += "  If training diverged, lower train_args.learning_rate.\n"
    assert failed.code == 2
    assert failed.err == (
        f"error: round 3: not one client delivered a usable update.\n{reasons}"
        "Finished rounds are kept in run. Resume with:\n"
        "  calfat run tiny.yaml --set train_args.comm_round=3 --resume --run-dir run\n"
    )
    resumed = warm.run(*resume_command(failed.err), cwd=recipe.parent)
    assert (resumed.code, resumed.err) == (0, "")

    at_once = warm.run("run", "tiny.yaml", cwd=recipe.parent, **sabotage("refusals", 1))
    assert at_once.code == 2
    left = [path for path in (recipe.parent / "runs").rglob("*") if path.is_file()]
    assert at_once.err == (
        f"error: round 1: not one client delivered a usable update.\n{reasons}"
        f"No round was finished. The log is kept: {left[0].relative_to(recipe.parent)}\n"
    )
    assert [path.name for path in left] == ["log.txt"]
    assert "update refused: client 0: nothing today" in left[0].read_text()


def test_a_bug_keeps_its_traceback_and_the_run(warm: WarmServer, recipe: Path) -> None:
    """What is nobody's mistake but ours, or a plugin's, is not worded away."""
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--run-dir", "run")
    failed = warm.run(*arguments, cwd=recipe.parent, **sabotage("bug", 2))
    assert failed.code == 1
    assert failed.err.startswith("Traceback (most recent call last):\n")
    assert failed.err.endswith("ZeroDivisionError: a bug\n")
    assert warm.run(*arguments, "--resume", cwd=recipe.parent).code == 0


class Terminal:
    """A process on a pseudo-terminal of 80 columns."""

    def __init__(self, *arguments: str, cwd: Path, env: dict[str, str], columns: int = 80) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "calfat_plugin.cli.main", *arguments],
            **{"stdin": slave, "stdout": slave, "stderr": slave, "cwd": cwd, "env": env, "start_new_session": True},  # type: ignore[call-overload]
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal, as in a shell
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, pattern: str) -> None:
        """Read until the text so far holds ``pattern``, a regular expression."""
        deadline = time.monotonic() + TIMEOUT
        while not re.search(pattern, self.text):
            if time.monotonic() > deadline or not self._read(deadline):
                raise AssertionError(f"no {pattern!r} in:\n{self.text[-3000:]}")

    def finish(self) -> Ended:
        deadline = time.monotonic() + TIMEOUT
        while self._read(deadline):
            pass
        return Ended(self._process.wait(timeout=TIMEOUT), self.text, "")

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        chunk = b""
        if ready:
            with contextlib.suppress(OSError):  # how Linux says that the other side is closed
                chunk = os.read(self._master, 65536)
        self.text += chunk.decode(errors="replace")
        return bool(chunk)


def test_ctrl_c_on_a_terminal(warm: WarmServer, recipe: Path) -> None:
    """The command as a user starts it, on a terminal: Ctrl-C is typed while a later round trains."""
    env = environment(recipe.parent / "home", TERM="xterm-256color")
    arguments = ("run", "tiny.yaml", "--set", "train_args.comm_round=2000", "--run-dir", "my run")
    with Terminal(*arguments, cwd=recipe.parent, env=env) as terminal:
        terminal.read_until(r"after round \d+:")
        terminal.type("\x03")
        stopped = terminal.finish()

    assert stopped.code == 130
    assert "Traceback" not in stopped.out
    assert stopped.out.rindex("\x1b[?25h") > stopped.out.rindex("\x1b[?25l")  # the cursor is shown again
    after_bars = stopped.out[stopped.out.rindex("\x1b[?25h") :]
    assert "━" not in after_bars
    words = " ".join(after_bars.split())
    assert "stopped. Finished rounds are kept in my run. Resume with:" in words
    # Called without the installed script, so the command says how to call it that way, quoted for a shell.
    command = f"{sys.executable} -m calfat_plugin.cli.main run tiny.yaml --set train_args.comm_round=2000"
    assert words.endswith(f"{command} --resume --run-dir 'my run'")

    rounds = len(read_rows(recipe.parent / "my run" / "rounds.csv"))
    again = warm.run(
        *("run", "tiny.yaml", "--set", f"train_args.comm_round={rounds + 1}", "--resume", "--run-dir", "my run"),
        cwd=recipe.parent,
    )
    assert (again.code, again.err) == (0, "")
    assert len(read_rows(recipe.parent / "my run" / "rounds.csv")) == rounds + 1
