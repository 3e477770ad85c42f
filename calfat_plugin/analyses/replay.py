"""Check the numbers of a finished evaluation by the adversarial images that it kept: one forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calfat_plugin.analyses.attack import loaded, planned
from calfat_plugin.analyses.exported import open_exported
from calfat_plugin.disk import TRY_AGAIN, read_json, reporting_disk_errors
from calfat_plugin.errors import BudgetError, OptionError, RunError
from calfat_plugin.exact import exact_text
from calfat_plugin.observer import Observer
from calfat_plugin.report.images import perturbation, png
from calfat_plugin.results import EVIDENCE, NATURAL, WORST_CASE
from calfat_plugin.run_files import AttackResults, EvidenceFile, EvidenceFiles, TrustResults, check_evaluations
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import LoadedRun, Trust, distrust, near
from calfat_plugin.typed_json import read_typed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.datasets import ImageData
    from calfat_plugin.evaluators.evidence import Evidence
    from calfat_plugin.model_files import ModelFile

#: Of the largest logit. Processors add up a model's sums in different orders, so an image whose classes are as close as
#: this may fall on one and not on the other.
BORDERLINE = 1e-5


@dataclass(frozen=True)
class Doubt:
    """An image of which this machine finds something else than the evidence says."""

    image: int  # its position in the test split
    # ``clean``: another class for the clean image; ``falls``: the adversarial image is classified correctly;
    # ``missing``: nothing shows that it falls.
    what: str
    attack: str  # whose adversarial image it is, or who says that it falls; empty for a clean image
    borderline: bool  # whether the classes are closer than processors agree about (:data:`BORDERLINE`)


@dataclass(frozen=True)
class Number:
    """An accuracy of the results, and what the evidence shows of it."""

    label: str  # the evaluator
    said: float  # the accuracy in the results, a fraction in [0, 1]
    shown: float  # the share that withstands by the tables of the evidence, over the same images
    num_examples: int  # images that it was counted over
    checked: int  # those that this replay could check: clean, or with an adversarial image that is kept
    stands: bool  # whether both are the same, and no checked image is in doubt beyond rounding


class _Accuracy(NamedTuple):
    """An accuracy in results."""

    label: str
    share: float
    num_examples: int
    per_class: tuple[float | None, ...]


@dataclass(frozen=True, eq=False)
class Replay:
    """What this machine finds of a file of evidence, and of the numbers that are said to follow from it.

    Attributes:
        path: the file of evidence.
        evidence: whose adversarial images are all in the ball and in the pixel range, and of this data and model.
        data: the N test images that it is about.
        positions: (N,) of these in the test split.
        model: the run's own, in evaluation mode.
        falls: (K,) bool, which of the adversarial images the model that was asked gets wrong here.
        doubts: images of which this machine finds something else, by their positions.
        numbers: one an evaluator whose examples the evidence has.
        without: labels of evaluators that it has nothing of.
        model_file: the exported file that was asked in the model's place; None: the model was.
        difference: the largest distance of a logit of this file to the model's own, over all images; 0 without a file.
        eight_bit: whether images were rounded to 8 bits a value before they were shown.
    """

    path: Path
    evidence: Evidence
    data: ImageData
    positions: Tensor
    model: nn.Module
    falls: Tensor
    doubts: tuple[Doubt, ...]
    numbers: tuple[Number, ...]
    without: tuple[str, ...]
    model_file: ModelFile | None = None
    difference: float = 0.0
    eight_bit: bool = False

    @property
    def stands(self) -> bool:
        """Whether all numbers do."""
        return all(number.stands for number in self.numbers)

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        numbers = [vars(number) for number in self.numbers]
        doubts = [vars(doubt) for doubt in self.doubts]
        asked: dict[str, Any] = {"eight_bit": self.eight_bit}
        if self.model_file is not None:
            asked["model_file"] = str(self.model_file.path)
            asked["runtime"] = self.model_file.runtime
            asked["logit_difference"] = self.difference
        return {
            **asked,
            "evidence": str(self.path),
            "stands": self.stands,
            "images": len(self.falls),
            "fall": int(self.falls.sum()),
            "numbers": numbers,
            "without_evidence": list(self.without),
            "doubts": doubts,
        }


def open_evidence(target: Path, **request: Any) -> tuple[LoadedRun, Path]:
    """The model that evidence is about, and its file.

    Args:
        target: a run directory, or a file in it, in its ``attacks/``, or about a model of the user's own.
        request: fields of an ``AttackRequest``: that model, where the data and the device are, plugins and who trusts
            them.
    """
    path = target
    if target.is_dir():
        path = target / EVIDENCE
    if not path.is_file():
        hint = near(path)
        if RunDirectory(target).recipe.is_file():
            hint = " The run is not finished, or its recipe says calfat.evaluation.evidence_mb: 0."
        raise RunError(f"{path}: no such file.{hint}")
    run = None
    if not (request.get("model") or request.get("weights") or request.get("dataset")):
        run = next((folder for folder in path.parents[:2] if RunDirectory(folder).recipe.is_file()), None)
        if run is None:
            raise RunError(
                f"{path}: lies in no run directory, so nothing says what model it is about. Add --model, --weights "
                "and --dataset, as for `calfat attack`."
            )
    plan = planned(run, attacks=("natural",), **request)
    return loaded(plan, Observer()), path


def replay(
    run: LoadedRun, path: Path, *, model_file: Path | None = None, eight_bit: bool = False, trust: Trust = distrust
) -> Replay:
    """Check evidence against data and model, and the results beside it against the evidence.

    Args:
        run: whose model the evidence is about.
        path: the file of evidence.
        model_file: an exported file of this model, which is asked in its place.
        eight_bit: whether to round images to 8 bits a value, as cameras and browsers deliver them, before they are
            shown.
        trust: is asked about a ``.pt2`` file that this user did not export.

    Raises:
        RunError: the file is damaged, or it is no evidence about this model, these data and this ball: the text says
            what differs, and at which image. Likewise for ``model_file``.
    """
    from calfat_plugin.datasets.batches import batches
    from calfat_plugin.evaluators.base import fixed_subset, subset
    from calfat_plugin.evaluators.evidence import read_evidence

    evidence = read_evidence(path)
    test = run.dataset.test
    if len(evidence.label) > len(test):
        raise RunError(f"{path}: is about {len(evidence.label)} test images; {run.dataset.name} has {len(test)}.")
    positions = fixed_subset(len(test), len(evidence.label))
    data = subset(test, len(evidence.label)).to(run.device)
    model = run.model()
    _refuse_others(path, evidence, data, model, run)
    _check_ball(path, evidence, data, positions, run)
    batch_size = run.experiment.evaluation.batch_size
    network, exported, difference = _ask_network(model), None, 0.0
    if model_file is not None:
        exported = open_exported(model_file, run, model, trust)

    def ask(x: Tensor) -> Tensor:
        nonlocal difference
        if eight_bit:
            x = rounded_to_8_bits(x)
        logits_of_network = network(x)
        if exported is None:
            return logits_of_network
        logits = exported.ask(x)
        expected = tuple(logits_of_network.shape)
        if tuple(logits.shape) != expected:
            what = f"gives {tuple(logits.shape)} for images {tuple(x.shape)}; expected logits {expected}"
            raise RunError(f"{exported.path}: {what}.")
        difference = max(difference, float((logits - logits_of_network).abs().max()))
        return logits

    clean_images = (x for x, _, _ in batches(data, batch_size, run.device))
    clean = _answers(ask, clean_images, evidence.clean)
    adversarial_images = evidence.x_adv.to(run.device).split(batch_size)
    adversarial = _answers(ask, adversarial_images, evidence.label[evidence.index])
    doubts = _doubts(evidence, positions, clean, adversarial)
    accuracies, without = _accuracies(path, evidence)
    numbers = []
    for accuracy in accuracies:
        number, missing = _number(accuracy, evidence, run.dataset.num_classes, positions, doubts)
        numbers.append(number)
        doubts += missing
    return Replay(
        path=path,
        evidence=evidence,
        data=data,
        positions=positions,
        model=model,
        falls=adversarial[0] != evidence.label[evidence.index],
        doubts=tuple(doubts),
        numbers=tuple(numbers),
        without=without,
        model_file=exported,
        difference=difference,
        eight_bit=eight_bit,
    )


def _doubts(
    evidence: Evidence, positions: Tensor, clean: tuple[Tensor, Tensor], adversarial: tuple[Tensor, Tensor]
) -> list[Doubt]:
    """The images of which the model says something else than the evidence.

    ``clean`` and ``adversarial`` are what the model says, and by how much the class that is expected leads.
    """
    doubts = []
    predictions, leads = clean
    for at in (predictions != evidence.clean).nonzero().flatten().tolist():
        doubts.append(Doubt(int(positions[at]), "clean", "", bool(leads[at] > -BORDERLINE)))
    predictions, leads = adversarial
    for row in (predictions == evidence.label[evidence.index]).nonzero().flatten().tolist():
        image = int(positions[evidence.index[row]])
        attack = evidence.attacks[int(evidence.by[row])]
        doubts.append(Doubt(image, "falls", attack, bool(leads[row] < BORDERLINE)))
    return doubts


def _refuse_others(path: Path, evidence: Evidence, data: ImageData, model: nn.Module, run: LoadedRun) -> None:
    """Refuse evidence about other images, labels or weights."""
    import torch

    from calfat_plugin.evaluators.base import fixed_subset
    from calfat_plugin.maths.tied import state_of
    from calfat_plugin.tensor_files import digest_of

    for name, tensors, what in (
        ("data", {"x": data.x, "y": data.y}, f"test images than {run.dataset.name} has here"),
        ("weights", state_of(model), f"weights than {run.weights} has"),
    ):
        now = digest_of(tensors)
        if evidence.facts.get(name) != now:
            raise RunError(
                f"{path}: is about other {what} (SHA-256 {evidence.facts.get(name)}; here {now}). Replay it with the "
                "run that it is of, its checkpoint (--checkpoint), and the same data."
            )
    shape = tuple(data.x.shape[1:])
    if tuple(evidence.x_adv.shape[1:]) != shape or tuple(evidence.x_shown.shape[1:]) != shape:
        raise RunError(f"{path}: its images are {tuple(evidence.x_adv.shape[1:])}; those of the data are {shape}.")
    wrong = (evidence.label != data.y.cpu()).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise RunError(
            f"{path}: says that image {at} is of class {int(evidence.label[at])}; its label is {int(data.y[at])}."
        )
    for name, tried in evidence.tried.items():
        if not torch.equal(tried.nonzero().flatten(), fixed_subset(len(tried), int(tried.sum()))):
            raise RunError(f"{path}: says that {name} was run on images that no evaluation chooses.")
    right = evidence.correct[evidence.index]
    if not bool(right.all()):
        at = int(evidence.index[~right][0])
        raise RunError(f"{path}: has an adversarial image of image {at}, which it says was wrong when clean.")
    if not torch.equal(evidence.x_shown, _pixels(data, evidence.shown)):
        raise RunError(f"{path}: its clean images (`x_shown`) are not those of the data.")


def _check_ball(path: Path, evidence: Evidence, data: ImageData, positions: Tensor, run: LoadedRun) -> None:
    """Refuse another ball than the recipe's, and the first adversarial image that is not in the ball that is named.

    Or that is not finite, or not in the pixel range.
    """
    from calfat_plugin.threat import ThreatModel

    recipe = run.experiment.threat
    norm, eps = evidence.ball["norm"], evidence.ball["eps"]
    try:
        threat = ThreatModel(norm, eps, bounds=recipe.bounds)
    except OptionError as error:
        raise RunError(f"{path}: its ball is {norm} {eps}: {error}") from None
    if path.name == EVIDENCE and (threat.norm, threat.eps) != (recipe.norm, recipe.eps):
        raise RunError(
            f"{path}: is about the {norm} ball of eps {eps}; the recipe's is {recipe.norm} {exact_text(recipe.eps)}."
        )
    x = _pixels(data, evidence.index)
    try:
        threat.check(evidence.x_adv, x, who=str(path))
        return
    except BudgetError as error:
        problem = error
    for row, at in enumerate(evidence.index.tolist()):
        try:
            threat.check(evidence.x_adv[row : row + 1], x[row : row + 1], who="")
        except BudgetError as error:
            reason = str(error).removeprefix(": ").split(";")[0]
            raise RunError(
                f"{path}: the adversarial image of test image {int(positions[at])}: {reason}. It proves nothing."
            ) from None
    raise problem


def _pixels(data: ImageData, where: Tensor) -> Tensor:
    """Clean images at (n,) positions, float32 on the CPU."""
    from calfat_plugin.datasets.data import pixels

    return pixels(data.x[where.to(data.x.device)]).cpu()


def rounded_to_8_bits(x: Tensor) -> Tensor:
    """The same pixels in [0, 1] as a PNG file holds them, any shape."""
    return (x * 255).round() / 255


def _ask_network(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What gives the network's logits on the CPU, without gradients, in its full precision."""
    import torch

    from calfat_plugin.maths.passes import float32_as

    def ask(x: Tensor) -> Tensor:
        with torch.no_grad(), float32_as("fp32", x.device):
            logits: Tensor = model(x)
            return logits.float().cpu()

    return ask


def _answers(ask: Callable[[Tensor], Tensor], images: Iterable[Tensor], expected: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says, (n,) int64, and by which share of the largest logit the expected class leads, (n,)."""
    import torch

    from calfat_plugin.evaluators.base import finite
    from calfat_plugin.evaluators.gradient import margin

    if not len(expected):
        return expected, expected.float()
    logits = torch.cat([finite(ask(x), "images") for x in images])
    return logits.argmax(dim=1), margin(logits, expected) / logits.abs().max().clamp_min(1e-30)


def _accuracies(path: Path, evidence: Evidence) -> tuple[list[_Accuracy], tuple[str, ...]]:
    """(accuracies that the results say of this ball and that the evidence is about, labels of the others)."""
    file, listed = _results_beside(path)
    stated = {"norm": listed.norm, "eps": listed.eps}
    if stated != evidence.ball:
        raise RunError(f"{path}: is about the ball {evidence.ball}; {file} says {stated}.")
    accuracies, without = [], []
    if "verdict" in read_json(file):  # of `calfat trust`
        trust = read_typed(TrustResults, file)
        if trust is not None:
            for label, share in ((NATURAL, trust.verdict.natural), (WORST_CASE, trust.verdict.worst)):
                if share is not None:
                    accuracies.append(_Accuracy(label, share, trust.examples, ()))
        return accuracies, ()
    results = read_typed(AttackResults, file) or AttackResults()
    check_evaluations(results.evaluations, file)
    for result in results.evaluations:
        of_ball = {key: result.settings.get(key) for key in evidence.ball} == evidence.ball
        if result.accuracy is None:
            continue  # the attack did not run: there is no number to show
        if result.settings.get("attack") == "none":
            accuracies.append(_Accuracy(NATURAL, result.accuracy, result.num_examples, result.per_class))
        elif of_ball and (result.label in evidence.tried or result.label == WORST_CASE):
            accuracies.append(_Accuracy(result.label, result.accuracy, result.num_examples, result.per_class))
        elif of_ball or result.settings.get("eps") is None:
            without.append(result.label)
    return accuracies, tuple(without)


def _results_beside(path: Path) -> tuple[Path, EvidenceFile]:
    """The results file that names a file of evidence, and what it says of it."""
    for file in sorted(path.parent.glob("*.json")):
        with suppress(RunError):  # another file may be damaged
            listed = read_typed(EvidenceFiles, file) or EvidenceFiles()
            for evidence in listed.evidence:
                if evidence.file == path.name:
                    return file, evidence
    raise RunError(f"{path}: no results beside it (*.json) name this file, so there is no number to check.")


def _number(
    accuracy: _Accuracy, evidence: Evidence, num_classes: int, positions: Tensor, doubts: Sequence[Doubt]
) -> tuple[Number, list[Doubt]]:
    """What the evidence shows of one accuracy, and images of which it shows nothing although they are covered."""
    import torch

    from calfat_plugin.evaluators.base import counts_of

    covered = torch.zeros_like(evidence.correct)
    covered[evidence.covered] = True
    has_image = torch.zeros_like(evidence.correct)
    has_image[evidence.index] = True
    tried, right = evidence.verdicts(accuracy.label)
    broken = tried & evidence.correct & ~right
    missing = []
    for at in (broken & covered & ~has_image).nonzero().flatten().tolist():
        missing.append(Doubt(int(positions[at]), "missing", accuracy.label, False))
    images_about = {"clean": set(positions[tried].tolist()), "falls": set(positions[broken].tolist()), "missing": set()}
    disputed = any(doubt.image in images_about[doubt.what] for doubt in doubts if not doubt.borderline)
    counts = counts_of(evidence.label[tried], evidence.correct[tried], right[tried], num_classes)
    same = int(tried.sum()) == accuracy.num_examples and counts["accuracy"] == accuracy.share
    same = same and accuracy.per_class in ((), tuple(counts["per_class"]))
    checked = int((tried & ~(broken & ~has_image)).sum())
    stands = same and not missing and not disputed
    return Number(accuracy.label, accuracy.share, counts["accuracy"], accuracy.num_examples, checked, stands), missing


# --- pictures ---------------------------------------------------------------------------------------------------------


def write_pictures(replay: Replay, folder: Path) -> int:
    """Write three files for each adversarial image, and say how many of these fall with 8 bits a value, as they are.

    The names say the position in the test split, and of adversarial images the attack and the class the model says.
    """
    import torch

    from calfat_plugin.datasets.data import pixels

    evidence = replay.evidence
    data = replay.data
    still_fall = 0
    with reporting_disk_errors(folder, TRY_AGAIN), torch.no_grad():
        folder.mkdir(parents=True, exist_ok=True)
        for row, at in enumerate(evidence.index.tolist()):
            x = pixels(data.x[at : at + 1]).cpu()
            x_adv = evidence.x_adv[row : row + 1]
            still_fall += int(replay.model(rounded_to_8_bits(x_adv).to(data.x.device)).argmax() != evidence.label[at])
            attack = evidence.attacks[int(evidence.by[row])]
            stem = f"{int(replay.positions[at]):05}"
            (folder / f"{stem}-class-{int(evidence.label[at])}.png").write_bytes(png(x[0]))
            change, factor = perturbation(x[0], x_adv[0])
            (folder / f"{stem}-perturbation-x{factor:.3g}.png").write_bytes(png(change))
            name = re.sub(r"[^\w-]", "_", attack)
            (folder / f"{stem}-{name}-says-{int(evidence.prediction[row])}.png").write_bytes(png(x_adv[0]))
    return still_fall
