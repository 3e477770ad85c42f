"""One run from recipe to results: directory, data, device, host, listeners, and the way back in after a stop."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pluggy

from calfat_plugin import hookspecs, report
from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.disk import read_json, staying_here, write_json
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment, going_further
from calfat_plugin.experiment.groups import attackers_among
from calfat_plugin.experiment.implausible import classes_not_trained, implausible_data, too_large_batches
from calfat_plugin.federation.early_stopping import early_stop
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.worker import Worker, shards_of
from calfat_plugin.host.runtimes import Runtime, runtime_of
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.maths.metrics import honest_counts
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.observer import RunObserver
from calfat_plugin.peer_text import error_text
from calfat_plugin.profiling import profiling, timed
from calfat_plugin.results import EarlyStop, RoundRecord, RunInfo, RunResult
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs import workers
from calfat_plugin.runs.addition import Addition
from calfat_plugin.runs.checkpoints import ClientStateFiles, load_checkpoint
from calfat_plugin.runs.compute import computing_as, environment_of, new_profile, pick_device
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import model_loader
from calfat_plugin.runs.logs import log_to
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.writer import RunWriter

log = logging.getLogger(__name__)


@fresh_torch_state()
def run(request: Request, directory: RunDirectory, observer: RunObserver, runtime: Runtime | None = None) -> RunResult:
    """Run, or continue a run, until its results are written; ``runtime`` where the host has called this process."""
    experiment, runtime = request.experiment, runtime or runtime_of(request.experiment)
    started, warn = time.perf_counter(), observer.warn
    with staying_here(), directory.locked(), log_to(directory.log), computing_as(experiment):
        directory.refuse_links()
        for finding in runtime.security_warnings(rank=0):
            warn(finding)
        if request.workers:
            workers.prepare()
        addition = Addition.to(directory, experiment)
        snapshot, best = _restore(directory, experiment, addition)
        device = pick_device(experiment, warn)
        dataset = experiment.load_dataset(rank=0)

        shards = {} if runtime.is_cross_silo else shards_of(experiment, dataset, device)
        groups = experiment.client_groups(dataset.train.y.numpy())
        data = {} if runtime.is_cross_silo else describe_data(dataset, shards)  # the counts never leave the silos
        sizes = {client: len(shard) for client, shard in shards.items()}
        if shards and (finding := too_large_batches(experiment, groups, sizes)):
            warn(finding)
        class_counts = data.get("class_counts", ())
        if not shards and "train" in experiment.splits_of(0):  # of silos that share a data set, by its labels
            class_counts = [dataset.train.y.bincount(minlength=dataset.num_classes).tolist()]
        if class_counts and (finding := classes_not_trained(experiment, dataset.class_names, class_counts)):
            warn(finding)
        for finding in implausible_data(experiment, dataset, rank=0):
            warn(finding)
        counts = honest_counts(data.get("class_counts", ()), attackers_among(groups))
        members: dict[str, list[int]] = {}
        for client, group in groups.items():
            members.setdefault(group.name, []).append(client)
        data |= {"groups": members, "attackers": attackers_among(groups)} if members else {}
        info = RunInfo(
            name=experiment.name,
            directory=directory.path,
            recipe=experiment.as_run(),
            num_rounds=experiment.num_rounds,
            start_round=1 if snapshot is None else snapshot.round + 1,
            class_counts=tuple(map(tuple, data.get("class_counts", ()))),
            stop=None if snapshot is None else _stop_of(directory, experiment, snapshot.round),
        )
        if snapshot is not None:
            directory.check_data(data)
        directory.begin(info.start_round - 1, experiment)
        behind = read_rounds(directory.rounds)  # what earlier processes finished
        earlier = sum(record.seconds for record in behind)
        if not directory.finished:
            directory.reopen(experiment)
        try:
            before = read_json(directory.environment)
        except RunError as error:  # not worth stopping for
            warn(f"{error} What it said of earlier processes is lost.")
            before = {}
        others = before.pop("earlier", [])
        others = [*(others if isinstance(others, list) else []), *([before] if before else [])]
        environment = environment_of(experiment, device, request.command)
        write_json(directory.environment, {**environment, "earlier": others})
        if data:
            write_json(directory.partition, data)
        observer.run_started(info)
        directory = RunDirectory(directory.path.absolute())  # code of plugins may go to another folder
        info = replace(info, directory=directory.path)
        writer = RunWriter(directory, experiment, best, snapshot)
        listeners = Listeners.of(experiment, warn)
        listeners.run_started(info)

        def on_round(measured: RoundRecord, now: Snapshot) -> None:
            record = measured.with_worst_clients(counts)
            if directory.finished:  # it goes further: until it really does, the results are all that there is
                directory.reopen(experiment)
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
            start = workers.elsewhere(request, directory.log)
            with profiling(profile), workers.running(request, start, observer) as crew, writer:
                states = writer.client_states
                worker = partial(Worker, experiment, dataset, shards, device, RunObserver(), states)
                loading = model_loader(experiment.dataset.name, dataset, device)
                measuring = experiment if addition is None else addition.experiment
                server = Server(measuring, dataset, device, observer, worker if shards else None, loading)
                evidence = None if addition is None else addition.evidence
                server.begin(snapshot, behind, evidence)
                used: dict[int, int] = {}  # client to the last round in which its update was used
                for record in behind:
                    used.update(dict.fromkeys(record.clients, record.round))
                scratch = directory.evaluation if addition is None else addition.scratch
                task = ServerTask(
                    server, on_round, shards, states, used, scratch, crew, start, warn, run_name=directory.path.name
                )
                evaluations = runtime.run_server(task)
            tails = experiment.partition.entry.long_tailed
            evaluations = tuple(found.with_worst_clients(counts, long_tailed=tails) for found in evaluations)
            if addition is not None:
                evaluations, earlier = addition.together(evaluations), addition.seconds
            result = RunResult(evaluations, server.round, earlier + time.perf_counter() - started, server.stop)
            writer.run_finished(result, scratch)
            if addition is not None:  # only now: until the results have them, the recipe must not say so
                removed = directory.removed_evaluators(experiment)
                directory.write_recipe(experiment, directory.recipe_digest, removed)
        except BaseException as error:  # Ctrl-C, too
            listeners.run_stopped(info, error)
            raise
        finally:  # what a stopped run spent is worth knowing, too
            if profile is not None:
                write_json(directory.profile, {"method": experiment.trainer.name, "parts": profile.as_json()})
        listeners.run_finished(info, result)

        if request.page or (addition is not None and directory.page.exists()):  # a page that is there lacks them
            page, said = partial(report.write_run_report, directory.path), ". The results are complete"
            report.try_report(page, directory.path, warn, after=said, traceback=True)
    return result


def _restore(
    directory: RunDirectory, experiment: Experiment, addition: Addition | None
) -> tuple[Snapshot | None, dict[str, dict[str, object]]]:
    """(snapshot to continue from, best rounds so far); a run that stopped in its first round begins again."""
    if not directory.last_checkpoint.exists():
        rounds = len(read_rounds(directory.rounds))
        if rounds > 1 or directory.finished:  # the first round may have left its record, no more
            raise RunError(
                f"{directory.last_checkpoint}: no such checkpoint, but this run has finished {rounds} rounds. "
                "Restore it from a copy, or start the run again in another directory."
            )
        return None, {}
    snapshot, notes = load_checkpoint(directory.last_checkpoint)
    directory.check_own(directory.last_checkpoint, notes)
    directory.check_latest(snapshot.round)
    if isinstance(snapshot.client_states, ClientStateFiles):
        snapshot.client_states.check_complete()
    done, asked = snapshot.round, experiment.num_rounds
    if done > asked or (directory.finished and done == asked and addition is None):
        state = f"this run has done {done} rounds" if done > asked else f"this run is finished after {done} rounds"
        raise RunError(
            f"{directory.path}: {state}; {asked} are asked for. {going_further(experiment.as_run(), done, 'it')}"
            + (directory.without_page if directory.finished else "")
        )
    stop = _stop_of(directory, experiment, done)
    if stop is not None and stop.round < done:
        raise RunError(
            f"{directory.path}: {done} rounds are done, and with train_args.patience={stop.patience} this run would "
            f"have {stop}. Resume it with a larger train_args.patience, or start a new run."
        )
    if stop is not None and directory.finished:
        raise RunError(
            f"{directory.path}: this run is finished: it {stop}. To go further, resume it with a larger patience, such "
            f"as --set train_args.patience={stop.patience + 5}.{directory.without_page}"
        )
    log.info("continuing after round %d", done)
    return snapshot, notes.get("best", {})


def _stop_of(directory: RunDirectory, experiment: Experiment, done: int) -> EarlyStop | None:
    """Why no round is left after those that are done, where it is not that they are all."""
    behind = read_rounds(directory.rounds)[:done]  # a crash may leave one too many
    return early_stop(experiment, behind)


def describe_data(dataset: Dataset, shards: Mapping[int, ImageData]) -> dict[str, Any]:
    """The content of ``partition.json``: which data a run trains on, so that a resume can see whether it is the same.

    ``class_counts`` are training examples: a row a client, a column a class.
    """
    return {
        "class_names": list(dataset.class_names),
        "image_shape": list(dataset.train.x.shape[1:]),
        "class_counts": [shard.y.bincount(minlength=dataset.num_classes).tolist() for shard in shards.values()],
        "dataset_sha256": data_digest(filter(None, (dataset.train, dataset.test, dataset.validation))),
        "partition_sha256": data_digest(shards.values()),
    }


def data_digest(parts: Iterable[ImageData]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for tensor in (part.x, part.y):
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


# --- who is informed of a run's life ----------------------------------------------------------------------------------


class Listeners:
    """Calls the hooks of installed plugins and of the loggers that the recipe switches on, each apart from the others.

    None of them can stop a run: one that raises is reported to the user once and is off for the rest of this run.
    """

    def __init__(self, plugins: Iterable[tuple[str, Any]], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._managers: dict[str, pluggy.PluginManager] = {}
        for name, plugin in plugins:
            with self._reporting(name, "is not used"):
                self._add(name, plugin)

    @classmethod
    def of(cls, experiment: Experiment, warn: Callable[[str], None]) -> Listeners:
        """Everyone who listens to a run of ``experiment``; a logger that cannot be built is reported and left out."""
        installed = experiment.registry.listeners()
        listeners = cls(((f"plugin {who.plugin} ({who})", plugin) for who, plugin in installed), warn)
        for pick in experiment.loggers:
            name = f"logger '{pick.label}'"
            with listeners._reporting(name, "is not used"):
                listeners._add(name, pick.entry.load()(pick.options))
        return listeners

    def run_started(self, run: RunInfo) -> None:
        self._call("calfat_run_started", run=run)

    def round_finished(self, run: RunInfo, record: RoundRecord) -> None:
        self._call("calfat_round_finished", run=run, record=record)

    def run_finished(self, run: RunInfo, result: RunResult) -> None:
        self._call("calfat_run_finished", run=run, result=result)

    def run_stopped(self, run: RunInfo, error: BaseException) -> None:
        """Instead of ``run_finished``, when the run ends early."""
        self._call("calfat_run_stopped", run=run, error=error)

    @property
    def wants_rounds(self) -> bool:
        return any(manager.hook.calfat_round_finished.get_hookimpls() for manager in self._managers.values())

    def _add(self, name: str, plugin: Any) -> None:
        # A manager of its own for each: pluggy then checks its hooks, fills in the arguments that they take, and what
        # one raises does not keep the next from being called.
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(plugin)
        hookspecs.check_hooks(manager, plugin)
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
        except (Exception, SystemExit) as error:
            log.exception("%s %s", name, verdict)
            self._warn(f"{name} {verdict}: {error_text(error)}")
            self._managers.pop(name, None)
