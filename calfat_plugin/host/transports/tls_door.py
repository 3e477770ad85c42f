"""The door of a party with certificates: TLS ends here, and whoever is turned away is logged with the address.

gRPC's own TLS turns strangers away as well, but inside its core, where nobody hears of it. So gRPC listens on a port of
the loopback that only this door may use, and each connection that has proved who it is goes on there. gRPC sees the
door's own source ports, by which :meth:`TLSDoor.caller` tells who is behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

log = logging.getLogger(__name__)

_HANDSHAKE = 10.0  # seconds
_MOST_CONNECTIONS = 1024


@dataclass(frozen=True)
class Caller:
    """Who is behind a connection.

    Attributes:
        address: host:port at the other end.
        names: DNS names in its certificate.
    """

    address: str
    names: frozenset[str]


class _Pipe(asyncio.Protocol):
    """One end of a connection: what arrives here leaves at the other end, no faster than that can send."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._other: _Pipe | None = None
        self._early = b""  # a client may speak in the same breath in which its handshake ends
        self._on_lost: Callable[[], object] = lambda: None

    def join(self, other: _Pipe, on_lost: Callable[[], object]) -> None:
        """Be connected to ``other`` from now on; ``on_lost`` is called before this end's port is free again."""
        self._other, self._on_lost = other, on_lost
        self.data_received(self._early)
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        elif self._other.transport is not None:
            self._other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._on_lost()
        if self._other is not None and self._other.transport is not None:
            self._other.transport.close()

    def pause_writing(self) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.resume_reading()


class _Arrival(asyncio.Protocol):
    """A connection before its handshake: nothing is read here, the handshake does that."""

    def __init__(self, door: TLSDoor) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        arrival = cast(asyncio.Transport, transport)
        arrival.pause_reading()
        self._door.admit(arrival)


class TLSDoor:
    """Listens on an address, and passes on to a port of the loopback.

    Args:
        host, port: where to listen.
        context: this party's certificate, and whom it trusts.
        backend_port: where gRPC listens on 127.0.0.1.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, context: ssl.SSLContext, backend_port: int) -> None:
        self._context, self._backend_port = context, backend_port
        self._callers: dict[int, Caller] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pipes: set[_Pipe] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-door", daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(
            self._loop.create_server(lambda: _Arrival(self), host, port), self._loop
        )
        try:
            self._server = listening.result()
        except BaseException:
            self._stop()
            raise

    def caller(self, source_port: int) -> Caller | None:
        """Who is behind a connection to the backend; None for one that did not come through this door."""
        return self._callers.get(source_port)

    def close(self) -> None:
        """Let nobody in any more, and end all connections; safe to call twice."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._stop()

    # --- in the loop's thread ---

    def admit(self, arrival: asyncio.Transport) -> None:
        """Begin the handshake."""
        address = _text(arrival.get_extra_info("peername"))
        if len(self._tasks) + len(self._pipes) // 2 >= _MOST_CONNECTIONS:
            log.warning("connection from %s refused: %d are open", address, _MOST_CONNECTIONS)
            arrival.abort()
            return
        task = self._loop.create_task(self._let_in(arrival, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_in(self, arrival: asyncio.Transport, address: str) -> None:
        outside = _Pipe()
        try:
            transport = await self._loop.start_tls(
                arrival, outside, self._context, server_side=True, ssl_handshake_timeout=_HANDSHAKE
            )
        except OSError as error:  # ssl.SSLError and what a peer that hangs up gives are such
            log.warning("connection from %s refused: %s", address, _reason(error))
            arrival.abort()
            return
        if transport is None:
            return
        outside.transport = transport
        transport.pause_reading()
        certificate = transport.get_extra_info("peercert") or {}
        names = frozenset(value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
        await self._join(outside, Caller(address, names))

    async def _join(self, outside: _Pipe, caller: Caller) -> None:
        inside = _Pipe()
        try:
            await self._loop.create_connection(lambda: inside, "127.0.0.1", self._backend_port)
        except OSError as error:  # gRPC has stopped: this party is about to end
            log.debug("connection from %s dropped: %s", caller.address, error)
        if inside.transport is None or outside.transport is None:
            for pipe in (inside, outside):
                if pipe.transport is not None:
                    pipe.transport.abort()
            return
        source_port = inside.transport.get_extra_info("sockname")[1]
        self._callers[source_port] = caller  # before the first byte goes through
        self._pipes |= {inside, outside}

        def forget() -> None:
            self._pipes -= {inside, outside}
            self._callers.pop(source_port, None)

        outside.join(inside, lambda: None)
        inside.join(outside, forget)
        outside.transport.resume_reading()

    async def _close(self) -> None:
        self._server.close()
        for pipe in list(self._pipes):
            if pipe.transport is not None:
                pipe.transport.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _text(peername: object) -> str:
    if not isinstance(peername, tuple):
        return "an address that is gone already"
    host, port = peername[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    words = str(getattr(error, "reason", None) or "") or str(error) or "it hung up"
    return words.lower().replace("_", " ")
