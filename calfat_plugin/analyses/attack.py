"""Attack a finished model: load the weights, measure at every eps, write the results beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from itertools import chain, count
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
    from calfat_plugin.evaluators.evidence_file import write_evidence
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
        content = {
            **facts_of(run),
            "dataset": run.dataset.name,
            "test_examples": len(run.dataset.test),
            "evaluations": list(map(evaluation_as_json, results)),
            "environment": describe_environment(run.device, first.registry, command, "fp32"),
        }
    alarms = find_alarms(results, run.dataset.class_names)
    numbered = (folder / f"{stem}-{number}.json" for number in count(2))
    path = reserved(chain([folder / f"{stem}.json"], numbered) if output is None else iter([output]))
    kept = []
    for each in evidence:
        middle = f"-eps-{each.facts['eps'].replace('/', '_')}" if len(evidence) > 1 else ""
        kept.append({"file": f"{path.stem}{middle}.{EVIDENCE}", **each.as_json()})
        write_evidence(path.with_name(str(kept[-1]["file"])), each, TRY_AGAIN)
    write_json(
        path,
        {
            "format": RESULTS_FORMAT,
            **content,
            "evidence": kept,
            "seconds": time.perf_counter() - started,
            "conventions": CONVENTIONS,
            "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
            "calfat_plugin": __version__,
            "citations": [dataclasses.asdict(citation) for citation in _citations(plan)],
        },
        TRY_AGAIN,
    )
    shutil.rmtree(scratch, ignore_errors=True)  # only now is it of no use
    sweep = [dataclasses.asdict(result) for result in results] if len(plan.experiments) > 1 else []
    for ending in FORMATS:  # matplotlib would write through a link
        refuse_link(path.with_suffix(f".{ending}"))
    endings = FORMATS if drawn([eps_chart(path.stem, sweep)], path.parent) else ()
    return AttackReport(results, alarms, path, tuple(path.with_suffix(f".{ending}") for ending in endings))


def loaded(plan: AttackPlan, observer: Observer) -> LoadedRun:
    """The model of a plan, where to compute; one of the user's own takes a GPU only where there is one.

    Where the run's data set is another one now, a warning says so: classes renamed, images added, another folder.
    """
    from calfat_plugin.runs.session import describe_data

    experiment = plan.experiments[0]
    if plan.request.device is not None:
        device = named_device(plan.request.device, "--device")
    else:
        device = pick_device(experiment, observer.warn if plan.run is not None else lambda message: None)
    run = LoadedRun(experiment, plan.weights, plan.run, device)
    noted = {} if plan.run is None else read_json(RunDirectory(plan.run).partition)
    now = describe_data(run.dataset, {}) if noted else {}
    if other := [key for key in ("class_names", "dataset_sha256") if key in noted and noted[key] != now[key]]:
        observer.warn(
            f"{plan.run}: the data set {run.dataset.name} is not what it was when this run was made ({other[0]} in "
            "partition.json), so these numbers do not compare with the run's own. Put it back, or say where it is with "
            "--data-dir."
        )
    for finding in implausible_data(experiment, run.dataset):
        observer.warn(finding)
    return run


def _measure(
    plan: AttackPlan, run: LoadedRun, scratch: Path, observer: Observer
) -> tuple[tuple[EvaluationResult, ...], list[Evidence]]:
    """What was measured, and what is kept of it, for each eps."""
    from calfat_plugin.evaluators.base import subset
    from calfat_plugin.evaluators.evidence import Collector
    from calfat_plugin.evaluators.measure import clean_predictions, measure

    dataset, device, model = run.dataset, run.device, run.model()
    data = subset(dataset.test, plan.request.examples).to(device)
    task = set_up_task(run, plan.request.trust)
    ready = [
        (each, each.ready_evaluators(tuple(sorted(each.evaluators, key=lambda pick: pick.name != NATURAL)), task))
        for each in plan.experiments
    ]  # before the first of them, which may take hours
    results: list[EvaluationResult] = []
    kept: list[Evidence] = []
    batch_size, num_classes = run.experiment.evaluation.batch_size, dataset.num_classes
    clean = clean_predictions(model, data, num_classes=num_classes, batch_size=batch_size, device=device)
    for experiment, evaluators in ready:
        threat, room = experiment.threat, experiment.evaluation.evidence_mb * 10**6 // len(ready)
        eps = exact_text(threat.eps)
        noted = scratch / eps.replace("/", "_")
        collector = Collector(model, data, clean, threat, room, noted) if room else None
        for label, evaluator in evaluators:
            if not evaluator.has_budget and experiment is not plan.experiments[0]:
                continue  # the same at every eps
            name = f"{label} at eps {eps}" if evaluator.has_budget else label
            found = measure(
                model,
                data,
                [(label, evaluator)],
                num_classes=num_classes,
                threat=threat,
                batch_size=batch_size,
                device=device,
                seed=experiment.seed,
                correct=clean == data.y.cpu(),
                scratch=scratch,
                on_progress=lambda _, *counts, name=name: observer.evaluation_progress(name, *counts),
                collector=collector,
            )
            results += found.values()
            observer.say(_line(results[-1]))
        if collector is not None:
            kept.append(collector.evidence())
            if worst := kept[-1].worst_case(num_classes, collector.not_run):
                results.append(worst)
                observer.say(_line(worst))
    return tuple(results), kept


def _line(result: EvaluationResult) -> str:
    """``pgd20 (linf 8/255)  43.8 %  2.0 s``."""
    budget = f" ({result.settings['norm']} {result.settings['eps']})" if "eps" in result.settings else ""
    if result.accuracy is None or result.accuracy_release is None:
        return f"{result.label}{budget}  did not run: {result.not_run}"
    release = f", release {percent(result.accuracy_release)}" if result.accuracy_release != result.accuracy else ""
    return f"{result.label}{budget}  {percent(result.accuracy)}{release}  {result.seconds:.1f} s"


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
    keys = ("evaluators", "evaluation", "threat")
    asked = [[each.as_run()["calfat"][key] for key in keys] for each in plan.experiments]
    whole = [plan.experiments[0].seed, plan.request.examples, asked]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def _citations(plan: AttackPlan) -> tuple[Citation, ...]:
    """What to cite; of a model of the user's own, the attacks and the data alone."""
    experiment = plan.experiments[0]
    if plan.run is not None:
        return experiment.citations()
    entries: tuple[Entry, ...] = (experiment.dataset.entry, *(pick.entry for pick in experiment.evaluators))
    return tuple({entry.citation: None for entry in entries if entry.citation is not None})
