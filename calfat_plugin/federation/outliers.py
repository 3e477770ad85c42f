"""Outliers among clients: they are aggregated and logged. Only what no training explains is refused.

A finding is a code and a sentence, ``large-update: the update of client 3 has ...``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.experiment import Experiment
from calfat_plugin.experiment.groups import attackers_among
from calfat_plugin.maths.averaging import Drift
from calfat_plugin.maths.metrics import plausible_losses
from calfat_plugin.recipe.schema import ClientGroup
from calfat_plugin.results import NOT_RUN, OVERFITTED_ATTACK, EvaluationResult
from calfat_plugin.rounds_csv import read_rounds

if TYPE_CHECKING:
    from torch import Tensor

#: Robust z-scores beyond which an update is reported: a norm's and a cosine's, as the median of a client's last
#: :data:`WINDOW` rounds, and a norm's of a single round. studies/attackers has the rates of false alarms that these
#: were chosen for, and how often they name an attacker.
LARGE, CONTRARY, WINDOW, AT_ONCE = 2.5, -3.0, 10, 10.0
_FEWEST, _FEWEST_AT_ONCE = 5, 3  # clients of a round; among fewer, nobody can say who is out of proportion
_SPREADS = (0.2, 0.1)  # of log norms and of cosines: at least so much is usual, however alike a round's clients are
_CONSISTENT = 1.4826  # MAD to the standard deviation of a normal distribution
#: Share of a round's weight above which a client is reported, where others trained as well.
DOMINANT = 0.9
#: How many times what is usual a tensor may change. An attacker that scales its update by 100 is an experiment, and
#: stays far below; a model of which one value is this much too large can hardly be trained any more by anybody.
ABSURD = 1e4
#: Mean of ``results.ALIGNMENT`` over a client's last :data:`ALIGNED_ROUNDS` below which its model has learnt to pass
#: one step of eps: the loss turns within that step. studies/passes has the runs that it was chosen on.
OVERFITTED, ALIGNED_ROUNDS = 0.11, 4
#: Cosine of the server's step to the median of its clients' below which it is reported. Updates of skewed clients are
#: nearly orthogonal, so the cosine of an average is small, and of an average with the wrong sign not far below zero: in
#: 4,121 rounds of 28 honest runs under Dirichlet(0.1) it was never below -0.003. Momentum turns a step, but not around.
AGAINST, AGAINST_WITH_MEMORY = -0.1, -0.5
#: Multiple of the clients' longest update above which the step is. Averages and robust rules stay within the longest.
BEYOND = 3.0
_SMALLEST_RATE = 1e-300  # a learning rate of 0 has no logarithm
_QUOTED = 5  # findings of a kind that the page quotes
_CLIENTS = re.compile(r"clients? \d+(, \d+)*")
_LARGE_UPDATE = "large-update"
_ADVICE = {
    _LARGE_UPDATE: "Such an update can replace the model: look at that client's data, learning rate and intentions.",
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


class UpdateHistory:
    """Compares the updates of a run's clients with those of their rounds, and names clients that stand out.

    Norms are compared per local step, on a log scale: under label skew clients have unequal numbers of examples.
    """

    def __init__(self, experiment: Experiment, groups: Mapping[int, ClientGroup]) -> None:
        self._experiment, self._groups = experiment, groups
        self._norms: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._cosines: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._round = 0
        self._usual: list[float] = []  # the median of each round: log norms per local step and learning rate
        self.named: set[int] = set()  # clients that a finding has named so far

    def read(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Take in the rounds of ``rounds.csv`` that a resumed run has behind it."""
        for row in rows:
            clients = [int(client) for client in row["clients"].split()]
            columns = ("update_norm_", "update_cosine_", "num_examples_")
            norms, cosines, examples = (
                {client: float(row[name + str(client)]) for client in clients if row.get(name + str(client))}
                for name in columns
            )
            self.add(norms, cosines, examples)

    def add(
        self, norms: Mapping[int, float], cosines: Mapping[int, float], num_examples: Mapping[int, float]
    ) -> tuple[str, ...]:
        """The findings about one more round: L2 norms of updates, and their cosines to the round's median update."""
        found: dict[str, tuple[int, ...]] = {}  # finding to clients
        per_step = {
            client: math.log(norm / self._steps(client, num_examples[client]))
            for client, norm in norms.items()
            if norm > 0 and client in num_examples
        }
        for client, z in self._scores(per_step).items():
            lasting = self._lasting(self._norms[client], z, len(per_step))
            if z > AT_ONCE or lasting > LARGE:
                times = math.exp(per_step[client] - median(per_step.values()))
                why = f"z-score {z:.3g}" if z > AT_ONCE else f"median z-score of {WINDOW} rounds {lasting:.3g}"
                text = (
                    f"{_LARGE_UPDATE}: the update of client {client} has the norm {norms[client]:.3g}, per local step "
                    f"{times:.3g} times the median of its round ({why})"
                )
                found[text] = (client,)
        for client, z in (robust_z(cosines, _SPREADS[1]) if cosines else {}).items():
            lasting = self._lasting(self._cosines[client], z, len(cosines))
            if lasting < CONTRARY:
                text = (
                    f"contrary-update: the update of client {client} has the cosine {cosines[client]:.2f} to the "
                    f"median of its round's updates (median z-score of {WINDOW} rounds {lasting:.3g})"
                )
                found[text] = (client,)
        alike: dict[tuple[float, float], list[int]] = {}  # to the last bit
        for client, cosine in cosines.items():
            alike.setdefault((norms[client], cosine), []).append(client)
        for clients in alike.values():
            if len(clients) > 1:
                found[f"equal-updates: clients {', '.join(map(str, clients))} sent the same update"] = tuple(clients)
        self.named.update(client for clients in found.values() for client in clients)
        return tuple(found)

    def _scores(self, per_step: Mapping[int, float]) -> dict[int, float]:
        """The robust z-score of each client's log norm per local step; none where its round has too few clients.

        At the end of training most clients have learnt their data, and their updates vanish. One that has not is far
        above them then, without being large. So a norm counts by the larger one of two: the median of its round, and
        the upper quartile of the medians of all rounds so far, at the same learning rate. A quarter of the rounds moved
        further than that, and did no harm.
        """
        self._round += 1
        if len(per_step) < _FEWEST_AT_ONCE:
            return {}
        rate = math.log(max(self._experiment.train.learning_rate_of(self._round), _SMALLEST_RATE))
        self._usual.append(median(per_step.values()) - rate)
        upper_quartile = sorted(self._usual)[3 * len(self._usual) // 4]
        return robust_z(per_step, _SPREADS[0], floor=upper_quartile + rate)

    def _steps(self, client: int, examples: float) -> int:
        experiment = self._experiment.trained_by(self._groups.get(client))
        settings, inner = experiment.train, experiment.threat.inner
        batches = settings.local_steps or settings.epochs * math.ceil(examples / settings.batch_size)
        if experiment.trains_attacked:  # a method without an attack takes one step, whatever the inner attack
            batches = batches * inner.entry.replays(inner.options)
        return max(1, batches)

    def named_share(self, *, attackers: bool) -> float | None:
        """Which share of the run's attackers, or of its other clients, was named so far; None where there are none."""
        attacking = {*attackers_among(self._groups)}
        of_kind = attacking if attackers else {*range(self._experiment.num_clients)} - attacking
        return len(self.named.intersection(of_kind)) / len(of_kind) if of_kind else None

    def _lasting(self, scores: deque[float], z: float, clients: int) -> float:
        """The median of a client's last rounds, this one included; 0 while they are too few, or its clients are."""
        if clients < _FEWEST:
            return 0.0  # it says nothing new of anyone
        scores.append(z)
        return median(scores) if len(scores) == WINDOW else 0.0


def weight_alarms(weights: Mapping[int, float], num_examples: Mapping[int, int]) -> tuple[str, ...]:
    """A sentence for the client that has more than :data:`DOMINANT` of the weight of a round of several clients."""
    total = math.fsum(weights.values())
    return tuple(
        f"dominant-client: client {client} has {100 * weight / total:.4g} % of the weight of its round (it claims "
        f"{num_examples[client]} examples)"
        for client, weight in weights.items()
        if len(num_examples) > 1 and weight > DOMINANT * total > 0
    )


def personal_alarms(norms: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for the client that has more than :data:`DOMINANT` of how far clients move their personal tensors.

    The evaluated model has the plain mean of these, whatever the aggregator, so that client alone makes it.
    """
    total = math.fsum(norms.values())
    return tuple(
        f"dominant-personal: client {client} moves its personal tensors by {norm:.3g}, {100 * norm / total:.4g} % of "
        "what all clients of its round together move theirs"
        for client, norm in norms.items()
        if len(norms) > 1 and norm > DOMINANT * total > 0
    )


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
            others = [other for whose, other in sizes.items() if whose != client]
            usual = max(at_least, median(others) if others else 0.0)
            if size > ABSURD * usual:
                expected = ABSURD * usual
                problems.setdefault(client, f"tensor '{name}' changes by {size:.3g}; expected up to {expected:.3g}")
    return problems


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


class Alignments:
    """Names clients whose training has overfitted its attack of one or two steps (Wong et al. 2020)."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=ALIGNED_ROUNDS))

    def read(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Take in the rounds of ``rounds.csv`` that a resumed run has behind it."""
        for row in rows:
            said = {int(client): row.get(f"alignment_{client}") for client in row["clients"].split()}
            self.add({client: float(value) for client, value in said.items() if value})

    def add(self, alignments: Mapping[int, float]) -> tuple[str, ...]:
        """A sentence for each client whose last rounds, this one included, have a mean below :data:`OVERFITTED`."""
        found = []
        for client, alignment in alignments.items():
            last = self._last[client]
            last.append(alignment)
            if len(last) == ALIGNED_ROUNDS and (mean := math.fsum(last) / ALIGNED_ROUNDS) < OVERFITTED:
                found.append(
                    f"{OVERFITTED_ATTACK}: the loss of client {client} turns within one step of eps (cosine of its "
                    f"gradients before and after, mean of {ALIGNED_ROUNDS} rounds {mean:.2f})"
                )
        return tuple(found)


def loss_alarms(losses: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for each client whose loss is left out of the round's (:func:`plausible_losses`)."""
    kept = plausible_losses(losses)
    return tuple(
        f"implausible-loss: client {client} claims a loss of {loss:.3g}"
        for client, loss in losses.items()
        if client not in kept and (kept or math.isfinite(loss))
    )


def step_alarms(moved: Drift, *, remembers: bool) -> tuple[str, ...]:
    """A sentence where the server's step is none that an aggregator takes: away from its clients, or far beyond.

    An aggregator that remembers something between rounds, as a server's optimiser does, has steps of its own length.
    """
    (length, cosine), longest = moved.step, max(moved.norms)
    if cosine < (AGAINST_WITH_MEMORY if remembers else AGAINST):
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


def why_not_run(row: Mapping[str, str], label: str) -> str:
    """Why a monitored attack did not run in a round, of its row of ``rounds.csv``; empty where it ran."""
    before = f"{NOT_RUN}: {label} did not run: "
    findings = row.get("alarms", "").split("; ")
    return next((finding.removeprefix(before) for finding in findings if finding.startswith(before)), "")


def alarms_of(path: Path) -> tuple[Alarm, ...]:
    """The findings of all rounds in a ``rounds.csv``, an alarm for each kind; none without any.

    What is found of the same clients, or of the same attack, in several rounds is quoted once, as of the last of them.
    """
    found: dict[str, dict[str, list[tuple[str, str]]]] = {code: {} for code in _ADVICE}  # code to clients to findings
    for row in read_rounds(path):
        for finding in filter(None, row.get("alarms", "").split("; ")):
            code, _, text = finding.partition(": ")
            whose = _CLIENTS.search(text)
            about = whose[0] if whose else ""
            if code == NOT_RUN:
                about = text  # an attack and why, which are no clients
            if code in found:  # else the file was changed by hand
                found[code].setdefault(about, []).append((row["round"], text))
    alarms = []
    for code, of_clients in found.items():
        quoted = []
        for findings in of_clients.values():
            round, text = findings[-1]
            rounds = f"round {round}" if len(findings) == 1 else f"{len(findings)} rounds, the last of them {round}"
            quoted.append(f"{rounds}: {text}")
        more = f" (and {len(quoted) - _QUOTED} more in rounds.csv)" if len(quoted) > _QUOTED else ""
        if quoted:
            alarms.append(Alarm(code, f"{'; '.join(quoted[:_QUOTED])}{more}. {_ADVICE[code]}", ()))
    return tuple(alarms)
