"""Run the battery on a finished model: load it, check by check, until the verdict is clear.

``trust.json`` holds the evidence and the verdict. The whole file is written after every check, so that a battery that
was killed continues.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack import CHOOSE_OUTPUT, AttackPlan, facts_of, loaded
from calfat_plugin.analyses.in_memory import set_up_task_of
from calfat_plugin.disk import RESTORE, TRY_AGAIN, read_bytes, read_json, refuse_link, refuse_unwritable, write_json
from calfat_plugin.errors import CalfatError, ModelError, OptionError, RunError
from calfat_plugin.evaluators.autoattack import as_bits, fingerprint, from_bits
from calfat_plugin.evaluators.base import budget_as_json, fixed_subset, subset
from calfat_plugin.evaluators.subattacks import VERSIONS, playable
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import Experiment
from calfat_plugin.judging.battery import battery
from calfat_plugin.judging.check import Check
from calfat_plugin.judging.findings import CLAIM, Findings
from calfat_plugin.judging.verdict import Verdict, conclude
from calfat_plugin.observer import Observer
from calfat_plugin.peer_text import error_text
from calfat_plugin.report.numbers import percent
from calfat_plugin.results import EVIDENCE
from calfat_plugin.runs.compute import computing_as, describe_environment
from calfat_plugin.runs.loaded_run import Trust, set_up_task
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.datasets import ImageData
    from calfat_plugin.judging.trial import Trial

FILE = "trust.json"
EXAMPLES = 500  # of a large test split, unless the user says how many
FORMAT = 3  # of the file; also a part of the digest
_BEGINS = re.compile(r'\{\s*"format"')  # as every version wrote it, also where the end is lost
_BEGINNING = 1000  # bytes that are looked at to tell whose file it is


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
    task = trial.task
    record = _opened(trial, experiment, facts, path, command)
    full = full or record.full
    names, left_out = playable(VERSIONS["standard"], task.threat, task.num_classes, task.data.x.shape[2])
    for name, reason in left_out.items():
        observer.warn(f"AutoAttack runs without {name}: {reason}.")
    checks = battery(full=full, surrogates=bool(trial.surrogates), square="square" in names)
    in_battery = {check.name for check in checks}
    done = {findings.check: findings for findings in record.evidence if findings.check in in_battery}
    record = replace(record, full=full, evidence=tuple(done.values()))
    record.restore(trial, experiment.evaluation.evidence_mb * 10**6)
    trial.on_progress = observer.evaluation_progress

    def verdict() -> Verdict:
        budget = exact_text(task.threat.eps)
        return conclude(checks, record.evidence, task.threat.norm, budget, len(task.data), available)

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
    record = record.with_images(trial)
    record.save(final, finished=True)
    shutil.rmtree(record.scratch, ignore_errors=True)  # only now is it of no use
    return TrustReport(checks, record.evidence, final, record.path)


def _opened(trial: Trial, experiment: Experiment, facts: Mapping[str, Any], path: Path, command: list[str]) -> Record:
    """The file, with what an earlier process left in it about this very question."""
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


@dataclass(frozen=True)
class Record:
    """The file, and what is known so far."""

    path: Path
    digest: str  # of the question: model, images, budget, seed, other models
    facts: Mapping[str, Any]  # what the file says beside evidence and verdict
    evidence: tuple[Findings, ...] = ()  # of the checks that are done, in order
    robust: Tensor | None = None  # (N,) bool, what no attack has broken yet; None: no check is done
    full: bool = False  # whether all checks were asked for

    @classmethod
    def open(cls, path: Path, digest: str, facts: Mapping[str, Any], examples: int) -> Record:
        """What an earlier process left in the file; nothing where there is none."""
        refuse_unwritable(path.parent, CHOOSE_OUTPUT)
        refuse_link(cls(path, digest, facts).scratch)
        if not path.exists():
            return cls(path, digest, facts)
        content = {}
        if path.is_file() and _BEGINS.match(read_bytes(path, _BEGINNING).decode(errors="replace")):
            content = read_json(path)
        if "verdict" not in content:
            raise RunError(
                f"{path}: is there already, and calfat trust did not write it. It is not overwritten: name another "
                "file with --output."
            )
        if content.get("digest") != digest:
            raise RunError(
                f"{path}: holds the verdict on another model, budget, seed or set of images, or another version's. It "
                "is not overwritten: remove it, or write the new one elsewhere with --output."
            )
        try:
            evidence = tuple(map(Findings.from_json, content["checks"]))
            robust = from_bits(content["robust"], examples)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path}: the file is damaged ({type(error).__name__}: {error}). {RESTORE}") from None
        return cls(path, digest, facts, evidence, robust, content.get("full") is True)

    @property
    def scratch(self) -> Path:
        """Where a check that takes long keeps what it needs to continue."""
        return self.path.with_name(f".{self.path.stem}-{self.digest[:16]}-unfinished")

    @property
    def images(self) -> Path:
        """The file with the adversarial images."""
        return self.path.with_name(f"{self.path.stem}.{EVIDENCE}")

    def restore(self, trial: Trial, max_bytes: int) -> None:
        """Let the trial go on where the file stands, and keep so many bytes of adversarial images."""
        from calfat_plugin.evaluators.evidence import Collector, read_evidence

        trial.scratch = self.scratch
        if max_bytes:
            trial.collector = Collector(trial.task, max_bytes, self.scratch)
            if self.evidence and self.images.is_file():  # of a verdict that --full continues
                trial.collector.restore(read_evidence(self.images))
        if self.robust is not None:
            trial.robust = self.robust.clone()

    def with_images(self, trial: Trial) -> Record:
        """Write the adversarial images beside the file, which says so."""
        from calfat_plugin.evaluators.evidence import write_evidence

        if trial.collector is None:
            return self
        trial.collector.concluded(trial.robust)
        evidence = trial.collector.evidence()
        write_evidence(self.images, evidence, TRY_AGAIN)
        written = [{"file": self.images.name, **evidence.as_json()}]
        return replace(self, facts={**self.facts, "evidence": written})

    def save(self, verdict: Verdict, *, finished: bool) -> None:
        """Write the file atomically."""
        robust = ""
        if self.robust is not None:
            robust = as_bits(self.robust)
        content = {
            "format": FORMAT,
            **self.facts,
            "finished": finished,
            "full": self.full,
            "verdict": dataclasses.asdict(verdict),
            "checks": [findings.as_json() for findings in self.evidence],
            "robust": robust,
            "digest": self.digest,
        }
        write_json(self.path, content, TRY_AGAIN)
