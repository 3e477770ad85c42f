"""The clients of a round, for evaluators that measure them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calfat_plugin.errors import PluginError
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import State
from calfat_plugin.maths.tied import load_state


def no_worker() -> Worker:
    raise PluginError(
        "it asks for a client's data, which across silos the server does not have; let its entry's check refuse "
        "recipes whose common_args.training_type is not simulation."
    )


@dataclass(frozen=True)
class ClientsOfRound:
    """See ``interfaces.RoundClients``."""

    states: Mapping[int, State]  # client id to the model that it sent, ascending ids
    attackers: Collection[int]
    template: nn.Module  # in evaluation mode on the device; its tensors do not matter
    round: int  # the last one that was aggregated; 0 before the first, when nobody trains
    downlink: Mapping[str, Tensor]  # after it
    worker: Callable[[], Worker]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.states)

    @property
    def honest(self) -> tuple[int, ...]:
        return tuple(client for client in self.states if client not in self.attackers)

    def class_counts(self, client: int) -> tuple[int, ...]:
        worker = self.worker()
        counts = torch.bincount(worker.shards[client].y, minlength=worker.num_classes)
        return tuple(counts.tolist())

    def model(self, client: int) -> nn.Module:
        return self._holding(self.states[client])

    def fine_tuned(self, client: int, epochs: int) -> nn.Module:
        if self.round == 0:
            return self.model(client)
        return self._holding(self.worker().fine_tuned(client, self.round, self.downlink, epochs))

    def _holding(self, state: State) -> nn.Module:
        model = deepcopy(self.template)
        load_state(model, state)
        return model
