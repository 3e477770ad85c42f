"""What a server across silos does with an answer that it reads too late."""

from __future__ import annotations

from calfat_plugin.host.silo.server import SiloServer
from calfat_plugin.host.transports.message import Message


def test_an_answer_read_after_the_last_round_is_left_aside() -> None:
    """A client of a server that was killed and resumed may have sent its update twice."""
    server = object.__new__(SiloServer)  # without its transport: only what the handler looks at
    server._round, server._heard, server._missed = None, {}, {2}
    late = Message(3, 2, 0)
    late.add_params("round", 3)
    server.handle_message_receive_model_from_client(late)
    assert (list(server._heard), server._missed) == ([2], set())
