"""Limits of what one caller may hold of a party that listens: connections, and calls that do not send their message.

A process's descriptors and threads are there for all parties. gRPC's core accepts connections by itself, so their
number is an option of gRPC, which is only derived here. What gRPC has no option for is done here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import stat
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


# --- connections ------------------------------------------------------------------------------------------------------


def connections_allowed(num_parties: int) -> int:
    """How many connections a party can accept and still open its own files. Raises the process's own limit for them."""
    number = num_parties + _SPARE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH
    if hard != resource.RLIM_INFINITY:
        limit = min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = limit - _RESERVED - num_parties
    if room < 2 * num_parties:
        raise HostError(
            f"this process may open {limit} files and connections, which is too few for {num_parties} parties. "
            f"Allow it more: ulimit -n {_RESERVED + num_parties + number}."
        )
    return min(number, room)


class ConnectionGuard:
    """Closes the oldest connections of whoever has too many: a party, or those that were never one, by address.

    ``on_close`` is given the peer as ``host:port``, and the reason.
    """

    def __init__(self, port: int, num_parties: int, room: int, on_close: Callable[[str, str], object]) -> None:
        self._port = port
        self._on_close = on_close
        self._most_of_address = _STRANGERS + num_parties
        self._most_strangers = room * 3 // 4  # a quarter is for those that come next
        self._peers: list[Peer] = []  # the oldest first
        self._parties: dict[Peer, tuple[str, int]] = {}  # (party, how many connections it may have)
        self._lock = threading.Lock()

    def note_party(self, peer: str, party: str, ranks: int) -> None:
        """Note that a party has called over this connection, which counts for it from now on. Callable from any thread.

        Args:
            peer: the other end, as ``host:port``.
            party: what is known of it: its certificate's ranks, or its address, which may be that of several.
            ranks: for how many ranks it may speak.
        """
        host, _, port = peer.rpartition(":")
        if not host:  # a client that has died meanwhile: gRPC no longer knows its address
            return
        address = _plain(host.strip("[]"))
        with self._lock:
            self._parties[address, int(port)] = (party, ranks + _SPARE_OF_A_PARTY)

    def sweep(self) -> None:
        """Close what is too much now."""
        handles = dict(self._connections())
        still_open = [peer for peer in self._peers if peer in handles]
        known = set(still_open)
        self._peers = still_open + [peer for peer in handles if peer not in known]
        with self._lock:
            self._parties = {peer: party for peer, party in self._parties.items() if peer in handles}
            parties = dict(self._parties)
        num_of_party: Counter[str] = Counter()
        num_of_address: Counter[str] = Counter()
        for peer in reversed(self._peers):
            if peer in parties:
                party, most = parties[peer]
                num_of_party[party] += 1
                if num_of_party[party] > most:
                    self._close(handles[peer], peer, f"more than {most} connections of one party")
                continue
            address, _ = peer
            num_of_address[address] += 1
            if num_of_address[address] > self._most_of_address:
                reason = f"more than {self._most_of_address} connections of its address do nothing"
                self._close(handles[peer], peer, reason)
            elif num_of_address.total() > self._most_strangers:
                self._close(handles[peer], peer, f"more than {self._most_strangers} connections do nothing")

    def _close(self, handle: int, peer: Peer, reason: str) -> None:
        with suppress(OSError), _socket(handle) as connection:
            if _peer_of(connection, self._port) == peer:  # the number may be another file's by now
                connection.shutdown(socket.SHUT_RDWR)
        self._on_close(f"{peer[0]}:{peer[1]}", reason)

    def _connections(self) -> Iterator[tuple[Peer, int]]:
        """The connections to this party's port, each with its handle in this process."""
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
    """A second handle on an open socket."""
    if not stat.S_ISSOCK(os.fstat(handle).st_mode):  # closing a copy of a file's handle would end its POSIX locks
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copy = os.dup(handle)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def _peer_of(connection: socket.socket, port: int) -> Peer | None:
    """Who is connected to ``port`` through this socket; None for any other socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
        return None
    host, peer_port, *_ = connection.getpeername()
    return _plain(host), peer_port


def _plain(host: str) -> str:
    """An IP address as gRPC writes it: without a scope, and IPv4 also where a socket for both has accepted it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """A call whose message has not come yet. ``problem`` says why it was ended, if it was."""

    caller: str
    cancel: Callable[[], object]
    deadline: float
    problem: str = ""

    def end(self, problem: str) -> None:
        self.problem = problem
        self.cancel()


class CallGuard:
    """Ends calls that wait too long for their message, or are too many: there is always a thread for the next."""

    def __init__(self, capacity: int, per_caller: int, seconds: float) -> None:
        self._capacity = capacity
        self._per_caller = per_caller
        self._seconds = seconds
        self._waiting: list[Call] = []  # the oldest first
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, caller: str, cancel: Callable[[], object]) -> Iterator[Call]:
        """Around the wait for a message."""
        call = Call(caller, cancel, time.monotonic() + self._seconds)
        with self._lock:
            self._waiting.append(call)
            self._end_one_too_many(caller)
        try:
            yield call
        finally:
            with self._lock:
                self._waiting.remove(call)

    def _end_one_too_many(self, newest_caller: str) -> None:
        """Where a call is one too many, end the oldest of the caller that has most."""
        live = [call for call in self._waiting if not call.problem]
        calls_of = Counter(call.caller for call in live)
        if calls_of[newest_caller] > self._per_caller:
            greediest = newest_caller
            problem = f"more than {self._per_caller} calls at once without a message"
        elif len(live) > self._capacity:
            greediest = calls_of.most_common(1)[0][0]
            problem = "too many calls at once without a message"
        else:
            return
        for call in live:
            if call.caller == greediest:
                call.end(problem)
                return

    def sweep(self) -> None:
        """End the calls whose time is over."""
        now = time.monotonic()
        with self._lock:
            for call in self._waiting:
                if not call.problem and now > call.deadline:
                    call.end(f"no whole message within {self._seconds:.0f} s")
