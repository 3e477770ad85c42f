"""One run from recipe to results: directory, data, device, host, listeners, and the way back in after a stop."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from calfat_plugin.results import EarlyStop, EvaluationResult, RoundRecord, RunInfo, RunResult
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs import workers
from calfat_plugin.runs.addition import Addition
from calfat_plugin.runs.checkpoints import ClientStateFiles, load_checkpoint
from calfat_plugin.runs.compute import computing_as, environment_of, log_to, new_profile
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import model_loader
from calfat_plugin.runs.request import Request, pick_device
from calfat_plugin.runs.writer import RunWriter

log = logging.getLogger(__name__)


@fresh_torch_state()
def run(request: Request, directory: RunDirectory, observer: RunObserver, runtime: Runtime | None = None) -> RunResult:
    """Run, or continue a run, until its results are written; ``runtime`` where the host has called this process."""
    experiment = request.experiment
    with staying_here(), directory.locked(), log_to(directory.log), computing_as(experiment):
        session = Session(request, directory, observer, runtime or runtime_of(experiment))
        session.begin()
        try:
            evaluations = session.rounds()
            result = session.end(evaluations)
        except BaseException as error:  # Ctrl-C, too
            session.listeners.run_stopped(session.info, error)
            raise
        session.listeners.run_finished(session.info, result)
        session.draw_page()
    return result


class Session:
    """One process's part of a run: :meth:`begin`, then :meth:`rounds`, which calls :meth:`round`, then :meth:`end`."""

    def __init__(self, request: Request, directory: RunDirectory, observer: RunObserver, runtime: Runtime) -> None:
        self.request = request
        self.experiment = request.experiment
        self.directory = directory
        self.observer = observer
        self.runtime = runtime
        self.started = time.perf_counter()

    # --- begin --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out where the run stands, load the data, and bring the files to the end of the last finished round."""
        self.directory.refuse_links()
        for finding in self.runtime.security_warnings(rank=0):
            self.observer.warn(finding)
        if self.request.workers:
            workers.prepare()  # they import their modules while this process reads the data
        self.addition = Addition.to(self.directory, self.experiment)
        self.snapshot, best = _restore(self.directory, self.experiment, self.addition)
        self.device = pick_device(self.experiment, self.observer.warn)
        self._load_data()
        self._warn_of_data()
        self.info = self._info()
        self._write_first_files()
        self.observer.run_started(self.info)
        self.directory = RunDirectory(self.directory.path.absolute())  # code of plugins may go to another folder
        self.info = replace(self.info, directory=self.directory.path)
        self.writer = RunWriter(self.directory, self.experiment, best, self.snapshot)
        self.listeners = Listeners.of(self.experiment, self.observer.warn)
        self.listeners.run_started(self.info)

    def _load_data(self) -> None:
        """Read the data set, and deal it to the clients of a simulation; silos have data of their own."""
        self.dataset = self.experiment.load_dataset(rank=0)
        self.groups = self.experiment.client_groups(self.dataset.train.y.numpy())
        self.shards: Mapping[int, ImageData] = {}
        self.data: dict[str, Any] = {}  # of partition.json; the counts of silos never leave them
        if not self.runtime.is_cross_silo:
            self.shards = shards_of(self.experiment, self.dataset, self.device)
            self.data = describe_data(self.dataset, self.shards)
        self.class_counts = self.data.get("class_counts", [])
        self.honest_counts = honest_counts(self.class_counts, attackers_among(self.groups))
        members: dict[str, list[int]] = {}
        for client, group in self.groups.items():
            members.setdefault(group.name, []).append(client)
        if members:
            self.data |= {"groups": members, "attackers": attackers_among(self.groups)}

    def _warn_of_data(self) -> None:
        """Warn of batches, classes and images with which the run can hardly go well."""
        findings = []
        if self.shards:
            sizes = {client: len(shard) for client, shard in self.shards.items()}
            findings.append(too_large_batches(self.experiment, self.groups, sizes))
        counts = self.class_counts
        if not self.shards and "train" in self.experiment.splits_of(0):  # of silos that share a data set
            counts = [self.dataset.train.y.bincount(minlength=self.dataset.num_classes).tolist()]
        if counts:
            findings.append(classes_not_trained(self.experiment, self.dataset.class_names, counts))
        findings += implausible_data(self.experiment, self.dataset, rank=0)
        for finding in findings:
            if finding:
                self.observer.warn(finding)

    def _info(self) -> RunInfo:
        done, stop = 0, None
        if self.snapshot is not None:
            done = self.snapshot.round
            stop = _stop_of(self.directory, self.experiment, done)
        return RunInfo(
            name=self.experiment.name,
            directory=self.directory.path,
            recipe=self.experiment.as_run(),
            num_rounds=self.experiment.num_rounds,
            start_round=done + 1,
            class_counts=tuple(map(tuple, self.class_counts)),
            stop=stop,
        )

    def _write_first_files(self) -> None:
        """Bring the rounds to the checkpoint's, and write what is known before the first of this process."""
        if self.snapshot is not None:
            self.directory.check_data(self.data)
        # What earlier processes finished.
        self.behind = self.directory.begin(self.info.start_round - 1, self.experiment)
        if not self.directory.finished:
            self.directory.reopen(self.experiment)
        self._write_environment()
        if self.data:
            write_json(self.directory.partition, self.data)

    def _write_environment(self) -> None:
        """Write ``environment.json`` for this process, with those of earlier ones below ``earlier``."""
        try:
            before = read_json(self.directory.environment)
        except RunError as error:  # not worth stopping for
            self.observer.warn(f"{error} What it said of earlier processes is lost.")
            before = {}
        earlier = before.pop("earlier", [])
        if not isinstance(earlier, list):
            earlier = []
        if before:
            earlier = [*earlier, before]
        environment = environment_of(self.experiment, self.device, self.request.command)
        write_json(self.directory.environment, {**environment, "earlier": earlier})

    # --- rounds -------------------------------------------------------------------------------------------------------

    def rounds(self) -> Sequence[EvaluationResult]:
        """Let the host run the rounds that are left, and the final evaluation; return what that measured."""
        profile = new_profile(self.device) if self.request.profile else None
        try:
            start = workers.elsewhere(self.request, self.directory.log)
            with profiling(profile), workers.running(self.request, start, self.observer) as crew, self.writer:
                server = self._server()
                task = ServerTask(
                    server=server,
                    on_round=self.round,
                    shards=self.shards,
                    client_states=self.writer.client_states,
                    used=self._last_used(),
                    scratch=self._scratch,
                    workers=crew,
                    start_elsewhere=start,
                    warn=self.observer.warn,
                    run_name=self.directory.path.name,
                )
                evaluations = self.runtime.run_server(task)
        finally:  # what a stopped run spent is worth knowing, too
            if profile is not None:
                write_json(self.directory.profile, {"method": self.experiment.trainer.name, "parts": profile.as_json()})
        self.num_rounds, self.stop = server.round, server.stop
        return evaluations

    def round(self, measured: RoundRecord, snapshot: Snapshot) -> None:
        """Keep a round that the server has finished, and tell whoever listens."""
        record = measured.with_worst_clients(self.honest_counts)
        if self.directory.finished:  # it goes further: until it really does, the results are all that there is
            self.directory.reopen(self.experiment)
        with timed("checkpoint"):
            self.writer.round_finished(record, snapshot)
            # With the next model, a client of a silo forgets what it kept before this round; a hook may read files.
            if self.runtime.is_cross_silo or self.listeners.wants_rounds:
                self.writer.settle()
        self.observer.round_finished(record)
        with timed("loggers"):
            self.listeners.round_finished(self.info, record)

    def _server(self) -> Server:
        """The server, at the end of the last finished round."""
        experiment, evidence = self.experiment, None
        if self.addition is not None:
            experiment, evidence = self.addition.experiment, self.addition.evidence
        make_worker = None
        if self.shards:
            states = self.writer.client_states
            make_worker = partial(
                Worker, self.experiment, self.dataset, self.shards, self.device, RunObserver(), states
            )
        load_model = model_loader(self.experiment.dataset.name, self.dataset, self.device)
        server = Server(experiment, self.dataset, self.device, self.observer, make_worker, load_model)
        server.begin(self.snapshot, self.behind, evidence)
        return server

    def _last_used(self) -> dict[int, int]:
        """Client to the last round in which its update was used; without clients whose updates never were."""
        used: dict[int, int] = {}
        for record in self.behind:
            used.update(dict.fromkeys(record.clients, record.round))
        return used

    @property
    def _scratch(self) -> Path:
        """Where the final evaluation keeps what it needs to continue after a crash."""
        return self.directory.evaluation if self.addition is None else self.addition.scratch

    # --- end ----------------------------------------------------------------------------------------------------------

    def end(self, evaluations: Sequence[EvaluationResult]) -> RunResult:
        """Write the results: only now is the run finished."""
        tails = self.experiment.partition.entry.long_tailed
        evaluations = [result.with_worst_clients(self.honest_counts, long_tailed=tails) for result in evaluations]
        earlier = sum(record.seconds for record in self.behind)
        if self.addition is not None:
            evaluations, earlier = self.addition.together(evaluations), self.addition.seconds
        seconds = earlier + time.perf_counter() - self.started
        result = RunResult(tuple(evaluations), self.num_rounds, seconds, self.stop)
        self.writer.run_finished(result, self._scratch)
        if self.addition is not None:  # only now: until the results have them, the recipe must not say so
            removed = self.directory.removed_evaluators(self.experiment)
            self.directory.write_recipe(self.experiment, self.directory.recipe_digest, removed)
        return result

    def draw_page(self) -> None:
        """Draw the page, if it is asked for, or if there is one that lacks the added evaluators."""
        lacks_some = self.addition is not None and self.directory.page.exists()
        if self.request.page or lacks_some:
            page = partial(report.write_run_report, self.directory.path)
            after = ". The results are complete"
            report.try_report(page, self.directory.path, self.observer.warn, after=after, traceback=True)


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
    _refuse_nothing_to_do(directory, experiment, addition, snapshot.round)
    log.info("continuing after round %d", snapshot.round)
    return snapshot, notes.get("best", {})


def _refuse_nothing_to_do(
    directory: RunDirectory, experiment: Experiment, addition: Addition | None, done: int
) -> None:
    """Refuse to resume a run that has done all its rounds, or more than the recipe asks for."""
    asked, state = experiment.num_rounds, ""
    if done > asked:
        state = f"this run has done {done} rounds"
    elif done == asked and directory.finished and addition is None:
        state = f"this run is finished after {done} rounds"
    if state:
        page = directory.without_page if directory.finished else ""
        raise RunError(
            f"{directory.path}: {state}; {asked} are asked for. {going_further(experiment.as_run(), done, 'it')}{page}"
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
