"""What a client across silos does when the server says several times that the run is over."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from calfat_plugin.compat import make_torchvision_importable


def test_the_end_is_noted_once_and_before_any_goodbye_is_acknowledged() -> None:
    """Each goodbye has a thread of its own; two that wrote ``finished.json`` at once took each other's file away."""
    make_torchvision_importable()  # FedML imports it
    from calfat_plugin.host.silo.client import MyMessage, SiloClient
    from calfat_plugin.host.transports.message import Message

    noted = []

    def note() -> None:
        time.sleep(0.2)
        noted.append(threading.get_ident())

    client = object.__new__(SiloClient)  # without its transport: only what the message meets
    client._task, client._session = SimpleNamespace(on_finished=note), "ours"  # type: ignore[assignment]
    client._noted, client._noting = False, threading.Lock()
    goodbye = Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, 1, session="ours")

    def admitted(number: int) -> int:
        client._admit(goodbye)
        return len(noted)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(admitted, range(4))) == [1, 1, 1, 1]
