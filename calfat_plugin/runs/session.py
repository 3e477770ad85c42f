"""One run from recipe to results: directory, data, device, host, and the way back in after a stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.arguments import refuse_unsupported
from calfat_plugin.interfaces import RunObserver
from calfat_plugin.results import RoundRecord, RunInfo, RunResult
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.environment import describe_environment
from calfat_plugin.runs.logs import log_to
from calfat_plugin.runs.rounds import last_used
from calfat_plugin.runs.writer import RunWriter

if TYPE_CHECKING:
    import torch

    from calfat_plugin.parties import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        experiment: the recipe, resolved.
        run_dir: ``--run-dir``, or None.
        resume: ``--resume``.
        command: the command line, for the record.
    """

    experiment: Experiment
    run_dir: Path | None
    resume: bool
    command: list[str]


def open_directory(request: Request) -> RunDirectory:
    """The run directory: a new one, or the one to go on with.

    Raises:
        RunError: see ``RunDirectory``.
    """
    experiment = request.experiment
    refuse_unsupported(experiment)
    if not request.resume:
        return RunDirectory.create(experiment, request.run_dir)
    if request.run_dir is None:
        directory = RunDirectory.latest_unfinished(experiment)
    else:
        directory = RunDirectory(request.run_dir)
        if not directory.recipe.exists():
            raise RunError(f"{request.run_dir}: there is no run here to resume (no recipe.yaml).")
    directory.check_same(experiment)
    return directory


def run(request: Request, directory: RunDirectory, observer: RunObserver, warn: Callable[[str], None]) -> RunResult:
    """Run, or go on with a run, until its results are written.

    Args:
        request: what to run.
        directory: from :func:`open_directory`.
        observer: hears of progress.
        warn: shows the user a finding that does not stop the run.

    Raises:
        CalfatError: with what to mend. Finished rounds stay on disk.
    """
    experiment = request.experiment
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(log_to(directory.log))
        snapshot, best = _restore(directory, experiment)
        device = choose_device(experiment, warn)
        set_threads(experiment)
        dataset = experiment.load_dataset()

        from calfat_plugin.parties import shards_of

        across_silos = experiment.recipe.common.training_type == "cross_silo"
        shards = {} if across_silos else shards_of(experiment, dataset, device)
        directory.write_json(directory.environment, describe_environment(device, experiment.registry, request.command))
        import torch

        info = RunInfo(
            name=experiment.recipe.name,
            directory=directory.path,
            recipe=experiment.as_run(),
            num_rounds=experiment.num_rounds,
            start_round=1 if snapshot is None else snapshot.round + 1,
            class_counts=tuple(
                tuple(torch.bincount(shard.y, minlength=dataset.num_classes).tolist()) for shard in shards.values()
            ),
        )
        writer = RunWriter(directory, experiment, best)
        hook = experiment.registry.hook
        observer.run_started(info)
        hook.calfat_run_started(run=info)

        def on_round(record: RoundRecord, now: Snapshot) -> None:
            writer.round_finished(record, now)
            observer.round_finished(record)
            hook.calfat_round_finished(run=info, record=record)

        if across_silos:
            from calfat_plugin.host.cross_silo import serve

            used = last_used(directory.rounds)
            evaluations = serve(
                experiment, dataset, device, observer=observer, on_round=on_round, resume_from=snapshot, used=used
            )
        else:
            from calfat_plugin.host.simulation import simulate

            evaluations = simulate(
                experiment, dataset, shards, device, observer=observer, on_round=on_round, resume_from=snapshot
            )
        result = RunResult(evaluations, experiment.num_rounds, time.perf_counter() - started)
        writer.run_finished(result)
        observer.run_finished(result)
        hook.calfat_run_finished(run=info, result=result)
    return result


def _restore(directory: RunDirectory, experiment: Experiment) -> tuple[Snapshot | None, dict[str, dict[str, object]]]:
    """(snapshot to go on from, best rounds so far); a run that stopped in its first round begins again."""
    if not directory.last_checkpoint.exists():
        directory.rounds.unlink(missing_ok=True)
        return None, {}
    snapshot, notes = load_checkpoint(directory.last_checkpoint)
    if snapshot.round > experiment.num_rounds or (directory.finished and snapshot.round == experiment.num_rounds):
        raise RunError(
            f"{directory.path}: this run is finished after {snapshot.round} rounds. To go further, resume it with "
            f"--set train_args.comm_round={snapshot.round + 10}."
        )
    directory.results.unlink(missing_ok=True)  # it goes on, so it is not finished
    from calfat_plugin.runs.rounds import RoundsFile

    RoundsFile(directory.rounds, (), experiment.num_clients).keep_until(snapshot.round)
    return snapshot, notes.get("best", {})


def choose_device(experiment: Experiment, warn: Callable[[str], None]) -> torch.device:
    """The device that the recipe names; the CPU, with a warning, where there is no GPU."""
    import torch

    wanted = experiment.recipe.device
    if not wanted.using_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        warn("device_args.using_gpu is true, but torch sees no GPU here; training on the CPU.")
        return torch.device("cpu")
    if wanted.gpu_id >= torch.cuda.device_count():
        raise experiment.recipe.document.error(
            ("device_args", "gpu_id"), f"got {wanted.gpu_id}, but torch sees {torch.cuda.device_count()} GPU(s)."
        )
    return torch.device("cuda", wanted.gpu_id)


def set_threads(experiment: Experiment) -> None:
    """Give torch as many threads as the recipe says."""
    import torch

    threads = experiment.recipe.runtime.threads
    if threads is not None:
        torch.set_num_threads(threads)
