"""Run the battery on a finished model: load it, check by check, until the verdict is clear."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack import AttackPlan, facts_of, loaded
from calfat_plugin.analyses.in_memory import set_up_task_of
from calfat_plugin.disk import TRY_AGAIN
from calfat_plugin.errors import CalfatError, ModelError, OptionError
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import Experiment
from calfat_plugin.judging.battery import battery
from calfat_plugin.judging.check import Check
from calfat_plugin.judging.findings import CLAIM, Findings
from calfat_plugin.judging.verdict import Verdict, conclude
from calfat_plugin.observer import Observer
from calfat_plugin.peer_text import error_text
from calfat_plugin.report.numbers import percent
from calfat_plugin.runs.compute import computing_as
from calfat_plugin.runs.loaded_run import Trust, set_up_task
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from calfat_plugin.datasets import ImageData
    from calfat_plugin.judging.record import Record
    from calfat_plugin.judging.trial import Trial

FILE = "trust.json"
EXAMPLES = 500  # of a large test split, unless the user says how many


@dataclass(frozen=True)
class TrustReport:
    """What came of it, in this process or an earlier one."""

    checks: tuple[Check, ...]
    evidence: tuple[Findings, ...]
    verdict: Verdict
    path: Path


def examine(
    plan: AttackPlan,
    transfer: Sequence[Path],
    *,
    full: bool,
    output: Path | None,
    command: list[str],
    observer: Observer,
) -> TrustReport:
    """Judge a model; what an earlier, killed call with the same arguments has done is not done again.

    Args:
        transfer: run directories or checkpoints of other models, whose adversarial examples are tried on this one.
        full: run every check, AutoAttack on all images.
        output: the file; None: ``trust.json`` of the run, or beside the weights.
    """
    from calfat_plugin.evaluators.base import subset
    from calfat_plugin.judging.trial import put_on_trial

    experiment = plan.experiments[0]
    _refuse_no_budget(experiment)
    with computing_as(experiment):
        run = loaded(plan, observer)
        trial = put_on_trial(
            run.model(),
            subset(run.dataset.test, plan.request.examples or EXAMPLES),
            experiment,
            set_up_task(run, plan.request.trust),
            transfer=transfer,
            fresh=run.model,
            more=run.dataset.train,
        )
        facts = {**facts_of(run), "dataset": run.dataset.name}
        if output is None and plan.run is not None:
            output = plan.run / FILE
        elif output is None:
            output = plan.weights.with_name(f"{plan.weights.stem}-{FILE}")
        return _judge(trial, experiment, facts, output, len(run.dataset.test), full, command, observer)


def examine_module(
    model: nn.Module,
    data: ImageData,
    more: ImageData | None,
    transfer: Sequence[Path],
    experiment: Experiment,
    *,
    examples: int | None,
    trust: Trust,
    full: bool,
    output: Path,
    command: list[str],
    observer: Observer,
) -> TrustReport:
    """Judge a module in memory, on the device where it is; copies of it are asked, and it stays as it was.

    Args:
        data: images to be tried, or to take so many ``examples`` from.
        more: further images for the surrogate; None: what ``examples`` leave of ``data``.
        trust: as for ``recipe_of``, about the plugin files of ``transfer``.
    """
    import numpy as np

    from calfat_plugin.evaluators.base import fixed_subset
    from calfat_plugin.judging.trial import put_on_trial

    _refuse_no_budget(experiment)
    try:
        pristine = _copy(model)
        set_up = set_up_task_of(_copy(pristine), data, trust)
    except CalfatError:
        raise
    except Exception as error:  # somebody else's model may fail in any way
        raise ModelError(
            f"the model cannot be copied ({error_text(error)}), and its copies are what is asked. Let "
            "copy.deepcopy take it, or give model, weights and dataset in its place."
        ) from error
    available = len(data)
    chosen = fixed_subset(available, examples or EXAMPLES).numpy()
    if len(chosen) < available:
        if more is None:
            more = data.subset(np.setdiff1d(np.arange(available), chosen))
        data = data.subset(chosen)
    trial = put_on_trial(
        _copy(pristine),
        data,
        experiment,
        set_up,
        transfer=transfer,
        fresh=lambda: _copy(pristine),
        more=more,
    )
    facts = {"model": type(model).__name__, "seed": experiment.seed}
    return _judge(trial, experiment, facts, output, available, full, command, observer)


def _copy(model: nn.Module) -> nn.Module:
    """Without gradients: TorchScript would else make parameters that are computed from the first ones."""
    import torch

    with torch.no_grad():
        return deepcopy(model)


def _refuse_no_budget(experiment: Experiment) -> None:
    if experiment.threat.eps == 0:
        raise OptionError("there is no robustness to judge at eps 0; give a budget, such as --eps 8/255.")


def _judge(
    trial: Trial,
    experiment: Experiment,
    facts: Mapping[str, Any],
    path: Path,
    available: int,
    full: bool,
    command: list[str],
    observer: Observer,
) -> TrustReport:
    """Run the battery from where the file stands.

    Args:
        facts: what the file says about the model.
        path: the file.
        available: how many images the test split has.
    """
    record = _opened(trial, experiment, facts, path, command)
    full = full or record.full
    checks = _checks(trial, full, observer)
    names = {check.name for check in checks}
    done = {findings.check: findings for findings in record.evidence if findings.check in names}
    record = replace(record, full=full, evidence=tuple(done.values()))
    _continue(trial, record, experiment.evaluation.evidence_mb * 10**6)
    trial.on_progress = observer.evaluation_progress
    threat = trial.task.threat
    examples = len(trial.task.data)

    def verdict() -> Verdict:
        return conclude(checks, record.evidence, threat.norm, exact_text(threat.eps), examples, available)

    for number, check in enumerate(checks, 1):
        if check.name in done:
            continue
        if verdict().clear and not full:
            break
        observer.say(f"check {number} of {len(checks)}: {check.title}")
        started = time.perf_counter()
        findings = check.run(trial)
        findings = replace(findings, seconds=time.perf_counter() - started)
        record = replace(record, evidence=(*record.evidence, findings), robust=trial.robust.clone())
        record.save(verdict(), finished=False)
        for row in findings.rows:
            observer.say(f"  {row.attack}  {percent(row.accuracy)}  {row.seconds:.1f} s")
    final = verdict()
    record = _with_images(record, trial)
    record.save(final, finished=True)
    shutil.rmtree(record.scratch, ignore_errors=True)  # only now is it of no use
    return TrustReport(checks, record.evidence, final, record.path)


def _opened(trial: Trial, experiment: Experiment, facts: Mapping[str, Any], path: Path, command: list[str]) -> Record:
    """What an earlier process left in the file about this very question."""
    from calfat_plugin.evaluators.autoattack.autoattack import fingerprint
    from calfat_plugin.evaluators.base import budget_as_json
    from calfat_plugin.judging.record import FORMAT, Record
    from calfat_plugin.runs.compute import describe_environment

    task = trial.task
    settings = {
        **budget_as_json(task.threat),
        "step_size": exact_text(task.threat.step_size),
        "seed": task.seed,
        "batch_size": task.batch_size,
    }
    facts = {
        **facts,
        "examples": len(task.data),
        "attack": CLAIM,
        "threat": settings,
        "transfer": list(trial.surrogates),
        "calfat_plugin": __version__,
        "environment": describe_environment(task.device, experiment.registry, command, "fp32"),
    }
    surrogates = [fingerprint(replace(task, model=other), {}) for other in trial.surrogates.values()]
    digest = fingerprint(task, {"format": FORMAT, **settings, "transfer": surrogates})
    return Record.open(path, digest, facts, len(task.data))


def _checks(trial: Trial, full: bool, observer: Observer) -> tuple[Check, ...]:
    """The battery for this model; a warning says which parts of AutoAttack cannot run."""
    from calfat_plugin.evaluators.autoattack.subattacks import VERSIONS, playable

    task = trial.task
    image_height = task.data.x.shape[2]
    names, left_out = playable(VERSIONS["standard"], task.threat, task.num_classes, image_height)
    for name, reason in left_out.items():
        observer.warn(f"AutoAttack runs without {name}: {reason}.")
    return battery(full=full, surrogates=bool(trial.surrogates), square="square" in names)


def _continue(trial: Trial, record: Record, max_bytes: int) -> None:
    """Let the trial go on where the record stands, and keep so many bytes of adversarial images."""
    from calfat_plugin.evaluators.evidence import Collector
    from calfat_plugin.evaluators.evidence_file import read_evidence

    trial.scratch = record.scratch
    if max_bytes:
        trial.collector = Collector(trial.task, max_bytes, record.scratch)
        if record.evidence and record.kept.is_file():  # of a verdict that --full continues
            trial.collector.restore(read_evidence(record.kept))
    if record.robust is not None:
        trial.robust = record.robust.clone()


def _with_images(record: Record, trial: Trial) -> Record:
    """Write the adversarial images beside the record, which says so."""
    from calfat_plugin.evaluators.evidence_file import write_evidence

    if trial.collector is None:
        return record
    trial.collector.concluded(trial.robust)
    evidence = trial.collector.evidence()
    write_evidence(record.kept, evidence, TRY_AGAIN)
    written = [{"file": record.kept.name, **evidence.as_json()}]
    return replace(record, facts={**record.facts, "evidence": written})
