"""The host's trainer interface with our worker inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedml.core.alg_frame.client_trainer import ClientTrainer
from torch import Tensor

from calfat_plugin.federation.worker import Worker


class WorkerTrainer(ClientTrainer):
    """The host's trainer interface over a :class:`Worker`: parameters in, local training, parameters out."""

    def __init__(self, worker: Worker, args: Any) -> None:
        super().__init__(None, args)
        self.worker = worker
        self.round = 0
        self._message: Mapping[str, Tensor] = {}

    def get_model_params(self) -> Mapping[str, Tensor]:
        """The message last received or, after training, the one to send."""
        return self._message

    def set_model_params(self, model_parameters: Mapping[str, Tensor]) -> None:
        self._message = model_parameters

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        """Train client ``self.id``, which the host sets before each call."""
        self._message = self.worker.fit(self.id, self.round, self._message)
