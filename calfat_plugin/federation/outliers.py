"""Outliers among clients: they are aggregated and logged. Only what no training explains is refused.

A finding is a code and a sentence, ``large-update: the update of client 3 has ...``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.experiment import Experiment
from calfat_plugin.experiment.experiment import attackers_among
from calfat_plugin.maths.averaging import Drift
from calfat_plugin.maths.metrics import plausible_losses
from calfat_plugin.recipe.schema import ClientGroup
from calfat_plugin.results import NOT_RUN, OVERFITTED_ATTACK, EvaluationResult, RoundRecord

if TYPE_CHECKING:
    from torch import Tensor

# Thresholds of findings about updates are robust z-scores. studies/attackers has the rates of false alarms that they
# were chosen for, and how often they name an attacker.
#: Number of a client's last rounds whose median z-score counts.
WINDOW = 10
#: Median z-score of a norm over these rounds, above which an update is reported.
LARGE = 2.5
#: Median z-score of a cosine over these rounds, below which an update is reported.
CONTRARY = -3.0
#: z-score of a norm in a single round, above which an update is reported.
AT_ONCE = 10.0
# With fewer clients in a round, nobody can say who is out of proportion.
_FEWEST = 5
_FEWEST_AT_ONCE = 3
# Smallest scale of z-scores: however alike the clients of a round are, differences of this size are usual.
_SPREAD_OF_LOG_NORMS = 0.2
_SPREAD_OF_COSINES = 0.1
_CONSISTENT = 1.4826  # from the MAD to the standard deviation of a normal distribution
#: Share of a round's weight above which a client is reported, where others trained as well.
DOMINANT = 0.9
#: How many times what is usual a tensor may change. An attacker that scales its update by 100 is an experiment, and
#: stays far below; a model of which one value is this much too large can hardly be trained any more by anybody.
ABSURD = 1e4
#: Mean of ``results.ALIGNMENT`` over a client's last :data:`ALIGNED_ROUNDS` below which its model has learnt to pass
#: one step of eps: the loss turns within that step. studies/passes has the runs that it was chosen on.
OVERFITTED = 0.11
ALIGNED_ROUNDS = 4
#: Cosine of the server's step to the median of its clients' below which it is reported. Updates of skewed clients are
#: nearly orthogonal, so the cosine of an average is small, and of an average with the wrong sign not far below zero: in
#: 4,121 rounds of 28 honest runs under Dirichlet(0.1) it was never below -0.003. Momentum turns a step, but not around.
AGAINST = -0.1
AGAINST_WITH_MEMORY = -0.5
#: Multiple of the clients' longest update above which the step is. Averages and robust rules stay within the longest.
BEYOND = 3.0
_SMALLEST_RATE = 1e-300  # a learning rate of 0 has no logarithm
_QUOTED = 5  # findings of a kind that the page quotes
_CLIENTS = re.compile(r"clients? \d+(, \d+)*")
_ADVICE = {
    "large-update": "Such an update can replace the model: look at that client's data, learning rate and intentions.",
    "contrary-update": "It works against the others: look at that client's labels, its method and its intentions.",
    "dominant-personal": "The evaluated model has the plain mean of what clients keep for themselves, whatever the "
    "aggregator, and that client decides it: look at its data and its intentions.",
    "equal-updates": "Clients with data of their own never send the same: they copy each other, or work together.",
    "dominant-client": "It is nearly the whole average: check its number of examples, or use weights: uniform.",
    OVERFITTED_ATTACK: "Catastrophic overfitting: one step no longer attacks such a model, and what it learns is not "
    "robust. Take calfat.threat.inner n-fgsm or pgd, a shorter step, or a lower learning rate.",
    "server-step": "combine returns the next model, near those of the clients: has its step the wrong sign, or is what "
    "it returns an update, or a sum?",
    NOT_RUN: "There is no number of it in these rounds, and no checkpoint best-robust where it is the last attack of "
    "calfat.monitor.evaluators. Monitor another attack.",
    "implausible-loss": "The round's loss leaves it out, the average has its update: look at that client.",
}


def robust_z(values: Mapping[int, float], spread: float, floor: float = -math.inf) -> dict[int, float]:
    """(value - median) / (1.4826 MAD) of each client (Iglewicz and Hoaglin 1993); the MAD is at least ``spread``.

    Where the median is below ``floor``, values are compared with that.
    """
    middle = median(values.values())
    scale = _CONSISTENT * median(abs(value - middle) for value in values.values())
    usual = max(middle, floor)
    return {client: (value - usual) / max(scale, spread) for client, value in values.items()}


class Finding(NamedTuple):
    """A finding about the updates of a round."""

    text: str
    clients: tuple[int, ...]  # those that it is about


class UpdateHistory:
    """Compares the updates of a run's clients with those of their rounds, and names clients that stand out.

    Norms are compared per local step, on a log scale: under label skew clients have unequal numbers of examples.
    """

    def __init__(self, experiment: Experiment, groups: Mapping[int, ClientGroup]) -> None:
        self._experiment = experiment
        self._groups = groups
        # Of each client the scores of its last rounds.
        self._norm_scores: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._cosine_scores: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._round = 0
        # Of each round the median of its clients' log norms, per local step and learning rate.
        self._medians: list[float] = []
        self.named: set[int] = set()  # clients that a finding has named so far

    def read(self, records: Iterable[RoundRecord]) -> None:
        """Take in the rounds that a resumed run has behind it."""
        for record in records:
            self.add(record.update_norms, record.update_cosines, record.num_examples)

    def add(
        self, norms: Mapping[int, float], cosines: Mapping[int, float], num_examples: Mapping[int, float]
    ) -> tuple[str, ...]:
        """The findings about one more round: L2 norms of updates, and their cosines to the round's median update."""
        findings = [
            *self._large_updates(norms, num_examples),
            *self._contrary_updates(cosines),
            *_equal_updates(norms, cosines),
        ]
        for finding in findings:
            self.named.update(finding.clients)
        return tuple(finding.text for finding in findings)

    def named_share(self, *, attackers: bool) -> float | None:
        """Which share of the run's attackers, or of its other clients, was named so far; None where there are none."""
        clients = set(attackers_among(self._groups))
        if not attackers:
            clients = set(range(self._experiment.num_clients)) - clients
        if not clients:
            return None
        return len(self.named.intersection(clients)) / len(clients)

    def _large_updates(self, norms: Mapping[int, float], num_examples: Mapping[int, float]) -> list[Finding]:
        """A finding for each client whose update is out of proportion, in this round or in all its last ones."""
        log_norms = {}
        for client, norm in norms.items():
            if norm > 0 and client in num_examples:
                log_norms[client] = math.log(norm / self._num_steps(client, num_examples[client]))
        findings = []
        for client, z in self._scores_of_norms(log_norms).items():
            lasting = _lasting(self._norm_scores[client], z, len(log_norms))
            if z > AT_ONCE:
                why = f"z-score {z:.3g}"
            elif lasting > LARGE:
                why = f"median z-score of {WINDOW} rounds {lasting:.3g}"
            else:
                continue
            times = math.exp(log_norms[client] - median(log_norms.values()))
            text = (
                f"large-update: the update of client {client} has the norm {norms[client]:.3g}, per local step "
                f"{times:.3g} times the median of its round ({why})"
            )
            findings.append(Finding(text, (client,)))
        return findings

    def _contrary_updates(self, cosines: Mapping[int, float]) -> list[Finding]:
        """A finding for each client whose updates have pointed away from the others' in its last rounds."""
        if not cosines:
            return []
        findings = []
        for client, z in robust_z(cosines, _SPREAD_OF_COSINES).items():
            lasting = _lasting(self._cosine_scores[client], z, len(cosines))
            if lasting < CONTRARY:
                text = (
                    f"contrary-update: the update of client {client} has the cosine {cosines[client]:.2f} to the "
                    f"median of its round's updates (median z-score of {WINDOW} rounds {lasting:.3g})"
                )
                findings.append(Finding(text, (client,)))
        return findings

    def _scores_of_norms(self, log_norms: Mapping[int, float]) -> dict[int, float]:
        """The robust z-score of each client's log norm per local step; none where its round has too few clients.

        At the end of training most clients have learnt their data, and their updates vanish. One that has not is far
        above them then, without being large. So a norm counts by the larger one of two: the median of its round, and
        the upper quartile of the medians of all rounds so far, at the same learning rate. A quarter of the rounds moved
        further than that, and did no harm.
        """
        self._round += 1
        if len(log_norms) < _FEWEST_AT_ONCE:
            return {}
        rate = math.log(max(self._experiment.train.learning_rate_of(self._round), _SMALLEST_RATE))
        self._medians.append(median(log_norms.values()) - rate)
        upper_quartile = sorted(self._medians)[3 * len(self._medians) // 4]
        return robust_z(log_norms, _SPREAD_OF_LOG_NORMS, floor=upper_quartile + rate)

    def _num_steps(self, client: int, num_examples: float) -> int:
        """How many steps a client's optimiser takes in a round; at least one."""
        experiment = self._experiment.trained_by(self._groups.get(client))
        train = experiment.train
        steps = train.local_steps or train.epochs * math.ceil(num_examples / train.batch_size)
        if experiment.trains_attacked:  # a method without an attack takes one step, whatever the inner attack
            inner = experiment.threat.inner
            steps = steps * inner.entry.replays(inner.options)
        return max(1, steps)


def _lasting(scores: deque[float], z: float, num_clients: int) -> float:
    """The median of a client's last scores and ``z``, which is added; 0 while it has fewer than :data:`WINDOW`.

    A round of too few clients says nothing about any of them: its score is not added, and the result is 0.
    """
    if num_clients < _FEWEST:
        return 0.0
    scores.append(z)
    if len(scores) < WINDOW:
        return 0.0
    return median(scores)


def _equal_updates(norms: Mapping[int, float], cosines: Mapping[int, float]) -> list[Finding]:
    """A finding for each set of clients whose updates are equal: in norm and cosine, to the last bit."""
    clients_of: dict[tuple[float, float], list[int]] = {}
    for client, cosine in cosines.items():
        clients_of.setdefault((norms[client], cosine), []).append(client)
    findings = []
    for clients in clients_of.values():
        if len(clients) > 1:
            text = f"equal-updates: clients {', '.join(map(str, clients))} sent the same update"
            findings.append(Finding(text, tuple(clients)))
    return findings


def weight_alarms(weights: Mapping[int, float], num_examples: Mapping[int, int]) -> tuple[str, ...]:
    """A sentence for the client that has more than :data:`DOMINANT` of the weight of a round of several clients."""
    if len(num_examples) < 2:
        return ()
    alarms = []
    total = math.fsum(weights.values())
    for client, weight in weights.items():
        if weight > DOMINANT * total > 0:
            alarms.append(
                f"dominant-client: client {client} has {100 * weight / total:.4g} % of the weight of its round (it "
                f"claims {num_examples[client]} examples)"
            )
    return tuple(alarms)


def personal_alarms(norms: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for the client that has more than :data:`DOMINANT` of how far clients move their personal tensors.

    The evaluated model has the plain mean of these, whatever the aggregator, so that client alone makes it.
    """
    if len(norms) < 2:
        return ()
    alarms = []
    total = math.fsum(norms.values())
    for client, norm in norms.items():
        if norm > DOMINANT * total > 0:
            alarms.append(
                f"dominant-personal: client {client} moves its personal tensors by {norm:.3g}, "
                f"{100 * norm / total:.4g} % of what all clients of its round together move theirs"
            )
    return tuple(alarms)


def absurd_changes(sent: Mapping[int, Mapping[str, Tensor]], reference: Mapping[str, Tensor]) -> dict[int, str]:
    """Clients whose tensors change by so much that no training explains it, with what is wrong in words.

    A change is absurd beyond :data:`ABSURD` times the largest of three: 1, the tensor's own largest value, and the
    median change of the round's other clients. A network's values are about 1 after its initialisation and in its
    normalised layers, so a tensor of zeros may move, and all clients may move far together. Without the client itself
    in the median, one of two cannot make its own change usual.
    """
    problems: dict[int, str] = {}
    for name, start in reference.items():
        if not start.is_floating_point():  # counters have no scale
            continue
        sizes = {client: _largest(tensors[name] - start) for client, tensors in sent.items() if name in tensors}
        at_least = max(1.0, _largest(start))
        for client, size in sizes.items():
            usual = at_least
            sizes_of_others = [size_of_other for other, size_of_other in sizes.items() if other != client]
            if sizes_of_others:
                usual = max(usual, median(sizes_of_others))
            if size > ABSURD * usual:
                expected = ABSURD * usual
                problems.setdefault(client, f"tensor '{name}' changes by {size:.3g}; expected up to {expected:.3g}")
    return problems


def _largest(tensor: Tensor) -> float:
    """The largest magnitude in a tensor; 0 of an empty one."""
    if not tensor.numel():
        return 0.0
    return float(tensor.abs().amax())


class Alignments:
    """Names clients whose training has overfitted its attack of one or two steps (Wong et al. 2020)."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=ALIGNED_ROUNDS))

    def read(self, records: Iterable[RoundRecord]) -> None:
        """Take in the rounds that a resumed run has behind it."""
        for record in records:
            self.add(record.alignments)

    def add(self, alignments: Mapping[int, float]) -> tuple[str, ...]:
        """A sentence for each client whose last rounds, this one included, have a mean below :data:`OVERFITTED`."""
        alarms = []
        for client, alignment in alignments.items():
            last = self._last[client]
            last.append(alignment)
            if len(last) < ALIGNED_ROUNDS:
                continue
            mean = math.fsum(last) / ALIGNED_ROUNDS
            if mean < OVERFITTED:
                alarms.append(
                    f"{OVERFITTED_ATTACK}: the loss of client {client} turns within one step of eps (cosine of its "
                    f"gradients before and after, mean of {ALIGNED_ROUNDS} rounds {mean:.2f})"
                )
        return tuple(alarms)


def loss_alarms(losses: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for each client whose loss is left out of the round's (:func:`plausible_losses`).

    Where no loss is plausible, training has diverged for all: then a loss that is not finite is no finding about one.
    """
    plausible = plausible_losses(losses)
    alarms = []
    for client, loss in losses.items():
        if client not in plausible and (plausible or math.isfinite(loss)):
            alarms.append(f"implausible-loss: client {client} claims a loss of {loss:.3g}")
    return tuple(alarms)


def step_alarms(drift: Drift, *, remembers: bool) -> tuple[str, ...]:
    """A sentence where the server's step is none that an aggregator takes: away from its clients, or far beyond.

    An aggregator that ``remembers`` something between rounds, as a server's optimiser does, has steps of its own length
    and may turn further away from its clients.
    """
    length, cosine = drift.step
    longest = max(drift.norms)
    against = AGAINST
    if remembers:
        against = AGAINST_WITH_MEMORY
    if cosine < against:
        return (
            f"server-step: the global model moved against its clients (cosine to their median update {cosine:.2f})",
        )
    if not remembers and length > BEYOND * longest > 0:
        return (
            f"server-step: the global model moved by {length:.3g}, {length / longest:.3g} times the longest update of "
            "its clients",
        )
    return ()


def not_run_alarms(evaluations: Mapping[str, EvaluationResult]) -> tuple[str, ...]:
    """A finding about each monitored attack that did not run."""
    alarms = []
    for label, result in evaluations.items():
        if result.not_run:
            why = " ".join(result.not_run.replace(";", ",").split())  # a plugin's; findings are split at semicolons
            alarms.append(f"{NOT_RUN}: {label} did not run: {why}")
    return tuple(alarms)


def alarms_of(records: Iterable[RoundRecord]) -> tuple[Alarm, ...]:
    """The findings of all rounds, an alarm for each kind; none without any.

    What is found of the same clients, or of the same attack, in several rounds is quoted once, as of the last of them.
    """
    findings: dict[str, dict[str, list[tuple[int, str]]]] = {}  # code to subject to (round, text)
    for record in records:
        for finding in record.alarms:
            code, _, text = finding.partition(": ")
            clients = _CLIENTS.search(text)
            subject = text  # an attack, and why it did not run
            if code != NOT_RUN:
                subject = clients[0] if clients else ""
            findings.setdefault(code, {}).setdefault(subject, []).append((record.round, text))
    alarms = []
    for code, advice in _ADVICE.items():  # a code without advice is in a file that somebody has changed by hand
        if code not in findings:
            continue
        quotes = []
        for of_subject in findings[code].values():
            round, text = of_subject[-1]
            when = f"round {round}"
            if len(of_subject) > 1:
                when = f"{len(of_subject)} rounds, the last of them {round}"
            quotes.append(f"{when}: {text}")
        quoted = "; ".join(quotes[:_QUOTED])
        if len(quotes) > _QUOTED:
            quoted += f" (and {len(quotes) - _QUOTED} more in rounds.csv)"
        alarms.append(Alarm(code, f"{quoted}. {advice}", ()))
    return tuple(alarms)
