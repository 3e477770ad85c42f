"""Python imports this at its start: from then on no socket leaves this machine, and each try is written down.

Written down in the file that the environment variable ``SOCKET_RECORD`` names, whose first line says that the guard is
up. A child process of Python inherits the guard with the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

_LOOPBACK = ("127.", "::1", "localhost")


def _note(text: str) -> None:
    with open(os.environ["SOCKET_RECORD"], "a", encoding="utf-8") as record:
        record.write(text + "\n")


def _is_local(address: Any) -> bool:
    host = address[0] if isinstance(address, tuple) else address  # a text is a path: a socket of this machine
    return isinstance(address, str | bytes) or str(host).startswith(_LOOPBACK)


def _check(name: str, address: Any) -> None:
    if not _is_local(address):
        _note(f"{name} {address}")
        raise OSError(f"no network in this test: {name} {address}")


def _guarded(name: str) -> Callable[..., Any]:
    """A look-up of names that looks up this machine only."""
    original = getattr(socket, name)

    def look_up(host: Any, *rest: Any, **keywords: Any) -> Any:
        _check(name, (host.decode() if isinstance(host, bytes) else host or "localhost",))
        return original(host, *rest, **keywords)

    return look_up


class GuardedSocket(socket.socket):
    """Every socket of Python code is one of these."""

    def connect(self, address: Any) -> None:
        _check("connect", address)
        super().connect(address)

    def connect_ex(self, address: Any) -> int:
        _check("connect_ex", address)
        return super().connect_ex(address)

    def sendto(self, data: Any, *rest: Any) -> int:
        _check("sendto", rest[-1])
        return super().sendto(data, *rest)


if os.environ.get("SOCKET_RECORD"):
    _note("the guard is up")
    socket.socket = GuardedSocket  # type: ignore[misc]
    for lookup in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        setattr(socket, lookup, _guarded(lookup))
