"""What a run directory says about one of its checkpoints: results, attacks, a verdict, and the evidence for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calfat_plugin.exact import exact_text
from calfat_plugin.report.reading import RunFiles
from calfat_plugin.results import NATURAL
from calfat_plugin.runs.loaded_run import LoadedRun

Evaluation = Mapping[str, Any]  # as in results.json


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is exported, and what is known of it."""

    files: RunFiles  # the run directory
    run: LoadedRun  # the same, with the checkpoint

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
    def results(self) -> Mapping[str, Mapping[str, Any]]:
        """Name of a file below the run directory to the results in it that are about this checkpoint."""
        results: dict[str, Mapping[str, Any]] = {}
        if self.is_last and self.files.finished:
            results["results.json"] = self.files.results
        for name, content in self.files.attacks.items():
            if self._is_subject_of(content):
                results[name] = content
        return results

    @cached_property
    def trust(self) -> Mapping[str, Any] | None:
        """What ``calfat trust`` found out about it; None: it was not asked, or has not finished."""
        trust = self.files.trust
        return trust if trust.get("finished") and self._is_subject_of(trust) else None

    def _is_subject_of(self, content: Mapping[str, Any]) -> bool:
        """Whether the results of an attack are about this checkpoint as it is now."""
        named = Path(str(content.get("checkpoint"))).name
        return named == self.run.weights.name and content.get("round") == self.round

    @cached_property
    def budget(self) -> tuple[str, str]:
        """Norm and eps of the recipe, as results write them."""
        threat = self.files.recipe.threat
        return threat.norm, exact_text(threat.eps)

    @cached_property
    def evidence(self) -> Path | None:
        """The first file of adversarial images within the recipe's budget; None: there is none."""
        for name, content in self.results.items():
            folder = (self.files.path / name).parent
            for entry in content.get("evidence") or ():
                path = folder / Path(entry["file"]).name
                if (entry["norm"], entry["eps"]) == self.budget and path.is_file():
                    return path
        return None

    @cached_property
    def natural(self) -> Evaluation | None:
        """The evaluation of clean images; None: there is none."""
        for evaluation in self._evaluations():
            if evaluation["label"] == NATURAL:
                return evaluation
        return None

    @cached_property
    def weakest(self) -> Evaluation | None:
        """That of the lowest accuracy within the recipe's budget, in whichever file; None: there is none."""
        attacked = []
        for evaluation in self._evaluations():
            settings = evaluation.get("settings") or {}
            if (settings.get("norm"), settings.get("eps")) == self.budget and evaluation["accuracy"] is not None:
                attacked.append(evaluation)
        return min(attacked, key=lambda evaluation: float(evaluation["accuracy"]), default=None)

    def _evaluations(self) -> Sequence[Evaluation]:
        evaluations: list[Evaluation] = []
        for content in self.results.values():
            evaluations += content.get("evaluations") or ()
        return evaluations
