"""Attack a finished model: what ``calfat attack`` was asked to do, the measuring, and the results beside the weights.

A run's own recipe, or one made up for a model of the user's own, takes the command line's request as overrides. So the
recipe parser checks it before anything slow is imported, and its errors name the flag.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.disk import TRY_AGAIN, read_json, refuse_link, refuse_unwritable, reserved, write_json
from calfat_plugin.errors import OptionError, RunError, did_you_mean
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.exact import QUARTER, Number, StepSize, exact_text, parse_number
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.experiment.implausible import implausible_data
from calfat_plugin.experiment.resolve import recipe_of_own_model
from calfat_plugin.observer import Observer
from calfat_plugin.recipe.document import EPS, NORM, Document, KeyPath, parsed_value
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.registry import Registry
from calfat_plugin.report.charts import FORMATS, drawn, eps_chart
from calfat_plugin.report.numbers import percent
from calfat_plugin.results import EVIDENCE, NATURAL, RESULTS_FORMAT, EvaluationResult, evaluation_as_json
from calfat_plugin.runs.compute import computing_as
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import LoadedRun, Trust, distrust, find_checkpoint, near, recipe_of, set_up_task
from calfat_plugin.runs.request import check_device, named_device, pick_device
from calfat_plugin.threat import ThreatModel
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from calfat_plugin.entries import Citation, Entry
    from calfat_plugin.evaluators.evidence import Evidence

CHOOSE_OUTPUT = "choose another place with --output."
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class AttackRequest:
    """The command line, but for the run to attack; None: what the recipe says."""

    attacks: tuple[str, ...]  # evaluators, each ``NAME`` or ``LABEL=NAME``
    settings: tuple[str, ...] = ()  # ``LABEL.OPTION=VALUE``
    eps: tuple[str, ...] = ()  # budgets as texts; empty: the recipe's
    norm: str | None = None
    step_size: str | None = None  # as text; None in another norm than the recipe's: ``eps/4``
    examples: int | None = None  # None: all
    batch_size: int | None = None
    seed: int | None = None
    device: str | None = None
    data_dir: str | None = None
    download: bool = False  # whether a missing data set may be fetched
    plugins: tuple[Path, ...] = ()  # files beside those of the recipe
    trust: Trust = distrust  # is asked about each plugin file of the run that this user has not run before
    checkpoint: str | None = None  # which one of a run directory; None: the last
    model: str | None = None  # of the user's own, a name or ``package.module:factory``, with the next two
    weights: Path | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class AttackPlan:
    """Everything resolved, nothing loaded."""

    weights: Path  # a checkpoint of a run, or a state dict
    run: Path | None  # None: a model of the user's own
    experiments: tuple[Experiment, ...]  # one for each eps, ascending; they differ in the threat model alone
    request: AttackRequest


def planned(target: Path | None = None, **request: Any) -> AttackPlan:
    """Attack what the command line names: ``target``, a checkpoint or a run directory, or a model of the user's own.

    Args:
        request: the fields of an :class:`AttackRequest`.
    """
    typed = AttackRequest(**request)
    own_model = {"--model": typed.model, "--weights": typed.weights, "--dataset": typed.dataset}
    if target is not None:
        for flag, value in own_model.items():
            if value is not None:
                raise OptionError(
                    f"{flag}: the recipe of a run says what its model and data are. Give {target}, or --model with "
                    "--weights and --dataset, not both."
                )
        file, run = find_checkpoint(target, typed.checkpoint)
        return _plan(file, run, recipe_of(run, typed.plugins, typed.trust), typed)
    if typed.model is None or typed.weights is None or typed.dataset is None:
        missing = [flag for flag, value in own_model.items() if value is None]
        raise OptionError(
            "there is nothing to attack. Give a run directory or a checkpoint, or a model of your own with "
            f"--model, --weights and --dataset (missing: {', '.join(missing)})."
        )
    if typed.checkpoint is not None:
        raise OptionError(
            f"--checkpoint {typed.checkpoint}: names one of a run directory; leave it out beside --model."
        )
    if not typed.weights.is_file():
        raise RunError(f"--weights {typed.weights}: no such file.{near(typed.weights)}")
    document = recipe_of_own_model(
        "calfat attack",
        [
            (("data_args", "dataset"), typed.dataset, f"--dataset {typed.dataset}"),
            (("model_args", "model"), typed.model, f"--model {typed.model}"),
            (("device_args", "using_gpu"), True, "calfat attack"),
        ],
    )
    return _plan(typed.weights, None, with_plugins(document, typed.plugins), typed)


def _plan(weights: Path, run: Path | None, document: Document, request: AttackRequest) -> AttackPlan:
    """The recipe with all that the command line changes, resolved once for each eps."""
    if request.device is not None:
        check_device(request.device, "--device")
    step_size = request.step_size
    if step_size is not None:
        step_size = _number(StepSize, "--step-size", step_size).text
    step_place = f"--step-size {request.step_size}"
    norm_of_recipe = document.get(NORM) or ThreatModel.norm
    if request.norm not in (None, norm_of_recipe) and step_size is None:
        # The recipe's step is a length in its own norm.
        step_size = QUARTER.text
        step_place = f"--norm {request.norm}"
    document = _with_attacks(document, request)
    registry = Registry.for_recipe(document)
    document = document.with_values(_changes(request))
    if step_size is not None:
        document = document.with_value(("calfat", "threat", "step_size"), step_size, step_place)
    documents = [document]
    if request.eps:
        documents = []
        text_of_eps = {_number(parse_number, "--eps", text): text for text in request.eps}
        for eps in sorted(text_of_eps):
            documents.append(document.with_value(EPS, exact_text(eps), f"--eps {text_of_eps[eps]}"))
    experiments = [assemble(document_of_eps, registry, trains=False) for document_of_eps in documents]
    return AttackPlan(weights, run, tuple(experiments), request)


def _changes(request: AttackRequest) -> list[tuple[KeyPath, Any, str]]:
    """Keys that the command line sets, each with its value and its flag."""
    changes: list[tuple[KeyPath, Any, str]] = []
    for path, value, flag in (
        (("calfat", "evaluation", "batch_size"), request.batch_size, "--batch-size"),
        (("common_args", "random_seed"), request.seed, "--seed"),
        (("data_args", "data_cache_dir"), request.data_dir, "--data-dir"),
        (NORM, request.norm, "--norm"),
    ):
        if value is not None:
            changes.append((path, value, f"{flag} {value}"))
    if request.download:
        changes.append((("calfat", "dataset", "download"), True, "--download"))
    return changes


# --- which attacks ----------------------------------------------------------------------------------------------------


def _with_attacks(document: Document, request: AttackRequest) -> Document:
    """The attacks as the recipe's evaluators, with ``natural`` among them."""
    place = f"--attacks {','.join(request.attacks)}"
    name_of_label: dict[str, str] = {}
    for attack in request.attacks:
        label, equals, name = (part.strip() for part in attack.partition("="))
        if not equals:
            name = label
        if not name or not _LABEL.fullmatch(label):
            raise OptionError(
                f"{place}: expected names such as fgsm,pgd20,autoattack, or LABEL=NAME to have one twice."
            )
        if label in name_of_label:
            raise OptionError(f"{place}: '{label}' is named twice; name one of them: again={name}.")
        name_of_label[label] = name
    if NATURAL not in name_of_label.values():
        name_of_label[NATURAL] = NATURAL
    choices: list[dict[str, Any]] = []
    for label, name in name_of_label.items():
        choice: dict[str, Any] = {"name": name}
        if label != name:
            choice["label"] = label
        choices.append(choice)
    places: dict[KeyPath, str] = {}
    for setting in request.settings:
        position, option, value = _setting(setting, tuple(name_of_label))
        choices[position][option] = value
        places["calfat", "evaluators", position, option] = f"--set {setting}"
    document = document.with_value(("calfat", "evaluators"), choices, place)
    document.places.update(places)
    return document


def _setting(setting: str, labels: Sequence[str]) -> tuple[int, str, object]:
    """(position of the attack, option, value) of ``LABEL.OPTION=VALUE``."""
    key, equals, text = setting.partition("=")
    label, dot, option = key.strip().rpartition(".")
    if not (equals and dot and label and option):
        raise OptionError(f"--set {setting}: expected LABEL.OPTION=VALUE, such as pgd20.restarts=5.")
    if label not in labels:
        hint = did_you_mean(label, labels) or f" There are: {', '.join(labels)}."
        raise OptionError(f"--set {setting}: --attacks names no '{label}'.{hint}")
    if option in ("name", "label"):
        raise OptionError(f"--set {setting}: write LABEL=NAME in --attacks.")
    return labels.index(label), option, parsed_value(text, (option,), f"--set {setting}")


def _number(read: Callable[[object], Number], flag: str, text: str) -> Number:
    try:
        return read(text)
    except ValueError as error:
        raise OptionError(f"{flag} {text}: {error}.") from None


# --- measuring --------------------------------------------------------------------------------------------------------


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
    content = {
        "format": RESULTS_FORMAT,
        **facts,
        "evidence": _write_evidence(path, evidence),
        "seconds": time.perf_counter() - started,
        "conventions": CONVENTIONS,
        "alarms": list(map(dataclasses.asdict, alarms)),
        "calfat_plugin": __version__,
        "citations": list(map(dataclasses.asdict, _citations(plan))),
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
    if len(plan.experiments) == 1:
        results = ()
    if not drawn([eps_chart(path.stem, results)], path.parent):
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

    data_then = read_json(RunDirectory(directory).partition)
    if not data_then:
        return
    data_now = describe_data(run.dataset, {})
    for key in ("class_names", "dataset_sha256"):
        if key in data_then and data_then[key] != data_now[key]:
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
    evidence_of_each_eps: list[Evidence] = []

    def add(result: EvaluationResult) -> None:
        results.append(result)
        observer.say(_line(result))

    def show_progress(name: str, label: str, done: int, total: int, correct: int) -> None:
        observer.evaluation_progress(name, done, total, correct)

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
            progress = partial(show_progress, name)
            add(measure(task, [(label, evaluator)], on_progress=progress, collector=collector)[label])
        if collector is not None:
            evidence = collector.evidence()
            evidence_of_each_eps.append(evidence)
            worst = evidence.worst_case(task.num_classes, collector.not_run)
            if worst is not None:
                add(worst)
    return tuple(results), evidence_of_each_eps


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
