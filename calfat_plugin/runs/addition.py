"""Evaluators that are added to a finished run: they measure its last checkpoint, and what was measured before stays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.evidence import Evidence, read_evidence
from calfat_plugin.experiment import Experiment
from calfat_plugin.results import RESULTS_FORMAT, WORST_CASE, EvaluationResult
from calfat_plugin.run_files import read_results
from calfat_plugin.runs.directory import RunDirectory


@dataclass(frozen=True)
class Addition:
    """What a finished run has measured, and what it is to measure beside."""

    experiment: Experiment  # its final evaluation has the added evaluators alone
    labels: tuple[str, ...]  # of all evaluators that are asked for, in the recipe's order
    earlier: tuple[EvaluationResult, ...]  # of the results, the worst case included
    evidence: Evidence | None  # of them; None where none was kept
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
        evidence = read_evidence(directory.evidence) if directory.evidence.exists() else None
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
        order = [*self.labels, *(label for label in by_label if label not in self.labels)]
        evaluations = [by_label[label] for label in order]
        # Without evidence of the earlier attacks, nobody knows which images they broke.
        attacked_before = any(result.settings.get("attack") != "none" for result in self.earlier)
        if self.evidence is not None or not attacked_before:
            evaluations += [result for result in added if result.label == WORST_CASE]
        return tuple(evaluations)
