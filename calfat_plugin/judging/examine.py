"""Run the battery on a finished model: load it, check by check, until the verdict is clear."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack import facts_of, loaded
from calfat_plugin.analyses.attack_plan import AttackPlan
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
    from calfat_plugin.judging.trial import Trial

    experiment = plan.experiments[0]
    _refuse_no_budget(experiment)
    with computing_as(experiment):
        run = loaded(plan, observer)
        test, load_model = run.dataset.test, set_up_task(run, plan.request.trust).load_model
        trial = Trial(
            run.model(),
            subset(test, plan.request.examples or EXAMPLES),
            num_classes=run.dataset.num_classes,
            threat=experiment.threat,
            batch_size=experiment.evaluation.batch_size,
            device=run.device,
            seed=experiment.seed,
            surrogates={str(target): load_model(str(target), None) for target in dict.fromkeys(transfer)},
            fresh=run.model,
            more=run.dataset.train,
        )
        facts = {**facts_of(run), "dataset": run.dataset.name}
        beside = plan.weights.with_name(f"{plan.weights.stem}-{FILE}") if plan.run is None else plan.run / FILE
        return _judge(trial, experiment, facts, output or beside, len(test), full, command, observer)


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
    from calfat_plugin.judging.trial import Trial

    _refuse_no_budget(experiment)
    try:
        pristine = _copy(model)
        task = set_up_task_of(_copy(pristine), data, trust)
    except CalfatError:
        raise
    except Exception as error:  # somebody else's model may fail in any way
        raise ModelError(
            f"the model cannot be copied ({error_text(error)}), and its copies are what is asked. Let "
            "copy.deepcopy take it, or give model, weights and dataset in its place."
        ) from error
    where, available = fixed_subset(len(data), examples or EXAMPLES), len(data)
    if len(where) < available:
        more = data.subset(np.setdiff1d(np.arange(available), where.numpy())) if more is None else more
        data = data.subset(where.numpy())
    trial = Trial(
        _copy(pristine),
        data,
        num_classes=task.num_classes,
        threat=experiment.threat,
        batch_size=experiment.evaluation.batch_size,
        device=task.device,
        seed=experiment.seed,
        surrogates={str(target): task.load_model(str(target), None) for target in dict.fromkeys(transfer)},
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
    """Run the battery from where the file stands; ``available``: images that the test split has."""
    from calfat_plugin.evaluators.autoattack.autoattack import fingerprint
    from calfat_plugin.evaluators.autoattack.subattacks import VERSIONS, playable
    from calfat_plugin.evaluators.base import budget_as_json
    from calfat_plugin.evaluators.evidence import Collector
    from calfat_plugin.evaluators.evidence_file import read_evidence, write_evidence
    from calfat_plugin.judging.record import FORMAT, Record
    from calfat_plugin.runs.compute import describe_environment

    threat = trial.threat
    settings = {
        **budget_as_json(threat),
        "step_size": exact_text(threat.step_size),
        "seed": trial.seed,
        "batch_size": trial.batch_size,
    }
    facts = {
        **facts,
        "examples": len(trial.data),
        "attack": CLAIM,
        "threat": settings,
        "transfer": list(trial.surrogates),
        "calfat_plugin": __version__,
        "environment": describe_environment(trial.device, experiment.registry, command, "fp32"),
    }
    task = trial.task()
    others = [fingerprint(replace(task, model=other), {}) for other in trial.surrogates.values()]
    digest = fingerprint(task, {"format": FORMAT, **settings, "transfer": others})
    record = Record.open(path, digest, facts, len(trial.data))
    full = full or record.full
    names, left_out = playable(VERSIONS["standard"], threat, trial.num_classes, trial.data.x.shape[2])
    for name, reason in left_out.items():
        observer.warn(f"AutoAttack runs without {name}: {reason}.")
    checks = battery(full=full, surrogates=bool(trial.surrogates), square="square" in names)
    done = {each.check: each for each in record.evidence if each.check in {check.name for check in checks}}
    record = replace(record, full=full, evidence=tuple(done.values()))
    trial.scratch, trial.on_progress = record.scratch, observer.evaluation_progress
    if max_bytes := experiment.evaluation.evidence_mb * 10**6:  # of adversarial images to keep beside the file
        trial.collector = Collector(trial.model, trial.data, trial.clean, threat, max_bytes, record.scratch)
        if record.evidence and record.kept.is_file():  # of a verdict that --full continues
            trial.collector.restore(read_evidence(record.kept))
    if record.robust is not None:
        trial.robust = record.robust.clone()

    def verdict() -> Verdict:
        return conclude(checks, record.evidence, threat.norm, exact_text(threat.eps), len(trial.data), available)

    for number, check in enumerate(checks, 1):
        if check.name in done:
            continue
        if verdict().clear and not full:
            break
        observer.say(f"check {number} of {len(checks)}: {check.title}")
        started = time.perf_counter()
        evidence = check.run(trial)
        evidence = replace(evidence, seconds=time.perf_counter() - started)
        record = replace(record, evidence=(*record.evidence, evidence), robust=trial.robust.clone())
        record.save(verdict(), finished=False)
        for row in evidence.rows:
            observer.say(f"  {row.attack}  {percent(row.accuracy)}  {row.seconds:.1f} s")
    final = verdict()
    if trial.collector is not None:
        trial.collector.concluded(trial.robust)
        images = trial.collector.evidence()
        write_evidence(record.kept, images, TRY_AGAIN)
        said = [{"file": record.kept.name, **images.as_json()}]
        record = replace(record, facts={**record.facts, "evidence": said})
    record.save(final, finished=True)
    shutil.rmtree(record.scratch, ignore_errors=True)  # only now is it of no use
    return TrustReport(checks, record.evidence, final, record.path)
