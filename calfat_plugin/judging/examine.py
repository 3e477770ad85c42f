"""Run the battery on a finished model: load it, check by check, until the verdict is clear."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin import __version__
from calfat_plugin.analyses.attack import AttackObserver, device_of, facts_of
from calfat_plugin.analyses.attack_plan import AttackPlan
from calfat_plugin.errors import OptionError
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import assemble
from calfat_plugin.judging.battery import battery
from calfat_plugin.judging.check import Check
from calfat_plugin.judging.evidence import CLAIM, Evidence
from calfat_plugin.judging.verdict import Verdict, conclude
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import using_threads
from calfat_plugin.runs.loaded_run import LoadedRun, Trust, find_checkpoint, recipe_of

if TYPE_CHECKING:
    from torch import nn

    from calfat_plugin.judging.record import Record
    from calfat_plugin.judging.trial import Trial

FILE = "trust.json"
EXAMPLES = 500  # of a large test split, unless the user says how many


class TrustObserver(AttackObserver):
    """Is informed of the battery's progress; this one ignores everything."""

    def begin(self, check: Check, number: int, total: int, seconds_left: float | None) -> None:
        """Before a check: which of how many, and how long all that are left take at most; None: not known yet."""

    def checked(self, check: Check, evidence: Evidence) -> None:
        """After a check."""


@dataclass(frozen=True)
class TrustReport:
    """What came of it.

    Attributes:
        evidence: of those that ran, in this process or an earlier one.
    """

    checks: tuple[Check, ...]
    evidence: tuple[Evidence, ...]
    verdict: Verdict
    path: Path


def examine(
    plan: AttackPlan,
    transfer: Sequence[Path],
    *,
    full: bool,
    output: Path | None,
    command: list[str],
    observer: TrustObserver,
) -> TrustReport:
    """Judge a model; what an earlier, killed call with the same arguments has done is not done again.

    Args:
        plan: the model, with one budget.
        transfer: run directories or checkpoints of other models, whose adversarial examples are tried on this one.
        full: run every check, AutoAttack on all images.
        output: the file; None: ``trust.json`` of the run, or beside the weights.

    Raises:
        CalfatError: with what to fix; nothing is written then.
    """
    from calfat_plugin.evaluators.autoattack.autoattack import fingerprint
    from calfat_plugin.judging.record import Record
    from calfat_plugin.runs.compute import describe_environment

    experiment = plan.experiments[0]
    if experiment.threat.eps == 0:
        raise OptionError("there is no robustness to judge at eps 0; give a budget, such as --eps 8/255.")
    with using_threads(experiment):
        device = device_of(plan, observer)
        run = LoadedRun(experiment, plan.weights, plan.run, device)
        trial = _trial(plan, run, transfer)
        threat = trial.threat
        settings = {
            "norm": threat.norm,
            "eps": exact_text(threat.eps),
            "step_size": exact_text(threat.step_size),
            "seed": trial.seed,
            "batch_size": trial.batch_size,
        }
        facts: dict[str, Any] = {
            **facts_of(run),
            "dataset": run.dataset.name,
            "examples": len(trial.data),
            "attack": CLAIM,
            "threat": settings,
            "transfer": list(trial.surrogates),
            "calfat_plugin": __version__,
            "environment": describe_environment(device, experiment.registry, command, "fp32"),
        }
        digest = fingerprint(
            trial.task(), {**settings, "transfer": [_digest_of(other) for other in trial.surrogates.values()]}
        )
        beside = plan.weights.with_name(f"{plan.weights.stem}-{FILE}") if plan.run is None else plan.run / FILE
        record = Record.open(output or beside, digest, facts, len(trial.data))
        checks = _checks(trial, observer, full=full or record.full)
        kept = tuple(each for each in record.evidence if each.check in {check.name for check in checks})
        record = replace(record, full=full or record.full, evidence=kept)
        trial.scratch, trial.on_progress = record.scratch, observer.progress
        if record.robust is not None:
            trial.robust = record.robust.clone()
        return _finish(trial, record, checks, observer, len(run.dataset.test))


def _checks(trial: Trial, observer: TrustObserver, *, full: bool) -> tuple[Check, ...]:
    """The battery for these images; warn of what cannot attack them."""
    from calfat_plugin.evaluators.autoattack.subattacks import VERSIONS, playable

    names, left_out = playable(VERSIONS["standard"], trial.threat, trial.num_classes, trial.data.x.shape[2])
    for name, reason in left_out.items():
        observer.warn(f"AutoAttack runs without {name}: {reason}.")
    return battery(full=full, surrogates=len(trial.surrogates), square="square" in names)


def _finish(
    trial: Trial, record: Record, checks: tuple[Check, ...], observer: TrustObserver, available: int
) -> TrustReport:
    """Do what is left, one check after the other, of the test split's ``available`` images on those on trial."""

    def verdict() -> Verdict:
        budget = trial.threat.norm, exact_text(trial.threat.eps)
        return conclude(checks, record.evidence, *budget, len(trial.data), available)

    done = {each.check for each in record.evidence}
    for number, check in enumerate(checks, 1):
        if check.name in done:
            continue
        if verdict().clear and not record.full:
            break
        observer.begin(check, number, len(checks), _seconds_left(checks, record.evidence, len(trial.data)))
        started = time.perf_counter()
        evidence = check.run(trial)
        evidence = replace(evidence, seconds=time.perf_counter() - started)
        record = replace(record, evidence=(*record.evidence, evidence), robust=trial.robust.clone())
        record.save(verdict(), finished=False)
        observer.checked(check, evidence)
    final = verdict()
    record.save(final, finished=True)
    shutil.rmtree(record.scratch, ignore_errors=True)  # only now is it of no use
    return TrustReport(checks, record.evidence, final, record.path)


def _seconds_left(checks: Sequence[Check], evidence: Sequence[Evidence], examples: int) -> float | None:
    """How long the checks that are left take at most: as long for each image as those that are done."""
    seconds = {each.check: each.seconds for each in evidence}
    costs = {check.name: check.cost(examples) for check in checks}
    done = sum(cost for name, cost in costs.items() if seconds.get(name))
    if not done:
        return None
    left = sum(cost for name, cost in costs.items() if name not in seconds)
    return sum(seconds.values()) * left / done


def _trial(plan: AttackPlan, run: LoadedRun, transfer: Sequence[Path]) -> Trial:
    from calfat_plugin.evaluators.base import subset
    from calfat_plugin.judging.trial import Trial

    experiment = run.experiment
    return Trial(
        run.model(),
        subset(run.dataset.test, plan.request.examples or EXAMPLES),
        num_classes=run.dataset.num_classes,
        threat=experiment.threat,
        batch_size=experiment.evaluation.batch_size,
        device=run.device,
        seed=run.experiment.seed,
        surrogates={str(target): _surrogate(target, run, plan.request.trust) for target in dict.fromkeys(transfer)},
        fresh=run.model,
        more=run.dataset.train,
    )


def _surrogate(target: Path, run: LoadedRun, trust: Trust) -> nn.Module:
    """Another run's model.

    Raises:
        OptionError: it is of another data set.
        CalfatError: there is none, or it cannot be loaded.
    """
    weights, directory = find_checkpoint(target)
    document = recipe_of(directory, (), trust)
    experiment = assemble(document, Registry.for_recipe(document))
    if experiment.dataset.name != run.experiment.dataset.name:
        raise OptionError(
            f"--transfer {target}: its data set is '{experiment.dataset.name}'; the model on trial is measured on "
            f"'{run.experiment.dataset.name}'. Name runs of the same data set."
        )
    return LoadedRun(experiment, weights, directory, run.device).model()


def _digest_of(model: nn.Module) -> str:
    import hashlib

    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
