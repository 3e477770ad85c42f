"""A round's updates: those that are used, why others are not, and what the attackers of a simulation send."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from calfat_plugin.errors import NO_UPDATE, UpdateError
from calfat_plugin.experiment import Experiment
from calfat_plugin.experiment.checked import CheckedAttacker
from calfat_plugin.experiment.experiment import attackers_among
from calfat_plugin.federation.side_effects import stateless
from calfat_plugin.interfaces import Attacker, AttackTask
from calfat_plugin.maths.averaging import update_norm
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.schema import ClientGroup
from calfat_plugin.results import LocalUpdate, State
from calfat_plugin.seeds import generator

log = logging.getLogger(__name__)


class RoundUpdates:
    """The updates of one round. An update that is refused is logged; the round goes on without its client.

    Attributes:
        round: 1-based number of the round.
        usable: client id to an update that is used.
        refused: client id to the reason why its update is not used.
    """

    def __init__(self, round: int) -> None:
        self.round = round
        self.usable: dict[int, LocalUpdate] = {}
        self.refused: dict[int, str] = {}

    def refuse(self, client: int, reason: str) -> None:
        """Leave the client's update out of the round.

        The reason may quote names of tensors, or be the client's own, so it is made fit for a log.
        """
        reason = peer_text(reason)
        if not re.match(rf"client {client}\b", reason):
            reason = f"client {client}: {reason}"
        self.usable.pop(client, None)
        self.refused[client] = reason
        log.warning("round %d: update refused: %s", self.round, reason)

    @contextmanager
    def refusing(self, client: int) -> Iterator[None]:
        """Refuse the client's update where the block raises an ``UpdateError``."""
        try:
            yield
        except UpdateError as error:
            self.refuse(client, str(error))

    def require_one(self) -> None:
        """Raise an ``UpdateError`` where no update is left to use."""
        if self.usable:
            return
        text = f"round {self.round}: {NO_UPDATE}."
        for _, reason in sorted(self.refused.items()):
            text += f"\n  {reason}"
        if "train_args." not in text:
            text += "\n  If training diverged, lower train_args.learning_rate."
        raise UpdateError(text)

    def metric(self, name: str) -> dict[int, float]:
        """What the clients whose updates are used sent under the name of a metric, of those that sent it."""
        return {client: update.metrics[name] for client, update in self.usable.items() if name in update.metrics}

    def mean_metric(self, name: str) -> float | None:
        """The mean of a metric over clients, by their examples; None where no client sent a finite number.

        A number that is not finite is left out, for one client would make the mean useless.
        """
        terms = []
        num_examples = 0
        for client, number in self.metric(name).items():
            if math.isfinite(number):
                terms.append(self.usable[client].num_examples * number)
                num_examples += self.usable[client].num_examples
        if not terms:
            return None
        return math.fsum(terms) / num_examples

    def displacement(self, client: int, start: State) -> float:
        """Euclidean length of all that the client's update changes in the model ``start``, extras included."""
        update = self.usable[client]
        zeros = {name: torch.zeros(()) for name in update.extras}
        of_state = update_norm(update.state, start, start)
        of_extras = update_norm(update.extras, zeros, update.extras)
        return math.hypot(of_state, of_extras)


def build_attacker(experiment: Experiment, group: ClientGroup) -> CheckedAttacker:
    assert group.attacker is not None
    attacker = experiment.built(group.attacker, Attacker)
    return CheckedAttacker(attacker, group.attacker.entry, experiment.who(group.attacker))


class Attackers:
    """All attackers of a run; ``names`` are those of the trainable parameters that are not personal."""

    def __init__(self, experiment: Experiment, groups: Mapping[int, ClientGroup], names: Sequence[str]) -> None:
        self._experiment = experiment
        self._names = names
        self._reported: set[str] = set()
        self._groups = {client: groups[client] for client in attackers_among(groups)}
        self._built = {client: build_attacker(experiment, group) for client, group in self._groups.items()}
        self.ids = frozenset(self._groups)

    def send(self, round: int, updates: Mapping[int, LocalUpdate], global_state: State) -> dict[int, LocalUpdate]:
        """A round's updates as they arrive: honest clients' as they are, attackers' as they change them.

        All clients started from ``global_state``.
        """
        attacking = [client for client in updates if client in self.ids]
        honest = {client: update.state for client, update in updates.items() if client not in self.ids}
        sent = dict(updates)
        for client in attacking:
            picked = self._groups[client].attacker
            assert picked is not None
            task = AttackTask(
                client=client,
                round=round,
                own=updates[client].state,
                global_state=global_state,
                parameter_names=self._names,
                generator=generator(self._experiment.seed, "attacker", round=round, client=client),
                num_attackers=len(attacking),
            )
            if picked.entry.sees_honest:
                if not honest:
                    continue  # without a model to look at, it sends what it trained
                task = replace(task, honest=lambda: honest)
            attacker = self._built[client]
            with stateless(attacker.plugin, self._experiment.who(picked), self._reported):
                state = attacker.sent(task)
            sent[client] = replace(updates[client], state=state)
        return sent
