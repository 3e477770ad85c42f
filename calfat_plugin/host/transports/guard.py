"""What one caller may hold of a party that listens: its descriptors, connections and threads are there for all.

gRPC's core accepts connections by itself, so their number is an option of its own, which is only derived here. What
gRPC has no option for is done here: a limit for each address, and limits for calls that do not send their message.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from calfat_plugin.errors import HostError

_ENOUGH = 65_536  # descriptors
_RESERVED = 256  # of them for the files and libraries of this process
_SPARE_CONNECTIONS = 1024  # beside one for each party
_STRANGERS = 64  # connections of one address, beside one for each party, that have not yet been a party's
_SPARE_OF_A_PARTY = 8  # connections of a party beside the one that it needs: what lost ones have left of them
_DESCRIPTORS = Path("/dev/fd")

Peer = tuple[str, int]  # IP address and port


def connections_allowed(num_parties: int) -> int:
    """How many connections a party can accept and still open its own files. Raises the process's own limit for them.

    Args:
        num_parties: server and clients, each of which may connect and be connected to.

    Raises:
        HostError: the system allows too few descriptors.
    """
    wanted = num_parties + _SPARE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = limit - _RESERVED - num_parties
    if room < 2 * num_parties:
        raise HostError(
            f"this process may open {limit} files and connections, which is too few for {num_parties} parties. "
            f"Allow it more: ulimit -n {_RESERVED + num_parties + wanted}."
        )
    return min(wanted, room)


class ConnectionGuard:
    """Closes the oldest connections of whoever has too many: a party, or those that were never one, by their address.

    Args:
        port: where this process listens.
        num_parties: server and clients.
        room: from :func:`connections_allowed`; a quarter is kept free for those who come next.
        on_close: called with (peer as ``host:port``, reason).
    """

    def __init__(self, port: int, num_parties: int, room: int, on_close: Callable[[str, str], object]) -> None:
        self._port, self._on_close = port, on_close
        self._of_address, self._in_all = _STRANGERS + num_parties, room * 3 // 4
        self._seen: dict[Peer, None] = {}  # in the order of their coming
        self._parties: dict[Peer, tuple[str, int]] = {}  # (party, how many connections it may have)
        self._lock = threading.Lock()

    def is_a_partys(self, peer: str, party: str, ranks: int) -> None:
        """A party has called over this connection: it counts for that party alone. Callable from any thread.

        Args:
            peer: ``host:port``.
            party: what is known of it: its certificate's ranks, or its address, which may be that of several.
            ranks: how many it may speak for.
        """
        host, _, port = peer.rpartition(":")
        with self._lock:
            self._parties[_plain(host.strip("[]")), int(port)] = party, ranks + _SPARE_OF_A_PARTY

    def sweep(self) -> None:
        """Look at all connections, and close what is too much."""
        handles = dict(self._connections())
        with self._lock:
            self._parties = {peer: whose for peer, whose in self._parties.items() if peer in handles}
            parties = dict(self._parties)
        self._seen = {**{peer: None for peer in self._seen if peer in handles}, **dict.fromkeys(handles)}
        kept: Counter[str] = Counter()
        of_party: Counter[str] = Counter()
        for peer in reversed(self._seen):
            if peer in parties:
                party, most = parties[peer]
                of_party[party] += 1
                if of_party[party] > most:
                    self._close(handles[peer], peer, f"more than {most} connections of one party")
                continue
            kept[peer[0]] += 1
            if kept[peer[0]] > self._of_address:
                self._close(handles[peer], peer, f"more than {self._of_address} connections of its address do nothing")
            elif kept.total() > self._in_all:
                self._close(handles[peer], peer, f"more than {self._in_all} connections do nothing")

    def _close(self, handle: int, peer: Peer, reason: str) -> None:
        """End a connection; gRPC, whose descriptor it is, then finds it ended."""
        with suppress(OSError), _socket(handle) as connection:
            if _peer_of(connection, self._port) == peer:  # the number may be another file's by now
                connection.shutdown(socket.SHUT_RDWR)
        self._on_close(f"{peer[0]}:{peer[1]}", reason)

    def _connections(self) -> Iterator[tuple[Peer, int]]:
        try:
            handles = [int(name) for name in os.listdir(_DESCRIPTORS)]
        except OSError:  # no such folder: a sandbox
            return
        for handle in handles:
            with suppress(OSError), _socket(handle) as connection:
                peer = _peer_of(connection, self._port)
                if peer is not None:
                    yield peer, handle


@contextmanager
def _socket(handle: int) -> Iterator[socket.socket]:
    """A second handle on an open socket.

    Raises:
        OSError: it is none, or closed by now.
    """
    copy = os.dup(handle)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def _peer_of(connection: socket.socket, port: int) -> Peer | None:
    """Who is connected to ``port`` through this socket; None for any other socket.

    Raises:
        OSError: it is not connected, or no socket at all.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
        return None
    host, peer_port, *_ = connection.getpeername()
    return _plain(host), peer_port


def _plain(host: str) -> str:
    """An IP address as gRPC writes it: without a scope, and IPv4 also where a socket for both has accepted it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@dataclass(eq=False)
class Call:
    """A call whose message has not come yet. ``problem`` says why it was ended, if it was."""

    caller: str
    cancel: Callable[[], object]
    deadline: float
    problem: str = ""

    def end(self, problem: str) -> None:
        """Cancel it."""
        self.problem = problem
        self.cancel()


class CallGuard:
    """Ends calls that wait too long for their message, or are too many, so that there is always a thread for the next.

    Args:
        capacity: calls that may wait at the same time.
        per_caller: of one caller.
        seconds: that a call may wait.
    """

    def __init__(self, capacity: int, per_caller: int, seconds: float) -> None:
        self._capacity, self._per_caller, self._seconds = capacity, per_caller, seconds
        self._waiting: list[Call] = []  # the oldest first
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, caller: str, cancel: Callable[[], object]) -> Iterator[Call]:
        """Around the wait for a message. Where it is one too many, the oldest of the greediest caller is ended.

        Args:
            caller: who shares ``per_caller``.
            cancel: ends the wait.
        """
        call = Call(caller, cancel, time.monotonic() + self._seconds)
        with self._lock:
            self._waiting.append(call)
            self._make_room(caller)
        try:
            yield call
        finally:
            with self._lock:
                self._waiting.remove(call)

    def sweep(self) -> None:
        """End the calls whose time is over."""
        with self._lock:
            for call in self._waiting:
                if not call.problem and time.monotonic() > call.deadline:
                    call.end(f"no whole message within {self._seconds:.0f} s")

    def _make_room(self, caller: str) -> None:
        live = [call for call in self._waiting if not call.problem]
        callers = Counter(call.caller for call in live)
        if callers[caller] > self._per_caller:
            greediest, problem = caller, f"more than {self._per_caller} calls at once without a message"
        elif len(live) > self._capacity:
            greediest, problem = callers.most_common(1)[0][0], "too many calls at once without a message"
        else:
            return
        next(call for call in live if call.caller == greediest).end(problem)
