"""The host's interfaces that several runtimes share: its manager on our transport, its trainer with our worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from fedml.core.alg_frame.client_trainer import ClientTrainer
from torch import Tensor

from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.host.transports.message import READY, Message


class OnTransport:
    """A manager of the host on a :class:`Transport`, given as ``comm``; name it before the host's class."""

    comm: Transport
    com_manager: Transport
    message_handler_dict: MutableMapping[int, Callable[[Message], None]]

    def _init_manager(self) -> None:
        """Use the transport that is there; the host would make one of its own backends."""
        self.com_manager = self.comm
        self.com_manager.add_observer(self)

    def finish(self) -> None:
        """End the loop; the host's own ends only backends that it knows by name, and MPI at once."""
        self.com_manager.stop_receive_message()

    def receive_message(self, msg_type: int, msg_params: Message) -> None:
        """Call the handler; the host would report any ``KeyError`` in it as a wrong rank."""
        if msg_type != READY or msg_type in self.message_handler_dict:
            self.message_handler_dict[msg_type](msg_params)


class MessageTrainer(ClientTrainer):
    """The host's trainer interface: parameters in, local training, parameters out."""

    def __init__(self, args: Any) -> None:
        super().__init__(None, args)
        self._message: Mapping[str, Tensor] = {}

    def get_model_params(self) -> Mapping[str, Tensor]:
        return self._message

    def set_model_params(self, model_parameters: Mapping[str, Tensor]) -> None:
        self._message = model_parameters


class WorkerTrainer(MessageTrainer):
    """The host's trainer with our :class:`Worker` inside."""

    def __init__(self, worker: Worker, args: Any) -> None:
        super().__init__(args)
        self.worker = worker
        self.round = 0

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        """Train client ``self.id``, which the host sets before each call."""
        self._message = self.worker.fit(self.id, self.round, self._message)
