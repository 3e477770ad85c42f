"""What a run directory says about one of its checkpoints: results, attacks, a verdict, and the evidence for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from calfat_plugin.exact import exact_text
from calfat_plugin.results import NATURAL, EvaluationResult
from calfat_plugin.run_files import AttackResults, EvidenceFiles, Results, TrustResults
from calfat_plugin.runs.loaded_run import LoadedRun
from calfat_plugin.stored_run import Run
from calfat_plugin.typed_json import read_typed


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is exported, and what is known of it."""

    stored: Run  # what its directory says
    run: LoadedRun  # the same run, with the checkpoint

    @property
    def name(self) -> str:
        """``last``, ``best-robust`` and the like."""
        return self.run.weights.stem

    @property
    def is_last(self) -> bool:
        """Whether the final evaluation is about it."""
        return self.name == "last"

    @property
    def round(self) -> int:
        return self.run.checkpoint[0].round

    @cached_property
    def results(self) -> Mapping[str, Results | AttackResults]:
        """Name of a file below the run directory to the results in it that are about this checkpoint."""
        results: dict[str, Results | AttackResults] = {}
        if self.is_last and self.stored.final is not None:
            results[self.stored.paths.results_name] = self.stored.final
        for name, attack in self.stored.attacks.items():
            if self._is_subject_of(attack):
                results[name] = attack
        return results

    @cached_property
    def trust(self) -> TrustResults | None:
        """What ``calfat trust`` found out about it; None: it was not asked, or has not finished."""
        trust = self.stored.trust
        if trust is None or not trust.finished or not self._is_subject_of(trust):
            return None
        return trust

    def _is_subject_of(self, content: AttackResults | TrustResults) -> bool:
        """Whether the results of an attack are about this checkpoint as it is now."""
        return Path(content.checkpoint).name == self.run.weights.name and content.round == self.round

    @cached_property
    def budget(self) -> tuple[str, str]:
        """Norm and eps of the recipe, as results write them."""
        threat = self.stored.experiment.threat
        return threat.norm, exact_text(threat.eps)

    @cached_property
    def evidence(self) -> Path | None:
        """The first file of adversarial images within the recipe's budget; None: there is none."""
        for name in self.results:
            file = self.stored.directory / name
            listed = read_typed(EvidenceFiles, file) or EvidenceFiles()
            for entry in listed.evidence:
                path = file.with_name(Path(entry.file).name)
                if (entry.norm, entry.eps) == self.budget and path.is_file():
                    return path
        return None

    @cached_property
    def natural(self) -> EvaluationResult | None:
        """The evaluation of clean images; None: there is none."""
        for evaluation in self._evaluations():
            if evaluation.label == NATURAL:
                return evaluation
        return None

    @cached_property
    def weakest(self) -> EvaluationResult | None:
        """That of the lowest accuracy within the recipe's budget, in whichever file; None: there is none."""
        attacked = []
        for evaluation in self._evaluations():
            ball = (evaluation.settings.get("norm"), evaluation.settings.get("eps"))
            if ball == self.budget and evaluation.accuracy is not None:
                attacked.append((evaluation.accuracy, evaluation))
        if not attacked:
            return None
        _, weakest = min(attacked, key=lambda pair: pair[0])
        return weakest

    def _evaluations(self) -> Sequence[EvaluationResult]:
        evaluations: list[EvaluationResult] = []
        for content in self.results.values():
            evaluations += content.evaluations
        return evaluations
