"""One run from recipe to results: its directory, its data, its rounds, what it is resumed from, and who listens."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pluggy

from calfat_plugin import hookspecs, report
from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.disk import read_json, staying_here, write_json
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.evidence import Evidence, read_evidence
from calfat_plugin.experiment import Experiment, going_further
from calfat_plugin.experiment.experiment import attackers_among
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
from calfat_plugin.results import RESULTS_FORMAT, WORST_CASE, EvaluationResult, RoundRecord, RunInfo, RunResult
from calfat_plugin.rounds import read_rounds
from calfat_plugin.run_files import read_results
from calfat_plugin.runs import workers
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
        # What earlier processes left; nothing of a new run.
        self.snapshot: Snapshot | None = None
        self.best: Mapping[str, Mapping[str, Any]] = {}  # best checkpoints so far
        self.behind: Sequence[RoundRecord] = ()  # the finished rounds

    # --- begin --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out where the run stands, load the data, and bring the files to the end of the last finished round."""
        directory, experiment = self.directory, self.experiment
        directory.refuse_links()
        for finding in self.runtime.security_warnings(rank=0):
            self.observer.warn(finding)
        if self.request.workers:
            workers.prepare()  # they import their modules while this process reads the data
        self.addition = Addition.to(directory, experiment)
        self._restore()
        self.device = pick_device(experiment, self.observer.warn)
        self._load_data()
        self._warn_of_data()
        self.info = RunInfo(
            name=experiment.name,
            directory=directory.path,
            recipe=experiment.as_run(),
            num_rounds=experiment.num_rounds,
            start_round=len(self.behind) + 1,
            class_counts=tuple(map(tuple, self.class_counts)),
            stop=early_stop(experiment, self.behind),
        )
        if self.snapshot is not None:
            directory.check_data(self.data)
        directory.begin(self.behind, experiment)
        if not directory.finished:
            directory.reopen(experiment)
        self._write_environment()
        if self.data:
            write_json(directory.partition, self.data)
        self.observer.run_started(self.info)
        self.directory = RunDirectory(directory.path.absolute())  # code of plugins may go to another folder
        self.info = replace(self.info, directory=self.directory.path)
        self.writer = RunWriter(self.directory, experiment, self.best, self.snapshot)
        self.listeners = Listeners.of(experiment, self.observer.warn)
        self.listeners.run_started(self.info)

    def _restore(self) -> None:
        """Read where the run is to continue. A run that stopped in its first round begins again."""
        directory = self.directory
        if not directory.last_checkpoint.exists():
            rounds = len(read_rounds(directory.rounds))
            if rounds > 1 or directory.finished:  # the first round may have left its record, no more
                raise RunError(
                    f"{directory.last_checkpoint}: no such checkpoint, but this run has finished {rounds} rounds. "
                    "Restore it from a copy, or start the run again in another directory."
                )
            return
        snapshot, notes = load_checkpoint(directory.last_checkpoint)
        directory.check_own(directory.last_checkpoint, notes)
        directory.check_latest(snapshot.round)
        if isinstance(snapshot.client_states, ClientStateFiles):
            snapshot.client_states.check_complete()
        behind = read_rounds(directory.rounds)[: snapshot.round]  # a crash may leave one too many
        self._refuse_nothing_to_do(snapshot.round, behind)
        directory.check_rounds(behind, snapshot.round)
        self.snapshot, self.best, self.behind = snapshot, notes.get("best", {}), behind
        log.info("continuing after round %d", snapshot.round)

    def _refuse_nothing_to_do(self, done: int, behind: Sequence[RoundRecord]) -> None:
        """Refuse to resume a run that has done all its rounds, or that would stop early at once."""
        directory, num_rounds, state = self.directory, self.experiment.num_rounds, ""
        if done > num_rounds:
            state = f"this run has done {done} rounds"
        elif done == num_rounds and directory.finished and self.addition is None:
            state = f"this run is finished after {done} rounds"
        if state:
            remedy = going_further(self.experiment.as_run(), done, "it")
            if directory.finished:
                remedy += directory.without_page
            raise RunError(f"{directory.path}: {state}; {num_rounds} are asked for. {remedy}")
        stop = early_stop(self.experiment, behind)
        if stop is not None and stop.round < done:
            raise RunError(
                f"{directory.path}: {done} rounds are done, and with train_args.patience={stop.patience} this run "
                f"would have {stop}. Resume it with a larger train_args.patience, or start a new run."
            )
        if stop is not None and directory.finished:
            raise RunError(
                f"{directory.path}: this run is finished: it {stop}. To go further, resume it with a larger patience, "
                f"such as --set train_args.patience={stop.patience + 5}.{directory.without_page}"
            )

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

    def _write_environment(self) -> None:
        """Write ``environment.json`` for this process, with those of earlier ones below ``earlier``."""
        try:
            last = read_json(self.directory.environment)
        except RunError as error:  # not worth stopping for
            self.observer.warn(f"{error} What it said of earlier processes is lost.")
            last = {}
        earlier = last.pop("earlier", [])
        if not isinstance(earlier, list):
            earlier = []
        if last:
            earlier = [*earlier, last]
        environment = environment_of(self.experiment, self.device, self.request.command)
        write_json(self.directory.environment, {**environment, "earlier": earlier})

    # --- rounds -------------------------------------------------------------------------------------------------------

    def rounds(self) -> Sequence[EvaluationResult]:
        """Let the host run the rounds that are left, and the final evaluation; return what that measured."""
        last_used: dict[int, int] = {}  # client to the last round in which its update was used
        for record in self.behind:
            last_used.update(dict.fromkeys(record.clients, record.round))
        profile = new_profile(self.device) if self.request.profile else None
        try:
            start = workers.worker_starter(self.request, self.directory.log)
            with profiling(profile), workers.running(self.request, start, self.observer) as crew, self.writer:
                server = self._server()
                task = ServerTask(
                    server=server,
                    on_round=self.round,
                    shards=self.shards,
                    client_states=self.writer.client_states,
                    used=last_used,
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

    def round(self, measured: RoundRecord, snapshot: Snapshot) -> None:
        """Store a round that the server has finished, and report it to whoever listens."""
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

    @property
    def _scratch(self) -> Path:
        """Where the final evaluation keeps what it needs to continue after a crash."""
        if self.addition is None:
            return self.directory.evaluation
        return self.addition.scratch

    # --- end ----------------------------------------------------------------------------------------------------------

    def end(self, evaluations: Sequence[EvaluationResult]) -> RunResult:
        """Write the results: only now is the run finished."""
        tails = self.experiment.partition.entry.long_tailed
        evaluations = [result.with_worst_clients(self.honest_counts, long_tailed=tails) for result in evaluations]
        seconds_before = sum(record.seconds for record in self.behind)
        if self.addition is not None:
            evaluations, seconds_before = self.addition.together(evaluations), self.addition.seconds
        seconds = seconds_before + time.perf_counter() - self.started
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


@dataclass(frozen=True)
class Addition:
    """Evaluators that are added to a finished run. They measure its last checkpoint; what was measured before stays."""

    experiment: Experiment  # its final evaluation has the added evaluators alone
    labels: tuple[str, ...]  # of all evaluators that are asked for, in the recipe's order
    earlier: tuple[EvaluationResult, ...]  # the results of the run, the worst case included
    evidence: Evidence | None  # of these; None where none was kept
    seconds: float  # what the run took so far
    scratch: Path  # where the added evaluation keeps what it needs to continue after a crash

    @classmethod
    def to(cls, directory: RunDirectory, experiment: Experiment) -> Addition | None:
        """What this recipe adds to the run; None where it adds nothing, or the run is not finished."""
        missing = directory.not_measured(experiment)
        if not missing:
            return None
        results = read_results(directory.results)
        if results is None:
            return None
        if results.format != RESULTS_FORMAT:
            raise RunError(
                f"{directory.results}: its format is {results.format}, and this version's is {RESULTS_FORMAT}, "
                "so new evaluations cannot stand beside its own. Run it again in another directory."
            )
        picks = tuple(pick for pick in experiment.evaluators if pick.label in missing)
        # Whoever changes an added evaluator that was stopped half-way must not continue with the other's images.
        written = json.dumps([pick.as_run() for pick in picks], sort_keys=True, default=str)
        digest = hashlib.sha256(written.encode()).hexdigest()[:16]
        evidence = None
        if directory.evidence.exists():
            evidence = read_evidence(directory.evidence)
        return cls(
            experiment=replace(experiment, evaluators=picks),
            labels=tuple(pick.label for pick in experiment.evaluators),
            earlier=results.evaluations,
            evidence=evidence,
            seconds=results.seconds,
            scratch=directory.evaluation / f"added-{digest}",
        )

    def together(self, added: Sequence[EvaluationResult]) -> tuple[EvaluationResult, ...]:
        """All evaluations: those that are asked for, in the recipe's order, then the others, then the worst case."""
        by_label = {result.label: result for result in (*self.earlier, *added)}
        by_label.pop(WORST_CASE, None)
        evaluations = [by_label.pop(label) for label in self.labels]
        evaluations += by_label.values()
        # Without evidence of the earlier attacks, nobody knows which images they broke.
        attacked_before = any(result.settings.get("attack") != "none" for result in self.earlier)
        if self.evidence is not None or not attacked_before:
            evaluations += [result for result in added if result.label == WORST_CASE]
        return tuple(evaluations)


# --- the data of a run ------------------------------------------------------------------------------------------------


def describe_data(dataset: Dataset, shards: Mapping[int, ImageData]) -> dict[str, Any]:
    """The content of ``partition.json``: which data a run trains on, so that a resume can see whether it is the same.

    ``class_counts`` are training examples: a row a client, a column a class.
    """
    splits = [dataset.train, dataset.test]
    if dataset.validation:
        splits.append(dataset.validation)
    return {
        "class_names": list(dataset.class_names),
        "image_shape": list(dataset.train.x.shape[1:]),
        "class_counts": [shard.y.bincount(minlength=dataset.num_classes).tolist() for shard in shards.values()],
        "dataset_sha256": data_digest(splits),
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
