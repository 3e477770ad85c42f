"""One run from recipe to results: directory, data, device, host, and the way back in after a stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from calfat_plugin.disk import read_json
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.arguments import ServerTask
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.profiling import profiling, timed
from calfat_plugin.results import RoundRecord, RunInfo, RunResult
from calfat_plugin.rounds_csv import last_used, read_rounds, seconds_of
from calfat_plugin.runs import workers
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.client_states import ClientStateFiles
from calfat_plugin.runs.compute import device_to_train, new_profile, pick_device, using_threads
from calfat_plugin.runs.data import describe_data
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.environment import describe_environment
from calfat_plugin.runs.listeners import Listeners
from calfat_plugin.runs.logs import log_to
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.writer import RunWriter

if TYPE_CHECKING:
    import torch

    from calfat_plugin.federation.server import Snapshot

log = logging.getLogger(__name__)


def run(request: Request, directory: RunDirectory, observer: RunObserver, warn: Callable[[str], None]) -> RunResult:
    """Run, or continue a run, until its results are written.

    Args:
        request: what to run.
        directory: from ``RunDirectory.open``.
        observer: is informed of progress.
        warn: shows the user a finding that does not stop the run.

    Raises:
        CalfatError: with what to fix. Finished rounds stay on disk.
    """
    experiment, runtime = request.experiment, runtime_of(request.experiment)
    started = time.perf_counter()
    with directory.locked(), log_to(directory.log), using_threads(experiment):
        for finding in runtime.security_warnings(rank=0):
            warn(finding)
        if request.workers:
            workers.prepare()
        snapshot, best = _restore(directory, experiment)
        device = (pick_device if runtime.is_cross_silo else device_to_train)(experiment, warn)
        dataset = experiment.load_dataset(rank=0)

        from calfat_plugin.federation.server import Server
        from calfat_plugin.federation.worker import shards_of

        shards = {} if runtime.is_cross_silo else shards_of(experiment, dataset, device)
        data = {} if runtime.is_cross_silo else describe_data(dataset, shards)  # the counts never leave the silos
        counts = data.get("class_counts", ())
        info = _run_info(directory, experiment, snapshot, counts)
        if snapshot is not None:
            directory.check_data(data)
        directory.begin(info.start_round - 1, experiment)
        earlier = seconds_of(directory.rounds)  # of the rounds that earlier processes finished
        directory.write_recipe(experiment)
        _write_environment(directory, experiment, device, request.command, warn)
        if data:
            directory.write_json(directory.partition, data)
        writer = RunWriter(directory, experiment, best, snapshot)
        listeners = Listeners.of(experiment, warn)
        observer.run_started(info)
        listeners.run_started(info)

        def on_round(measured: RoundRecord, now: Snapshot) -> None:
            record = measured.with_worst_clients(counts)
            with timed("checkpoint"):
                writer.round_finished(record, now)
                # With the next model, a client of a silo forgets what it kept before this round; a hook may read files.
                if runtime.is_cross_silo or listeners.wants_rounds:
                    writer.settle()
            observer.round_finished(record)
            with timed("loggers"):
                listeners.round_finished(info, record)

        profile = new_profile(device) if request.profile else None
        try:
            with (
                profiling(profile),
                workers.running(request, directory.log) as processes,
                writer,
            ):
                server = Server(experiment, dataset, device, observer)
                server.begin(snapshot)
                used = last_used(directory.rounds)
                task = ServerTask(
                    server, on_round, shards, writer.client_states, used, directory.evaluation, processes, warn
                )
                evaluations = runtime.run_server(task)
            evaluations = tuple(evaluation.with_worst_clients(counts) for evaluation in evaluations)
            result = RunResult(evaluations, experiment.num_rounds, earlier + time.perf_counter() - started)
            writer.run_finished(result)
        except BaseException as error:  # Ctrl-C, too
            listeners.run_stopped(info, error)
            raise
        finally:  # what a stopped run spent is worth knowing, too
            if profile is not None:
                directory.write_json(directory.profile, {"method": experiment.trainer.name, "parts": profile.as_json()})
        observer.run_finished(result)
        listeners.run_finished(info, result)

        from calfat_plugin.report import try_report, write_run_report

        try_report(
            lambda: write_run_report(directory.path),
            directory.path,
            warn,
            after=". The results are complete",
            traceback=True,
        )
    return result


def _run_info(
    directory: RunDirectory, experiment: Experiment, snapshot: Snapshot | None, class_counts: Iterable[Iterable[int]]
) -> RunInfo:
    return RunInfo(
        name=experiment.name,
        directory=directory.path,
        recipe=experiment.as_run(),
        num_rounds=experiment.num_rounds,
        start_round=1 if snapshot is None else snapshot.round + 1,
        class_counts=tuple(map(tuple, class_counts)),
    )


def _restore(directory: RunDirectory, experiment: Experiment) -> tuple[Snapshot | None, dict[str, dict[str, object]]]:
    """(snapshot to continue from, best rounds so far); a run that stopped in its first round begins again."""
    if not directory.last_checkpoint.exists():
        _check_nothing_lost(directory)
        return None, {}
    snapshot, notes = load_checkpoint(directory.last_checkpoint)
    if isinstance(snapshot.client_states, ClientStateFiles):
        snapshot.client_states.check_complete()
    done, asked = snapshot.round, experiment.num_rounds
    if done > asked or (directory.finished and done == asked):
        state = f"this run has done {done} rounds" if done > asked else f"this run is finished after {done} rounds"
        raise RunError(
            f"{directory.path}: {state}; {asked} are asked for. "
            f"To go further, resume it with --set train_args.comm_round={done + 10}."
            + (directory.without_page if directory.finished else "")
        )
    log.info("continuing after round %d", done)
    return snapshot, notes.get("best", {})


def _check_nothing_lost(directory: RunDirectory) -> None:
    """Refuse to begin again where rounds were finished: the first one may have left its row, no more."""
    rounds = len(read_rounds(directory.rounds))
    if rounds > 1 or directory.finished:
        raise RunError(
            f"{directory.last_checkpoint}: no such checkpoint, but this run has finished {rounds} rounds. "
            "Restore it from a copy, or start the run again in another directory."
        )


def _write_environment(
    directory: RunDirectory,
    experiment: Experiment,
    device: torch.device,
    command: list[str],
    warn: Callable[[str], None],
) -> None:
    """What this process runs on; what an earlier process of the same run ran on is kept under ``earlier``."""
    precision = experiment.runtime.precision
    now = describe_environment(device, experiment.registry, command, precision)
    now["earlier"] = []
    try:
        before = read_json(directory.environment)
    except RunError as error:  # not worth stopping for
        warn(f"{error} What it said of earlier processes is lost.")
        before = {}
    if before:
        earlier = before.pop("earlier", [])
        now["earlier"] = [*(earlier if isinstance(earlier, list) else []), before]
    directory.write_json(directory.environment, now)
