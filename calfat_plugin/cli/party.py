"""The processes of a cross-silo ``calfat run``, and what any run that ends early tells its user."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from calfat_plugin.cli.errors import coloured, warn
from calfat_plugin.compat import ending
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.progress import ShownProgress
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs.directory import RunDirectory, new_path
from calfat_plugin.runs.request import Request
from calfat_plugin.shipped import located
from calfat_plugin.stored_run import RECIPE_FILE

ALL = -1
SERVER = 0


def which(runtime: Runtime, role: str | None, rank: int | None, local: bool) -> int:
    """The rank that this process is asked to be, or :data:`ALL`."""
    if runtime.num_processes == 1:
        raise RunError(
            "--local, --role and --rank are for runs of several processes; this recipe is a simulation in one. Add "
            "--set common_args.training_type=cross_silo --set comm_args.backend=GRPC, or simulate in several with "
            "--workers N."
        )
    if local and role is None and rank is None:
        return ALL
    if not local and role == "server" and rank in (None, SERVER):
        own_rank = SERVER
    elif not local and role == "client" and rank:
        own_rank = rank
    else:
        raise RunError(
            "a cross-silo run has a process for each party. Start them all on this machine with --local, or one with "
            f"--role server, or with --role client --rank K (1 to {runtime.num_processes - 1})."
        )
    if runtime.lacks_addresses:
        raise runtime.experiment.document.error(
            ("calfat", "silo", "parties"),
            "there are no addresses. List host:port of the server, then of each client; only --local chooses its own.",
        )
    return own_rank


def take_part(request: Request, runtime: Runtime, rank: int, command: list[str], hint: ResumeHint) -> bool:
    """Be a client, or start all parties; False for the server, which is like any other run.

    ``command`` is this program's, without the options for the rank and the run directory.
    """
    if rank == SERVER:
        return False
    if rank == ALL:
        hint.command.append("--local")
        _start_all(request, runtime, command, hint)
        return True
    hint.last_words = "stopped. To take part again: the same command with --resume."
    from calfat_plugin.runs.party import run_client

    stream = sys.stdout  # the run sends prints to its log
    run_client(request, rank, lambda line: print(line, file=stream, flush=True))
    return True


def warn_of_unfinished(request: Request, command: list[str]) -> None:
    """Warn if a new cross-silo run begins although an unfinished one could be resumed."""
    if request.resume or request.run_dir is not None:
        return
    unfinished = RunDirectory.left_behind(request.experiment)
    if unfinished is None:
        return
    try:
        done, rounds = len(read_rounds(unfinished.rounds)), request.experiment.num_rounds
    except RunError:  # damaged, so it cannot go on
        return
    resume = shlex.join([*command, "--resume", "--run-dir", str(unfinished.path)])
    warn(
        f"{unfinished.path}: there is an unfinished run of this recipe and seed, with {done} of {rounds} rounds done. "
        f"This is a new one, which begins with the first round. To continue that one instead: {resume}"
    )


def _start_all(request: Request, runtime: Runtime, command: list[str], hint: ResumeHint) -> None:
    """Start all parties with this command and wait for them; exit like the server if it fails."""
    if request.run_dir is not None:
        directory: Path = request.run_dir
    elif request.resume:
        directory = RunDirectory.latest_unfinished(request.experiment).path
    else:
        warn_of_unfinished(request, hint.command)
        directory = new_path(request.experiment)
    words = [word for word in command[command.index("run") + 1 :] if word != "--plain"]
    if not located(words[0]).is_file():
        raise RunError(f"{words[0]}: every process of this run reads the recipe; save it in a file instead of a pipe.")
    hint.directory, hint.is_ours = RunDirectory(directory), False
    status = run_all(runtime, words, directory, resume=request.resume)
    if status:
        sys.exit(status)


# --- all of them on this machine --------------------------------------------------------------------------------------


_COLOURS = (36, 32, 33, 35, 34, 31)  # of the terminal, one for each party
_POLL = 0.5  # seconds
_GRACE = 15.0  # seconds that the clients have to end after the server has ended


class Party(threading.Thread):
    """A running party; the thread prints the party's lines behind a prefix.

    Once our output cannot be written, ``failure`` is the error, and further lines are dropped, so that the party does
    not wait for a reader.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], prefix: str = "") -> None:
        super().__init__(name=name, daemon=True)
        self.process = process
        self.failure: OSError | None = None
        self._prefix = prefix

    def run(self) -> None:
        for line in self.process.stdout or ():
            try:
                if self.failure is None:
                    sys.stdout.write(self._prefix + line)
                    sys.stdout.flush()
            except OSError as error:
                self.failure = error


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine's loopback with ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:  # all at the same time, so that no port is chosen twice
            bound.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{bound.getsockname()[1]}" for bound in sockets]


def run_all(runtime: Runtime, words: Sequence[str], run_dir: Path, *, resume: bool) -> int:
    """Start server and clients, print their lines, end them together, and return the server's exit code.

    ``words`` are recipe, ``--set`` and ``--seed``; the server writes to ``run_dir``, clients to ``rank-<k>`` below it.
    """
    experiment = runtime.experiment
    names = ["server", *(f"client {client}" for client in range(experiment.num_clients))]
    if runtime.lacks_addresses:
        words = [*words, "--set", f"calfat.silo.parties=[{', '.join(free_addresses(len(names)))}]"]
    parties: list[Party] = []
    try:
        for rank, name in enumerate(names):
            role, directory = "client", run_dir / f"rank-{rank}"
            if rank == SERVER:
                role, directory = "server", run_dir
            command = [sys.executable, "-m", "calfat_plugin.cli.main", "run", *words, "--plain"]
            command += ["--role", role, "--rank", str(rank), "--run-dir", str(directory)]
            if resume and (directory / RECIPE_FILE).exists():
                command.append("--resume")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the parties in order
            )
            prefix = f"{name:<{max(map(len, names))}} |"
            if coloured(sys.stdout):
                prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
            parties.append(Party(name, process, f"{prefix} "))
            parties[-1].start()
        needed = experiment.silo.min_clients or experiment.num_clients
        status = _watch(parties, needed)
        deadline = time.monotonic()
        if status == 0:
            deadline += _GRACE
        for party in parties[1:]:
            with suppress(subprocess.TimeoutExpired):
                party.process.wait(max(0.0, deadline - time.monotonic()))
        return status
    finally:
        _end(parties)


def _watch(parties: Sequence[Party], needed: int) -> int:
    """Wait for the server; end it at once when too few clients are left for it to continue."""
    server, *clients = parties
    failed: set[str] = set()
    while server.process.poll() is None:
        for party in parties:
            if party.failure is not None:
                raise party.failure
        for client in clients:
            if client.process.poll() and client.name not in failed:
                failed.add(client.name)
                print(f"{client.name} ended with {ending(client.process.returncode)}", file=sys.stderr, flush=True)
        left = len(clients) - len(failed)
        if left < needed:
            print(f"{left} clients are left, {needed} are needed: ending the run", file=sys.stderr, flush=True)
            return 1
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(_POLL)
    return server.process.returncode


def _end(parties: Sequence[Party]) -> None:
    """Ask every party to end, and kill those that do not."""
    for party in parties:
        party.process.terminate()
    for party in parties:
        try:
            party.process.wait(5)
        except subprocess.TimeoutExpired:
            party.process.kill()
            party.process.wait()
        if party.is_alive():
            party.join(2)


# --- a run that ends early --------------------------------------------------------------------------------------------


class ResumeHint:
    """What to print when this process's run ends early."""

    def __init__(self, command: list[str], resumed: bool) -> None:
        self.command = command  # that resumes the run, without --resume and --run-dir
        self._resumed = resumed  # the run was begun by an earlier process
        self.directory: RunDirectory | None = None  # None until it is known
        self.experiment: Experiment | None = None  # likewise
        self.progress = ShownProgress()
        self.is_ours = True  # this process writes the directory, and not one that it has started
        self.last_words: str | None = None  # of a process without a run directory of its own

    def after_stop(self) -> str:
        """What to say when the user stopped the run."""
        if self.last_words is not None:
            return self.last_words
        if self.directory is None or self._discarded(self.directory):
            return "stopped. No round was finished, so nothing is kept."
        if self.directory.finished and not self.progress.owes_round:  # while rounds are left, results are of fewer
            if self.experiment is not None and self.directory.not_measured(self.experiment):
                return f"stopped. What was measured before is kept. {self._how_to_resume(self.directory)}"
            return f"stopped. The run itself is finished: {self.directory.path}.{self.directory.without_page}"
        return f"stopped. {self._how_to_resume(self.directory)}"

    def after_error(self) -> str:
        """What to say below an error; empty where a resumed run would meet the same error again."""
        if self.directory is None:
            return ""
        keeps_log = self.progress.in_rounds and self.is_ours
        if self._discarded(self.directory, keep_log=keeps_log):
            if keeps_log:
                return f"No round was finished. The log is kept: {self.directory.log}"
            return ""
        if not self.progress.begun:
            return ""
        return self._how_to_resume(self.directory)

    def _discarded(self, directory: RunDirectory, *, keep_log: bool = False) -> bool:
        """Remove a run of this process if no round of it was finished; returns whether none was."""
        if self._resumed:
            return False
        if not self.is_ours:
            return not directory.last_checkpoint.exists()
        return directory.discard(keep_log=keep_log)

    def _how_to_resume(self, directory: RunDirectory) -> str:
        command = shlex.join([*self.command, "--resume", "--run-dir", str(directory.path)])
        return f"Finished rounds are kept in {directory.path}. Resume with:\n  {command}"
