"""``calfat board verify``: an entry's numbers, shown again here, without trust in whoever made it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calfat_plugin import __version__
from calfat_plugin.analyses.attack import loaded
from calfat_plugin.analyses.attack_plan import AttackPlan
from calfat_plugin.analyses.replay import look, replay
from calfat_plugin.board.entry import BEFORE, CHALLENGES, LAST, TRUST_EVIDENCE, Entry, entry_errors, misfits, read_entry
from calfat_plugin.board.own import Means, again, own_experiment, own_recipe, own_run
from calfat_plugin.board.standing import Standing, of_model, standing, table
from calfat_plugin.board.tracks import Board
from calfat_plugin.disk import TRY_AGAIN, DiskError, read_json, sha256_of, write_json
from calfat_plugin.errors import CalfatError, HostError, RunError, one_line
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import Experiment
from calfat_plugin.judging.examine import FILE as TRUST
from calfat_plugin.judging.examine import examine
from calfat_plugin.judging.verdict import word_of
from calfat_plugin.maths.intervals import wilson
from calfat_plugin.observer import Observer, RunObserver
from calfat_plugin.report.numbers import interval, percent
from calfat_plugin.results import EVIDENCE, WORST_CASE, State
from calfat_plugin.rounds_csv import read_rounds
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import LoadedRun

if TYPE_CHECKING:
    from calfat_plugin.evaluators.evidence import Evidence

_COMMAND = ["calfat", "board", "verify"]
IMAGES = 64  # that `calfat trust` is asked about again
#: How much farther from the entry's weights than from themselves in another arithmetic the rounds that are trained
#: again may end: up to 1.5 times was measured of honest entries (docs/howto/board.md).
FARTHER = 2
NEAR = 0.05  # of the way that the rounds moved the weights: so far apart nobody has gained anything
#: Vector units of this processor, and those with which PyTorch computes otherwise on it.
_OTHER_UNITS = {"AVX512": "avx2", "AVX2": "default", "SVE256": "default"}


class NoMeasureError(RunError):
    """Weights differ, and this machine cannot say what that means."""


class Line(NamedTuple):
    """Something that was seen of an entry."""

    text: str
    against: bool = False  # whether the entry does not stand because of it


@dataclass(frozen=True)
class Verified:
    """What came of it: the entry stands where there are no reasons against it."""

    track: str
    name: str
    revision: str
    reasons: tuple[str, ...]
    found: tuple[str, ...]  # what was seen, a line each
    standing: Standing | None

    @property
    def stands(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        facts = {"entry": f"{self.track}/{self.name}", "revision": self.revision, "stands": self.stands}
        counted = None if self.standing is None else self.standing.as_json()
        return {**facts, "reasons": list(self.reasons), "found": list(self.found), "standing": counted}


def verify(
    board: Board,
    track: str,
    name: str,
    means: Means,
    observer: Observer,
    *,
    from_start: bool = False,
    within: float | None = None,
) -> Verified:
    """Verify one entry, and note what came of it for the page.

    Args:
        from_start: train all rounds again, not the last two alone.
        within: how far what is trained again may end from the entry's weights; 0: the same bits; None: as far as two
            arithmetics of this processor do, with some room.
    """
    reasons: list[str] = []
    found: list[str] = []
    revision, counted, digests = board.revision(), None, {}

    def see(line: Line) -> None:
        """Say it at once: what follows may take hours, and may end without a verdict."""
        if not line.against:
            found.append(line.text)
            observer.say(f"  {line.text}")
        elif line.text not in reasons:
            reasons.append(line.text)
            observer.say(f"  does not stand: {line.text}")

    try:
        entry = read_entry(board, track, name)
        digests = digests_of(entry)
        with entry_errors(entry):
            for reason in misfits(entry, board.tracks[track]):
                see(Line(reason, against=True))
        _challenges_in_place(entry)
    except CalfatError as error:
        see(Line(str(error), against=True))
    else:
        if not reasons:
            _load_data(entry, means)
            for seed in entry.seeds:
                observer.say(f"{track}/{name}, seed {seed}")
                for line in verify_seed(entry, seed, revision, means, from_start, within):
                    see(line._replace(text=f"seed {seed}: {line.text}"))
        try:
            counted = standing(entry)
        except CalfatError as error:
            see(Line(str(error), against=True))
    done = Verified(track, name, revision, tuple(reasons), tuple(found), counted)
    record = board.record(track, name)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, {**done.as_json(), "digests": digests, "by": __version__}, TRY_AGAIN)
    return done


def digests_of(entry: Entry) -> dict[str, str]:
    """What a verification is about: the entry, and the challenges that it had."""
    files = {path.name: sha256_of(path) for path in entry.challenges}
    return {"entry": entry.digest, **files}


def _load_data(entry: Entry, means: Means) -> None:
    """Fail where the data are not here: that is no fault of the entry's."""
    try:
        with entry_errors(entry):
            experiment = own_experiment(own_recipe(entry, entry.seeds[0], means))
    except CalfatError:
        return  # said of each seed
    experiment.load_dataset()


def chosen_images(entry: Entry, revision: str, seed: int, tried: list[int]) -> list[int]:
    """The images to be attacked again: nobody knows them before the entry is in the board's repository."""

    def rank(image: int) -> str:
        return hashlib.sha256(f"{entry.digest} {revision} {seed} {image}".encode()).hexdigest()

    return sorted(sorted(tried, key=rank)[:IMAGES])


def verify_seed(
    entry: Entry, seed: int, revision: str, means: Means, from_start: bool = False, within: float | None = None
) -> Iterator[Line]:
    """What is seen of one model.

    Raises:
        CalfatError: something goes wrong here, which is no fault of the entry's.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="calfat-board-") as temporary:
        try:
            with entry_errors(entry):
                folder, experiment, plan = own_run(entry, seed, means, Path(temporary))
                yield from _replayed(entry, seed, folder, loaded(plan, Observer()), experiment)
                yield from _attacked_again(entry, seed, revision, plan, folder / "again.json")
                yield from _trained_again(entry, seed, means, Path(temporary), from_start, within)
        except (NoMeasureError, DiskError, HostError):
            raise
        except torch.OutOfMemoryError as error:
            raise RunError(f"{entry.of(seed)}: the memory of the device is not enough ({error})") from None
        except CalfatError as error:
            yield Line(str(error), against=True)


def _replayed(entry: Entry, seed: int, folder: Path, run: LoadedRun, experiment: Experiment) -> Iterator[Line]:
    """One forward pass over the evidence, and over that of the challenges."""
    images = len(run.dataset.test)
    for name in (EVIDENCE, TRUST_EVIDENCE):
        done = replay(run, folder / name)
        if name == EVIDENCE and len(done.data) != images:
            yield Line(f"{name} is about {len(done.data)} images; the test split has {images}", against=True)
        if not done.numbers or (name == TRUST_EVIDENCE and done.numbers[-1].label != WORST_CASE):
            yield Line(f"{name} supports no number", against=True)
        for number in done.numbers:
            if not number.stands:
                said, shown = percent(number.said), percent(number.shown)
                yield Line(f"{number.label} does not stand: {said} said, {shown} shown", against=True)
        yield Line(f"{name}: {int(done.falls.sum())} of {len(done.falls)} adversarial images fall")
        if name == EVIDENCE:
            yield from (Line(reason, against=True) for reason in _left_out(experiment, done.evidence))
    for file in entry.challenges:
        if of_model(entry, file) == seed:
            yield from (Line(reason, against=True) for reason in refused(run, file))


def _left_out(experiment: Experiment, evidence: Evidence) -> Iterator[str]:
    """Which attacks of the recipe were not run on all images that they take, so that the worst case is of fewer."""
    from calfat_plugin.evaluators.base import BudgetOptions, budget_as_json

    for attack in experiment.evaluators:
        options = attack.options
        if not isinstance(options, BudgetOptions) or budget_as_json(options.threat(experiment.threat)) != evidence.ball:
            continue
        found = int(evidence.tried[attack.label].sum()) if attack.label in evidence.tried else 0
        wanted = min(len(evidence.label), options.max_examples or len(evidence.label))
        if found != wanted:
            yield f"{attack.label} was run on {found} images; by its recipe it is {wanted}"


def refused(run: LoadedRun, file: Path) -> Iterator[str]:
    """Why a challenge proves nothing: an image of it does not fall, or it is about another ball."""
    shown, threat = look(run, file), run.experiment.threat
    ball, of_track = [shown.evidence.facts[key] for key in ("norm", "eps")], [threat.norm, exact_text(threat.eps)]
    if ball != of_track:
        yield f"{file.name}: is about the ball {' '.join(ball)}; the track's is {' '.join(of_track)}"
    for doubt in shown.doubts:
        if not doubt.borderline:
            what = "does not fall" if doubt.what == "falls" else "is of another class when clean"
            yield f"{file.name}: image {doubt.image} {what}"


def _attacked_again(entry: Entry, seed: int, revision: str, plan: AttackPlan, output: Path) -> Iterator[Line]:
    """``calfat trust`` on images that nobody could foresee, image by image against what the entry says."""
    from calfat_plugin.evaluators.autoattack.autoattack import from_bits

    _, tried, right, _ = table(entry, seed)
    images = chosen_images(entry, revision, seed, tried.nonzero().flatten().tolist())
    done = examine(plan, (), full=False, output=output, command=_COMMAND, observer=Observer(), images=images)
    robust = from_bits(read_json(output)["robust"], len(images))
    said = right[images]
    shares = [int(each.sum()) / len(images) for each in (said, said & robust, said & ~robust)]
    lost = shares[2]
    text = (
        f"of {len(images)} images, {percent(shares[0])} withstand by the entry, and {percent(shares[1])} withstand "
        "`calfat trust` here, too"
    )
    yield Line(text)
    if word_of(lost, wilson(lost, len(images))) == "overstated":
        points = f"{100 * lost:.1f} points fewer {interval(*wilson(lost, len(images)))}"
        yield Line(f"{text}: {points}", against=True)
    theirs, ours = read_json(entry.of(seed) / TRUST)["verdict"], done.verdict
    if theirs.get("usable", True) and not ours.usable:
        yield Line(f"its {TRUST} says '{theirs['word']}'; here: {ours.sentence}", against=True)


def _trained_again(
    entry: Entry, seed: int, means: Means, temporary: Path, from_start: bool, within: float | None
) -> Iterator[Line]:
    """Its last two rounds, or all, from the stored model and with the data here."""
    from calfat_plugin.runs import session
    from calfat_plugin.runs.request import Request

    before, last = (load_checkpoint(entry.of(seed) / file)[0] for file in (BEFORE, LAST))
    rounds = entry.recipe(seed).get(("train_args", "comm_round"))
    rows = read_rounds(entry.of(seed) / "rounds.csv")
    there = [row.get("round") for row in rows]
    if (before.round, last.round, there) != (rounds - 2, rounds, [str(number + 1) for number in range(rounds)]):
        which = f"the rounds {before.round} and {last.round}, and rounds.csv has {len(rows)} rows"
        yield Line(f"its models are of {which}; its recipe has {rounds} rounds", against=True)
        return
    experiment, path = again(entry, seed, means, temporary, from_start=from_start)
    request = Request(experiment, path, resume=not from_start, command=_COMMAND, page=False)
    session.run(request, RunDirectory(path), RunObserver())
    mine, _ = load_checkpoint(RunDirectory(path).last_checkpoint)
    first = before.global_state
    if from_start:
        first = experiment.build_model(experiment.load_dataset(), experiment.build_trainer()).state_dict()
    distance = relative_distance(first, mine.global_state, last.global_state)
    what = f"{rounds} rounds" if from_start else "two rounds"
    how = "the same bits" if distance == 0 else f"{distance:.2g} of the way that they moved the weights apart"
    if within is None and distance != 0:
        drift = relative_distance(first, mine.global_state, _other_arithmetic(entry, seed, means, path, from_start))
        within = max(NEAR, FARTHER * drift)
        how += f"; two arithmetics of this processor end {drift:.2g} apart"
    yield Line(f"{what} trained again: {how}")
    if within is not None and not distance <= within:
        yield Line(f"{what} trained again end elsewhere: {how} (at most {within:.2g} is accepted)", against=True)
    of_clients = [read_json(folder / "partition.json") for folder in (entry.of(seed), path)]
    for key in ("class_names", "class_counts", "attackers"):  # of which the worst clients are counted
        theirs, ours = (partition.get(key) or [] for partition in of_clients)
        if theirs != ours:
            yield Line(f"its partition.json says {key} {one_line(theirs)}; here: {one_line(ours)}", against=True)
    for said, here in zip(rows, read_rounds(path / "rounds.csv"), strict=True):  # earlier ones may be copies
        if said.get("passes") != here.get("passes"):
            passes = f"{here.get('passes')} passes; its rounds.csv says {said.get('passes')}"
            yield Line(f"round {here['round']} makes {passes}", against=True)


def _other_arithmetic(entry: Entry, seed: int, means: Means, path: Path, from_start: bool) -> State:
    """The weights that the same rounds end with where this processor may not use its widest vector units.

    Sums are rounded otherwise then, and that is all that honest processors differ in. Which units PyTorch uses is fixed
    when it is imported, so a process of its own trains.
    """
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _OTHER_UNITS:
        raise NoMeasureError(
            f"{entry.of(seed)}: its weights are not those that this processor ({capability}) makes, which has no "
            "second arithmetic to measure what that means. Verify on another one, or say with --within how far the "
            "weights may end."
        )
    folder = path.with_name(f"{path.name}-otherwise")
    _, other = again(entry, seed, replace(means, device=None), folder, from_start=from_start)
    run = RunDirectory(other)
    options = ["--run-dir", str(other), "--plain", "--no-page", "--resume"]
    done = subprocess.run(
        [sys.executable, "-m", "calfat_plugin.cli.main", "run", str(run.recipe), *options],
        env={**os.environ, "ATEN_CPU_CAPABILITY": _OTHER_UNITS[capability]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip()[-500:] or f"exit code {done.returncode}"
        raise NoMeasureError(f"{entry.of(seed)}: its rounds cannot be trained in a process of their own: {why}")
    return load_checkpoint(run.last_checkpoint)[0].global_state


def relative_distance(before: Any, mine: Any, other: Any) -> float:
    """How far ``other`` is from ``mine``, as a share of how far ``mine`` is from ``before``; 0: the same bits."""
    import torch

    if mine.keys() != other.keys() or mine.keys() != before.keys():
        raise RunError("its checkpoints hold tensors of other names than its network has.")
    if all(torch.equal(mine[name], other[name]) for name in mine):
        return 0.0
    apart = sum(float((mine[name].double() - other[name].double()).square().sum()) for name in mine)
    moved = sum(float((mine[name].double() - before[name].double()).square().sum()) for name in mine)
    return float((apart / moved) ** 0.5) if moved else float("inf")


def _challenges_in_place(entry: Entry) -> None:
    for path in (entry.folder / CHALLENGES).glob("*"):
        if path not in entry.challenges:
            raise RunError(f"{path}: is no challenge; they are files of evidence, NAME.safetensors.")
    for path in entry.challenges:
        of_model(entry, path)
