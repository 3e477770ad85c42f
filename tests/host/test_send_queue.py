"""What a party sends to one peer: in order, and never an older message once a newer one of its kind is there."""

from __future__ import annotations

import threading
import time

from calfat_plugin.host.launch import fedml  # noqa: F401  (before all else of fedml)

# isort: split
from calfat_plugin.host.transports.base import Outgoing, SendQueue, UnreachableError

MODEL, STATUS = 2, 5


class Peer:
    """Receives nothing until it is there."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.trying, self.given_up, self.there = threading.Event(), threading.Event(), threading.Event()

    def deliver(self, rank: int, outgoing: Outgoing) -> None:
        self.trying.set()
        while not self.there.wait(0.01):
            if outgoing.cancelled.is_set():
                self.given_up.set()
                raise UnreachableError("given up for a newer message")
        self.received.append(outgoing.data)


def message(data: bytes, kind: int) -> Outgoing:
    return Outgoing(data, kind, deadline=time.monotonic() + 60)


def test_a_newer_message_replaces_the_one_in_delivery_and_the_others_are_sent_once() -> None:
    peer = Peer()
    queue = SendQueue(1, peer.deliver)
    queue.start()
    first = message(b"model 1", MODEL)
    queue.send(first)
    assert peer.trying.wait(60)
    for data, kind in ((b"status", STATUS), (b"model 2", MODEL), (b"model 3", MODEL)):
        queue.send(message(data, kind))
    queue.flush(time.monotonic())  # does not wait any longer than it is asked to
    assert peer.given_up.wait(60)
    assert first.cancelled.is_set()
    assert peer.received == []
    peer.there.set()
    queue.flush(time.monotonic() + 60)
    assert peer.received == [b"status", b"model 3"]
    queue.stop()
    queue.join(60)
    assert not queue.is_alive()


def test_a_stopped_queue_gives_up_what_it_is_sending() -> None:
    peer = Peer()
    queue = SendQueue(1, peer.deliver)
    queue.start()
    queue.send(message(b"model 1", MODEL))
    assert peer.trying.wait(60)
    queue.stop()
    queue.join(60)
    assert not queue.is_alive()
    assert peer.received == []
