"""Outliers among clients: they are aggregated and logged, for no rule here takes a client's vote away.

A finding is a code and a sentence, ``large-update: the update of client 3 has ...``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.maths.metrics import plausible_losses
from calfat_plugin.rounds_csv import read_rounds

#: Times the median norm from which an update is reported: a choice, not a measured bound. Honest norms differ with
#: their number of steps and their classes; an update scaled to replace the mean of n clients is n times as long.
RATIO = 10.0
_FEWEST = 3  # clients; of two, nobody can say which is out of proportion
#: Share of a round's weight above which a client is reported, where others trained as well.
DOMINANT = 0.9
_LISTED = 5  # rounds whose alarms are quoted on the page
_LARGE_UPDATE = "large-update"
_ADVICE = {
    _LARGE_UPDATE: "Such an update can replace the model: look at that client's data, learning rate and intentions.",
    "dominant-client": "It is nearly the whole average: check its number of examples, or use weights: uniform.",
    "attack-goes-down": "The loop climbs attack_loss: has it the wrong sign? What such training gives is not robust.",
    "implausible-loss": "The round's loss leaves it out, the average has its update: look at that client.",
}


def norm_alarms(norms: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for each client whose update is more than :data:`RATIO` times as long as the round's median."""
    middle = median(norms.values()) if len(norms) >= _FEWEST else 0.0
    if middle <= 0:
        return ()
    return tuple(
        f"large-update: the update of client {client} has the norm {norm:.3g}, {norm / middle:.0f} times the median of "
        "its round"
        for client, norm in norms.items()
        if norm > RATIO * middle
    )


def weight_alarms(weights: Mapping[int, float], num_examples: Mapping[int, int]) -> tuple[str, ...]:
    """A sentence for the client that has more than :data:`DOMINANT` of the weight of a round of several clients.

    Args:
        weights: client id to the weight that its update got; empty where the aggregator says nothing.
        num_examples: client id to the number of training examples that it claims.
    """
    total = math.fsum(weights.values())
    return tuple(
        f"dominant-client: client {client} has {100 * weight / total:.4g} % of the weight of its round (it claims "
        f"{num_examples[client]} examples)"
        for client, weight in weights.items()
        if len(num_examples) > 1 and weight > DOMINANT * total > 0
    )


def attack_alarms(fell: Mapping[int, float], clients: int) -> tuple[str, ...]:
    """A sentence if the attacks of over half of a round's clients lower the loss that they should raise.

    One client may say so of a right attack: a divergence from a flat answer grows also where the answer gets surer.

    Args:
        fell: client id to the number of images of its last batch for which it says so.
        clients: how many the round has.
    """
    if 2 * len(fell) <= clients:
        return ()
    most = max(fell, key=lambda client: fell[client])
    return (
        f"attack-goes-down: the attacks of {len(fell)} of {clients} clients lower the loss of the true label, that of "
        f"client {most} for {fell[most]:.0f} images of its last batch",
    )


def loss_alarms(losses: Mapping[int, float]) -> tuple[str, ...]:
    """A sentence for each client whose loss is left out of the round's (:func:`plausible_losses`).

    Args:
        losses: client id to the mean training loss that it claims.
    """
    kept = plausible_losses(losses)
    return tuple(
        f"implausible-loss: client {client} claims a loss of {loss:.3g}"
        for client, loss in losses.items()
        if client not in kept and (kept or math.isfinite(loss))
    )


def alarms_of(path: Path) -> tuple[Alarm, ...]:
    """The findings of all rounds in a ``rounds.csv``, an alarm for each kind; none without any."""
    found: dict[str, dict[str, list[str]]] = {code: {} for code in _ADVICE}  # code to round to sentences
    for row in read_rounds(path):
        for finding in filter(None, row.get("alarms", "").split("; ")):
            code, _, text = finding.partition(": ")
            if code not in _ADVICE:  # before there were others
                code, text = _LARGE_UPDATE, finding
            found[code].setdefault(row["round"], []).append(text)
    alarms = []
    for code, rounds in found.items():
        listed = [f"round {number}: {'; '.join(texts)}" for number, texts in rounds.items()]
        more = f" (and {len(listed) - _LISTED} more rounds in rounds.csv)" if len(listed) > _LISTED else ""
        if listed:
            alarms.append(Alarm(code, f"{'; '.join(listed[:_LISTED])}{more}. {_ADVICE[code]}", ()))
    return tuple(alarms)
