"""Attackers of a simulation: what they send takes the place of what their worker trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from calfat_plugin.experiment.checked import CheckedAttacker
from calfat_plugin.experiment.groups import attackers_among
from calfat_plugin.federation.side_effects import stateless
from calfat_plugin.interfaces import Attacker, AttackTask, State
from calfat_plugin.results import LocalUpdate
from calfat_plugin.seeds import generator

if TYPE_CHECKING:
    from calfat_plugin.experiment import Experiment
    from calfat_plugin.recipe.schema import ClientGroup


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
