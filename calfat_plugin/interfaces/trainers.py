"""The interface of local trainers: a method of training, from one client's task to its update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from calfat_plugin.interfaces.training import LocalTask
from calfat_plugin.maths.averaging import weighted_average
from calfat_plugin.results import LocalUpdate, State

if TYPE_CHECKING:
    from torch import Tensor, nn


class LocalTrainer(ABC):
    """Trains a client's copy of the global model for one round."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture where the method needs it (dual normalisation, cosine classifier).

        Called once a process, before any weights are loaded, with torch's generator seeded for initial weights.

        Args:
            model: as the recipe builds it; may be changed in place.

        Returns:
            The model to train.
        """
        return model

    @abstractmethod
    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train ``task.model`` on ``task.data`` and return the update.

        Args:
            task: the client's work.

        Raises:
            UpdateError: when the training left the finite numbers.
        """

    def personal_names(self, model: nn.Module) -> frozenset[str]:
        """Names in ``model``'s state dict that every client keeps for itself from round to round.

        A tensor that ``model`` has under several names is personal if one of them is here.

        The runtime stores and restores them per client. Clients send them along with the rest, and
        ``evaluated_personal`` makes from them what the global model is evaluated with.
        """
        return frozenset()

    def evaluated_personal(self, updates: Mapping[int, LocalUpdate], names: Sequence[str]) -> dict[str, Tensor]:
        """Server side: the personal tensors ``names`` of the model that is evaluated; default: their uniform mean.

        Args:
            updates: client id to update, of the round just finished.
            names: the personal names, never empty.
        """
        states = []
        for update in updates.values():
            states.append({name: update.state[name] for name in names})
        return weighted_average(states, [1.0] * len(states))

    def among(self, others: Mapping[int, LocalTrainer]) -> LocalTrainer:
        """Server side: the trainer that the server of a run with groups of clients uses; default: this one.

        A group's own trainer is asked for neither ``personal_names`` nor ``evaluated_personal`` nor ``broadcast``: a
        method that needs them has to be the run's trainer as well.

        Args:
            others: client id to its trainer, of the clients in a group.
        """
        return self

    def broadcast(self, updates: Mapping[int, LocalUpdate]) -> dict[str, Tensor]:
        """Server side: extras of the method (not of the aggregator) to send with the next global model.

        Args:
            updates: client id to update, of the round just finished.
        """
        return {}


@dataclass(frozen=True)
class RoundEnd:
    """What a method hands back after a client's last step of a round.

    Attributes:
        state: what the client keeps for its next round, tensors by name; it comes back as ``LocalTask.client_state``
            and never leaves the client.
        metrics: numbers for the record, under names that the entry declares; averaged over clients by examples.
        extras: what the method's ``broadcast`` reads on the server, under namespaced names (``my-fat/margin``).
    """

    state: State = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: State = field(default_factory=dict)
