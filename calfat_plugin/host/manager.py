"""What our managers of all runtimes do differently from the host's ``FedMLCommManager``."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from fedml.core.distributed.communication.constants import CommunicationConstants
from fedml.core.distributed.communication.message import Message

from calfat_plugin.host.transports.base import Loop

_READY = CommunicationConstants.MSG_TYPE_CONNECTION_IS_READY


class OnTransport:
    """A manager of the host on a :class:`Loop`, which it is given as ``comm``; name it before the host's class."""

    comm: Loop
    com_manager: Loop
    message_handler_dict: MutableMapping[int, Callable[[Message], None]]

    def _init_manager(self) -> None:
        """The host knows only its own backends; ours is there already."""
        self.com_manager = self.comm
        self.com_manager.add_observer(self)

    def finish(self) -> None:
        """End the loop; the host's own ends only backends that it knows by name, and MPI at once."""
        self.com_manager.stop_receive_message()

    def receive_message(self, msg_type: int, msg_params: Message) -> None:
        """Call the handler; the host would report any ``KeyError`` in it as a wrong rank."""
        if msg_type != _READY or msg_type in self.message_handler_dict:
            self.message_handler_dict[msg_type](msg_params)
