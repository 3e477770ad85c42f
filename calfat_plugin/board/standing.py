"""Where an entry stands: its best-known worst case, counted image by image over its evidence and all challenges."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.board.entry import TRUST_EVIDENCE, Entry, entry_errors, passes
from calfat_plugin.disk import read_json
from calfat_plugin.errors import RunError
from calfat_plugin.judging.examine import FILE as TRUST
from calfat_plugin.maths.intervals import Score
from calfat_plugin.maths.worst import honest_counts, worst_class, worst_clients
from calfat_plugin.results import EVIDENCE, WORST_CASE

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.evaluators.evidence import Evidence


@dataclass(frozen=True)
class SeedStanding:
    """What is known of the model of one seed. Accuracies are fractions in [0, 1]."""

    images: int
    natural: float
    claimed: float  # what its own final evaluation leaves
    worst: float  # what that, its trust and all challenges leave together
    worst_class: float | None
    worst_clients: float | None
    passes: float  # nan where they are not counted
    verdict: str  # of its own `calfat trust`


@dataclass(frozen=True)
class Standing:
    """Of an entry: seed to what is known of it, and who lowered it, by how many images."""

    by_seed: dict[int, SeedStanding]
    challengers: dict[str, int]

    def score(self, field: str) -> Score:
        """A field over the seeds that have it."""
        found = {seed: getattr(each, field) for seed, each in self.by_seed.items()}
        known = {seed: value for seed, value in found.items() if value is not None and not math.isnan(value)}
        return Score(known, min(each.images for each in self.by_seed.values()), field != "passes")

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        seeds = {
            str(seed): {key: None if value != value else value for key, value in vars(each).items()}
            for seed, each in self.by_seed.items()
        }
        return {"worst": self.score("worst").mean, "seeds": seeds, "challengers": self.challengers}


def standing(entry: Entry) -> Standing:
    """Count; the files are believed here, ``verify`` and ``challenge`` check them."""
    found, challengers = {}, dict.fromkeys((path.stem for path in entry.challenges), 0)
    with entry_errors(entry):
        for seed in entry.seeds:
            evidence, tried, right, lowered = table(entry, seed)
            for name, images in lowered.items():
                challengers[name] += images
            found[seed] = _counted(entry.of(seed), evidence, tried, right)
    return Standing(found, challengers)


def table(entry: Entry, seed: int) -> tuple[Evidence, Tensor, Tensor, dict[str, int]]:
    """(evidence of the final evaluation, images that it tried, those that withstand all, challenger to images).

    Both are (N,) bool over the test split.
    """
    from calfat_plugin.evaluators.base import fixed_subset
    from calfat_plugin.evaluators.evidence_file import read_evidence

    path = entry.of(seed) / EVIDENCE
    evidence = read_evidence(path)
    if not evidence.tried:
        raise RunError(f"{path}: no attack of the final evaluation kept evidence, so there is no worst case.")
    tried, right = evidence.verdicts(WORST_CASE)
    right, lowered = right.clone(), {}
    for file in (entry.of(seed) / TRUST_EVIDENCE, *entry.challenges):
        more = read_evidence(file)
        if more.facts.get("weights") != evidence.facts.get("weights"):
            continue  # about the model of another seed
        fallen = fixed_subset(len(right), len(more.label))[more.index]
        if file in entry.challenges:
            lowered[file.stem] = int(right[fallen].sum())
        right[fallen] = False
    return evidence, tried, right, lowered


def of_model(entry: Entry, path: Path) -> int:
    """The seed whose model evidence is about."""
    from calfat_plugin.evaluators.evidence_file import read_evidence

    weights = read_evidence(path).facts.get("weights")
    for seed in entry.seeds:
        if read_evidence(entry.of(seed) / EVIDENCE).facts.get("weights") == weights:
            return seed
    raise RunError(
        f"{path}: is about other weights (SHA-256 {weights}) than those of the seeds of {entry.folder}. Attack a model "
        f"of the entry: {shlex.join(['calfat', 'attack', str(entry.of(entry.seeds[0]))])}"
    )


def _counted(run: Path, evidence: Evidence, tried: Tensor, right: Tensor) -> SeedStanding:
    from calfat_plugin.evaluators.base import counts_of

    partition = read_json(run / "partition.json")
    classes, counts = len(partition["class_names"]), partition["class_counts"]

    def counted(verdicts: Tensor) -> tuple[float, Sequence[float | None]]:
        found = counts_of(evidence.label[tried], evidence.correct[tried], verdicts[tried], classes)
        return found["accuracy"], found["per_class"]

    worst, per_class = counted(right)
    of_class = worst_class(per_class)
    of_clients = worst_clients(per_class, honest_counts(counts, partition.get("attackers") or ()))
    return SeedStanding(
        images=int(tried.sum()),
        natural=counted(evidence.correct)[0],
        claimed=counted(evidence.verdicts(WORST_CASE)[1])[0],
        worst=worst,
        worst_class=None if of_class is None else of_class.accuracy,
        worst_clients=None if of_clients is None else of_clients.accuracy,
        passes=passes(run),
        verdict=str(read_json(run / TRUST)["verdict"]["word"]),
    )
