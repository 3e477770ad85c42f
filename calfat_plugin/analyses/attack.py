"""Attack a finished model: load the weights, measure at every eps, write the results beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack_plan import AttackPlan
from calfat_plugin.disk import TRY_AGAIN, read_json, refuse_link, refuse_unwritable, reserved, write_json
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment.implausible import implausible_data
from calfat_plugin.observer import Observer
from calfat_plugin.report.charts import FORMATS, drawn, eps_chart
from calfat_plugin.report.numbers import percent
from calfat_plugin.results import EVIDENCE, NATURAL, RESULTS_FORMAT, EvaluationResult, evaluation_as_json
from calfat_plugin.runs.compute import computing_as, named_device, pick_device
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import LoadedRun, set_up_task
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from calfat_plugin.entries import Citation, Entry
    from calfat_plugin.evaluators.evidence import Evidence

CHOOSE_OUTPUT = "choose another place with --output."


@dataclass(frozen=True)
class AttackReport:
    """What was measured."""

    results: tuple[EvaluationResult, ...]  # natural accuracy first, then every attack at every eps, ascending
    alarms: tuple[Alarm, ...]
    path: Path
    curves: tuple[Path, ...]  # the files with the accuracy over eps; empty for a single eps


def attack(plan: AttackPlan, command: list[str], observer: Observer, output: Path | None = None) -> AttackReport:
    """Measure and write.

    What AutoAttack has done so far is kept beside the results until they are written: the same call resumes there.

    Args:
        output: results file; None: ``attacks/`` of the run, or beside the weights, under a name that is free.
    """
    from calfat_plugin.runs.compute import describe_environment
    from calfat_plugin.runs.writer import CONVENTIONS

    started = time.perf_counter()
    first = plan.experiments[0]
    folder, stem = _place(plan, output)
    scratch = folder / f".{stem}-{_digest(plan)}-unfinished"
    refuse_link(scratch)
    with computing_as(first):
        run = loaded(plan, observer)
        results, evidence = _measure(plan, run, scratch, observer)
        facts = {
            **facts_of(run),
            "dataset": run.dataset.name,
            "test_examples": len(run.dataset.test),
            "evaluations": [evaluation_as_json(result) for result in results],
            "environment": describe_environment(run.device, first.registry, command, "fp32"),
        }
    alarms = find_alarms(results, run.dataset.class_names)
    path = reserved(_names(folder, stem, output))
    written = _write_evidence(path, evidence)
    citations = [dataclasses.asdict(citation) for citation in _citations(plan)]
    content = {
        "format": RESULTS_FORMAT,
        **facts,
        "evidence": written,
        "seconds": time.perf_counter() - started,
        "conventions": CONVENTIONS,
        "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
        "calfat_plugin": __version__,
        "citations": citations,
    }
    write_json(path, content, TRY_AGAIN)
    shutil.rmtree(scratch, ignore_errors=True)  # only now is it of no use
    return AttackReport(results, alarms, path, _draw_curves(path, plan, results))


def _names(folder: Path, stem: str, output: Path | None) -> Iterator[Path]:
    """Names of a results file, the first of which that is free is taken; the user's own is the only one."""
    if output is not None:
        yield output
        return
    yield folder / f"{stem}.json"
    for number in count(2):
        yield folder / f"{stem}-{number}.json"


def _write_evidence(results: Path, evidence: list[Evidence]) -> list[dict[str, Any]]:
    """Write the evidence of each eps beside the results; what these say of it."""
    from calfat_plugin.evaluators.evidence import write_evidence

    rows = []
    for evidence_of_eps in evidence:
        eps = ""
        if len(evidence) > 1:
            eps = f"-eps-{evidence_of_eps.facts['eps'].replace('/', '_')}"
        path = results.with_name(f"{results.stem}{eps}.{EVIDENCE}")
        write_evidence(path, evidence_of_eps, TRY_AGAIN)
        rows.append({"file": path.name, **evidence_of_eps.as_json()})
    return rows


def _draw_curves(path: Path, plan: AttackPlan, results: tuple[EvaluationResult, ...]) -> tuple[Path, ...]:
    """The accuracy over eps as pictures beside the results; none of a single eps."""
    pictures = tuple(path.with_suffix(f".{ending}") for ending in FORMATS)
    for picture in pictures:  # matplotlib would write through a link
        refuse_link(picture)
    sweep = results if len(plan.experiments) > 1 else ()
    if not drawn([eps_chart(path.stem, sweep)], path.parent):
        return ()
    return pictures


def loaded(plan: AttackPlan, observer: Observer) -> LoadedRun:
    """The model of a plan, where to compute; one of the user's own takes a GPU only where there is one.

    A warning says where the run's data set is another one now: classes renamed, images added, another folder.
    """
    experiment = plan.experiments[0]
    if plan.request.device is not None:
        device = named_device(plan.request.device, "--device")
    elif plan.run is not None:
        device = pick_device(experiment, observer.warn)
    else:
        device = pick_device(experiment, lambda message: None)
    run = LoadedRun(experiment, plan.weights, plan.run, device)
    if plan.run is not None:
        _warn_of_other_data(plan.run, run, observer)
    for finding in implausible_data(experiment, run.dataset):
        observer.warn(finding)
    return run


def _warn_of_other_data(directory: Path, run: LoadedRun, observer: Observer) -> None:
    from calfat_plugin.runs.session import describe_data

    noted = read_json(RunDirectory(directory).partition)
    if not noted:
        return
    now = describe_data(run.dataset, {})
    for key in ("class_names", "dataset_sha256"):
        if key in noted and noted[key] != now[key]:
            observer.warn(
                f"{directory}: the data set {run.dataset.name} is not what it was when this run was made ({key} in "
                "partition.json), so these numbers do not compare with the run's own. Put it back, or say where it is "
                "with --data-dir."
            )
            return


def _measure(
    plan: AttackPlan, run: LoadedRun, scratch: Path, observer: Observer
) -> tuple[tuple[EvaluationResult, ...], list[Evidence]]:
    """What was measured, and what is kept of it, for each eps."""
    from calfat_plugin.evaluators.base import subset
    from calfat_plugin.evaluators.evidence import Collector
    from calfat_plugin.evaluators.measure import evaluation_task, measure

    model = run.model()
    data = subset(run.dataset.test, plan.request.examples).to(run.device)
    set_up = set_up_task(run, plan.request.trust)
    ready = []
    for experiment in plan.experiments:  # all are set up before the first of them, which may take hours
        natural_first = sorted(experiment.evaluators, key=lambda pick: pick.name != NATURAL)
        ready.append((experiment, experiment.ready_evaluators(tuple(natural_first), set_up)))
    task_at_first_eps = evaluation_task(model, data, run.experiment, set_up, scratch=scratch)
    results: list[EvaluationResult] = []
    kept: list[Evidence] = []

    def add(result: EvaluationResult) -> None:
        results.append(result)
        observer.say(_line(result))

    for experiment, evaluators in ready:
        task = replace(task_at_first_eps, threat=experiment.threat)
        eps = exact_text(task.threat.eps)
        collector = None
        max_bytes = experiment.evaluation.evidence_mb * 10**6 // len(ready)
        if max_bytes:
            collector = Collector(task, max_bytes, scratch / eps.replace("/", "_"))
        for label, evaluator in evaluators:
            if not evaluator.has_budget and experiment is not plan.experiments[0]:
                continue  # the same at every eps
            name = label
            if evaluator.has_budget:
                name = f"{label} at eps {eps}"
            progress = partial(_show_progress, observer, name)
            add(measure(task, [(label, evaluator)], on_progress=progress, collector=collector)[label])
        if collector is not None:
            evidence = collector.evidence()
            kept.append(evidence)
            worst = evidence.worst_case(task.num_classes, collector.not_run)
            if worst is not None:
                add(worst)
    return tuple(results), kept


def _show_progress(observer: Observer, name: str, label: str, done: int, total: int, correct: int) -> None:
    observer.evaluation_progress(name, done, total, correct)


def _line(result: EvaluationResult) -> str:
    """``pgd20 (linf 8/255)  43.8 %  2.0 s``."""
    name = result.label
    if "eps" in result.settings:
        name = f"{name} ({result.settings['norm']} {result.settings['eps']})"
    if result.accuracy is None or result.accuracy_release is None:
        return f"{name}  did not run: {result.not_run}"
    accuracy = percent(result.accuracy)
    if result.accuracy_release != result.accuracy:
        accuracy = f"{accuracy}, release {percent(result.accuracy_release)}"
    return f"{name}  {accuracy}  {result.seconds:.1f} s"


# --- writing ----------------------------------------------------------------------------------------------------------


def facts_of(run: LoadedRun) -> dict[str, Any]:
    """What the results say about the model."""
    experiment = run.experiment
    facts: dict[str, Any] = {"weights": str(run.weights)}
    if run.run is not None:
        snapshot, notes = run.checkpoint
        facts = {
            "run": str(run.run),
            "checkpoint": str(run.weights),
            "round": snapshot.round,
            "selected_on": notes.get("selected_on"),
            "trainer": experiment.trainer.name,
            "aggregator": experiment.aggregator.name,
        }
    return {**facts, "model": experiment.model.name, "seed": experiment.seed}


def _place(plan: AttackPlan, output: Path | None) -> tuple[Path, str]:
    """(folder, name without ending) of the results."""
    weights, run = plan.weights, plan.run
    if output is not None:
        if output.exists():
            raise RunError(f"--output {output}: this file exists already; results are never overwritten.")
        folder, stem = output.parent, output.stem
    elif run is not None:
        folder, stem = run / "attacks", weights.stem
    else:
        folder, stem = weights.parent, f"{weights.stem}-attacks"
    if output is None:  # the run directory may be from elsewhere; a place that the user names may be a link
        refuse_link(folder)
    refuse_unwritable(folder, CHOOSE_OUTPUT, make=True)
    return folder, stem


def _digest(plan: AttackPlan) -> str:
    """Of what is measured: another attack that ends first must not take away what this one needs to continue."""
    sections = []
    for experiment in plan.experiments:
        calfat = experiment.as_run()["calfat"]
        sections.append([calfat["evaluators"], calfat["evaluation"], calfat["threat"]])
    question = [plan.experiments[0].seed, plan.request.examples, sections]
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]


def _citations(plan: AttackPlan) -> tuple[Citation, ...]:
    """What to cite; of a model of the user's own, the attacks and the data alone."""
    experiment = plan.experiments[0]
    if plan.run is not None:
        return experiment.citations()
    entries: list[Entry] = [experiment.dataset.entry]
    for pick in experiment.evaluators:
        entries.append(pick.entry)
    citations = [entry.citation for entry in entries if entry.citation is not None]
    return tuple(dict.fromkeys(citations))  # each once
