"""Updates, records and results, the data that flow between the parts of a run, and their form in files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.errors import PluginError
from calfat_plugin.maths.intervals import Interval, of_accuracy
from calfat_plugin.maths.metrics import Worst, by_frequency, plausible_losses, worst_class, worst_clients
from calfat_plugin.typed_json import Count, Finite, FiniteOrNan, Share

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]

#: Of ``results.json``; it grows when a key changes its meaning or goes, not when one is added (docs/run_directory.md).
RESULTS_FORMAT = 2
#: Metric of a client that trains by an attack of fewer than three steps: the mean cosine, over some of its images, of
#: the loss's gradient at the clean image with that one step of eps further. In [-1, 1].
ALIGNMENT = "alignment"
#: Code of the finding about a client whose :data:`ALIGNMENT` stays small.
OVERFITTED_ATTACK = "overfitted-attack"
#: Code of the finding that an attack, or a part of AutoAttack, did not run.
NOT_RUN = "not-run"
#: Metric of a client: how often an image went forward through its model, in attacks and training steps.
PASSES = "passes"
EVIDENCE = "evidence.safetensors"  #: name of the file with adversarial images of an evaluation
NATURAL = "natural"  #: label of the accuracy on clean images
WORST_CASE = "worst-case"  #: label of the accuracy that all attacks of an evaluation leave together, image by image
#: Behind an evaluator's label and a colon in a metric of a suite: its accuracy by the release's convention; and whom
#: the model fails, with its key in ``results.json``.
RELEASE = "release"
WORST = {"worst-class": "worst_class", "worst-clients": "worst_clients"}
#: Likewise, of classes by their training examples, where the partition is long-tailed.
FREQUENCY = ("head", "middle", "tail")
BESIDE = (RELEASE, *WORST, *FREQUENCY)
#: Keys of an evaluation that are not written where there is nothing.
_OPTIONAL = ("metrics", "not_run", "guess", "interval", "worst_class", "worst_clients", *FREQUENCY)


@dataclass(frozen=True)
class LocalUpdate:
    """What one client returns after its local training.

    Attributes:
        state: the trained model's tensors, named as in its ``state_dict``. A tensor that the model has under several
            names counts once; aggregators see it under the first.
        num_examples: training examples on this client, >= 1.
        extras: what the aggregator or the method needs besides, under a namespaced name (``scaffold/change/...``).
        metrics: numbers for the record: ``loss`` (mean training loss of the last local epoch), and what the trainer's
            entry declares.
        client_state: what this client keeps for its next round. It never leaves the client.
    """

    state: Mapping[str, Tensor]
    num_examples: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    client_state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluator's verdict on one model. Accuracies are fractions in [0, 1].

    An attack that did not run has no number, because clean accuracy would pass for robustness. Such
    a result is made by ``without_number``.

    Attributes:
        label: the evaluator's name in this run (``pgd20``).
        num_examples: how many test examples were evaluated; 0 where the attack did not run.
        accuracy: share of examples that are classified correctly both clean and under attack, which is what robust
            accuracy means elsewhere: never above the natural accuracy. None where the attack did not run.
        accuracy_release: share whose final (adversarial) point is classified correctly, whatever became of the clean
            image: the convention of the CalFAT release, used in the paper's tables. None where the attack did not run.
        per_class: ``accuracy`` per class; None where the class has no test example. Empty where nothing is known of
            classes.
        per_class_release: likewise for ``accuracy_release``.
        settings: how the number was made (eps, steps, start, seed ...), ready for JSON.
        implementation: package and version that made the adversarial examples.
        seconds: wall-clock time.
        details: further findings of this evaluator, ready for JSON.
        metrics: figures beside accuracy, under names that the evaluator's entry declares.
        worst_clients: ``accuracy`` of the worst 10 % of the clients (``maths.metrics``); None where the clients' labels
            are not known.
        head: mean ``accuracy`` of the third of the classes with the most training examples; with ``middle`` and
            ``tail`` of a long-tailed partition only (``maths.metrics.by_frequency``).
        middle: of those between.
        tail: of those with the fewest.
        not_run: why the attack did not run, so that there is no accuracy; empty where there is one.
        guess: share of the most frequent class, which a model has that gives every image this one answer; None where
            the evaluator does not say.
    """

    label: str
    num_examples: Count
    accuracy: Share | None
    accuracy_release: Share | None
    per_class: tuple[Share | None, ...]
    per_class_release: tuple[Share | None, ...]
    settings: Mapping[str, Any]
    implementation: str
    seconds: Finite
    details: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, FiniteOrNan] = field(default_factory=dict)
    worst_clients: Worst | None = None
    head: Worst | None = None
    middle: Worst | None = None
    tail: Worst | None = None
    not_run: str = ""
    guess: Share | None = None

    @classmethod
    def without_number(
        cls,
        label: str,
        why: str,
        *,
        settings: Mapping[str, Any],
        implementation: str,
        details: Mapping[str, Any] | None = None,
    ) -> EvaluationResult:
        """The result of an attack that did not run.

        Args:
            label: the evaluator's name in this run.
            why: why it did not run, as it follows on a colon: ``its loss needs 4 classes, and there are 3``.
            settings: as of a result with a number.
            implementation: likewise.
            details: likewise.
        """
        return cls(label, 0, None, None, (), (), settings, implementation, 0.0, details=details or {}, not_run=why)

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of ``accuracy`` over the test examples (Wilson's); None where there is no accuracy."""
        if self.accuracy is None:
            return None
        return of_accuracy((self.accuracy,), self.num_examples)

    @property
    def worst_class(self) -> Worst | None:
        """``accuracy`` of the worst class; None where nothing is known of classes."""
        return worst_class(self.per_class)

    @property
    def numbers(self) -> dict[str, float | None]:
        """Its numbers by the names that suites and reports use: ``pgd20``, ``pgd20:worst-class``, ``pgd20/ece``.

        None where the attack did not run. A number that is not known at all has no name here.
        """
        numbers: dict[str, float | None] = {
            self.label: self.accuracy,
            f"{self.label}:{RELEASE}": self.accuracy_release,
        }
        for name, value in self.metrics.items():
            numbers[f"{self.label}/{name}"] = value if math.isfinite(value) else None
        for name, attribute in (*WORST.items(), *zip(FREQUENCY, FREQUENCY, strict=True)):
            worst = getattr(self, attribute)
            if worst is not None:
                numbers[f"{self.label}:{name}"] = worst.accuracy
        return numbers

    def with_worst_clients(
        self, class_counts: Sequence[Sequence[int]], *, long_tailed: bool = False
    ) -> EvaluationResult:
        """The same with ``worst_clients``, and with head, middle and tail where ``long_tailed``.

        Args:
            class_counts: training examples, a row a client, (K, C); empty where they are not known.
            long_tailed: whether the partition is.
        """
        head = middle = tail = None
        if long_tailed:
            head, middle, tail = by_frequency(self.per_class, class_counts)
        worst = worst_clients(self.per_class, class_counts)
        return dataclasses.replace(self, worst_clients=worst, head=head, middle=middle, tail=tail)


@dataclass(frozen=True)
class EarlyStop:
    """Why a run ended before its last round (``train_args.patience``).

    Attributes:
        round: the last round that was done, 1-based.
        patience: monitored evaluations after the best one, without a higher accuracy.
        evaluator: label of the monitored evaluator whose accuracy decided, on the validation split.
        best_round: the round of its highest accuracy.
        accuracy: that accuracy, in [0, 1].
    """

    round: Count
    patience: Count
    evaluator: str
    best_round: Count
    accuracy: Share

    def __str__(self) -> str:
        evaluations = f"{self.patience} evaluation{'s' if self.patience > 1 else ''}"
        return (
            f"stopped early after round {self.round}: {evaluations} in a row had no higher validation accuracy of "
            f"{self.evaluator} than round {self.best_round} with {100 * self.accuracy:.1f} % (train_args.patience)"
        )


@dataclass(frozen=True)
class RoundRecord:
    """One finished round: a line of ``rounds.jsonl``, and a row of ``rounds.csv``.

    Attributes:
        round: 1-based number of the round.
        clients: ids of the clients whose updates were used, ascending.
        refused: client id to reason, for updates that were not used.
        losses: client id to the mean training loss that it claims.
        update_norms: client id to the L2 norm of (local - global) over trainable parameters.
        update_cosines: client id to the cosine of its update to the coordinate-wise median of the round's updates.
        alignments: client id to its ``alignment_<k>`` of ``rounds.csv``, of those that say so.
        attackers_named: share of the run's attackers that a finding about updates has named so far, in [0, 1]; None
            where there are none.
        others_named: likewise, of all other clients.
        heterogeneity: s^2 of the CalFAT paper, section 3.2, over trainable parameters before aggregation.
        evaluations: label to result; empty in rounds that are not monitored.
        seconds: wall-clock time of the round, evaluation included.
        passes: of all clients whose updates were used together, how often a training image went forward through the
            network, by attacks and training steps, as they claim; None where they do not say.
        bytes_down: payload that the clients of the round received, in bytes.
        bytes_up: payload that the server received from them, in bytes.
        alarms: findings about the clients whose updates were used (``federation.outliers``), and about monitored
            attacks that did not run; a code and a sentence each.
        peak_memory_mb: largest resident memory of the server's process in the round, in 10^6 bytes; None where the
            system does not measure it.
        peak_gpu_memory_mb: largest memory of torch's tensors on the server's GPU, likewise; None without one.
        metrics: what plugins measured beside: ``train/<name>``, the mean over clients by their examples;
            ``server/<name>``, the aggregator's; ``<label>/<name>``, a monitored evaluator's.
        learning_rate: of the clients' optimisers, by ``train_args``; None where it is not known.
        num_examples: client id to the number of training examples that it claims.
        weights: client id to the share of the average that its update got; empty where the aggregator says nothing.
        stop: why training ends with this round, before the last one of the recipe; None: it does not.
    """

    round: int
    clients: tuple[int, ...]
    refused: Mapping[int, str]
    losses: Mapping[int, float]
    update_norms: Mapping[int, float]
    heterogeneity: float
    evaluations: Mapping[str, EvaluationResult]
    seconds: float
    bytes_down: int
    bytes_up: int
    alarms: tuple[str, ...] = ()
    peak_memory_mb: float | None = None
    peak_gpu_memory_mb: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    num_examples: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    update_cosines: Mapping[int, float] = field(default_factory=dict)
    attackers_named: float | None = None
    others_named: float | None = None
    passes: float | None = None
    alignments: Mapping[int, float] = field(default_factory=dict)
    stop: EarlyStop | None = None

    @property
    def loss(self) -> float:
        """The mean of the plausible losses (``maths.metrics.plausible_losses``); nan without any."""
        plausible = plausible_losses(self.losses)
        if not plausible:
            return math.nan
        return math.fsum(plausible.values()) / len(plausible)

    def accuracy(self, label: str) -> float | None:
        """The monitored accuracy, in [0, 1], of the evaluator ``label`` in this round; None: it has no number."""
        if label not in self.evaluations:
            return None
        return self.evaluations[label].accuracy

    def with_worst_clients(self, class_counts: Sequence[Sequence[int]]) -> RoundRecord:
        """The same with ``worst_clients`` of every evaluation; ``class_counts``: (K, C), empty where not known."""
        evaluations = {label: result.with_worst_clients(class_counts) for label, result in self.evaluations.items()}
        return dataclasses.replace(self, evaluations=evaluations)


@dataclass(frozen=True)
class RunInfo:
    """What a logger may want to know about a run.

    Attributes:
        name: the recipe's name.
        directory: the run directory.
        recipe: the recipe as run, ready for YAML.
        num_rounds: rounds of the whole run.
        start_round: first round to do (> 1 when the run is resumed), 1-based.
        class_counts: (client -> counts per class) of the training data, for simulations where one process sees them.
        stop: of a run that is resumed in its final evaluation, why it ended before its last round.
    """

    name: str
    directory: Path
    recipe: Mapping[str, Any]
    num_rounds: int
    start_round: int
    class_counts: tuple[tuple[int, ...], ...] = ()
    stop: EarlyStop | None = None


@dataclass(frozen=True)
class RunResult:
    """The end of a run: the final evaluation of the last global model.

    Attributes:
        evaluations: one an evaluator, in the recipe's order.
        num_rounds: rounds that were done; fewer than the recipe's where training stopped early.
        seconds: wall-clock time of the process that ended the run, and of the rounds that earlier ones finished.
        stop: why training ended before the recipe's last round; None: it did not.
    """

    evaluations: tuple[EvaluationResult, ...]
    num_rounds: int
    seconds: float
    stop: EarlyStop | None = None


def evaluation_as_json(evaluation: EvaluationResult) -> dict[str, Any]:
    """A result, ready for strict JSON: nan and infinity, which JSON lacks, become null."""
    content = {}
    stored = [declared.name for declared in dataclasses.fields(evaluation)]
    for name in (*stored, "interval", "worst_class"):
        value = getattr(evaluation, name)
        if value or name not in _OPTIONAL:
            content[name] = _as_json(value, name)
    return content


def evaluator_of(metric: str) -> str:
    """The evaluator of ``pgd20:worst-class``: ``pgd20``; any other metric itself."""
    label, _, beside = metric.rpartition(":")
    return label if beside in BESIDE else metric


def release_of(metric: str) -> str:
    """An evaluator's accuracy by the release's convention: ``pgd20:release``; a metric of another kind itself."""
    return f"{metric}:{RELEASE}" if evaluator_of(metric) == metric else metric


def _as_json(value: Any, where: str) -> Any:
    import numpy  # here, not above: recipes are checked without it

    if isinstance(value, Worst):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PluginError(
        f"its result's {where} is a {type(value).__name__}, which results.json cannot hold; expected numbers, texts, "
        "lists and mappings of them."
    )
