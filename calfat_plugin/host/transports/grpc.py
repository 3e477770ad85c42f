"""The host's gRPC service without pickle, in both directions, with mutual TLS where there are certificates.

Method and request are the host's own (``gRPCCommManager/sendMessage``); what the request carries is ours. What one
caller may hold of a party that listens is limited: its descriptors, connections and threads are there for all. gRPC's
core accepts connections by itself, so their number is an option of its own, which is only derived here. What gRPC has
no option for is done here: a limit for each address, and limits for calls that do not send their message.
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
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read once, on import; its core writes past Python's stderr

import grpc
from fedml.core.distributed.communication.grpc import grpc_comm_manager_pb2 as pb
from fedml.core.distributed.communication.grpc.grpc_comm_manager_pb2_grpc import gRPCCommManagerStub

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import PostponedError, Transport
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.host.transports.message import ImpostorError, RefusedError
from calfat_plugin.host.transports.queues import Outgoing, UnreachableError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import Address, Silo, certificate_name

_ENOUGH = 65_536  # descriptors
_RESERVED = 256  # of them for the files and libraries of this process
_SPARE_CONNECTIONS = 1024  # beside one for each party
_STRANGERS = 64  # connections of one address, beside one for each party, that have not yet been a party's
_SPARE_OF_A_PARTY = 8  # connections of a party beside the one that it needs: what lost ones have left of them
_DESCRIPTORS = Path("/dev/fd")

Peer = tuple[str, int]  # IP address and port


def connections_allowed(num_parties: int) -> int:
    """How many connections a party can accept and still open its own files. Raises the process's own limit for them."""
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
    """Closes the oldest connections of whoever has too many: a party, or those that were never one, by address."""

    def __init__(self, port: int, num_parties: int, room: int, on_close: Callable[[str, str], object]) -> None:
        self._port, self._on_close = port, on_close  # the latter is given (peer as host:port, reason)
        self._of_address, self._in_all = _STRANGERS + num_parties, room * 3 // 4  # a quarter is for who comes next
        self._seen: dict[Peer, None] = {}  # in the order of their coming
        self._parties: dict[Peer, tuple[str, int]] = {}  # (party, how many connections it may have)
        self._lock = threading.Lock()

    def is_a_partys(self, peer: str, party: str, ranks: int) -> None:
        """A party has called over this connection: it counts for that party alone. Callable from any thread.

        ``party`` is what is known of it: its certificate's ranks, or its address, which may be that of several.
        """
        host, _, port = peer.rpartition(":")
        if not host:  # a client that has died meanwhile: gRPC no longer knows its address
            return
        with self._lock:
            self._parties[_plain(host.strip("[]")), int(port)] = party, ranks + _SPARE_OF_A_PARTY

    def sweep(self) -> None:
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
    """A second handle on an open socket."""
    if not stat.S_ISSOCK(os.fstat(handle).st_mode):
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
        self.problem = problem
        self.cancel()


class CallGuard:
    """Ends calls that wait too long for their message, or are too many: there is always a thread for the next."""

    def __init__(self, capacity: int, per_caller: int, seconds: float) -> None:
        self._capacity, self._per_caller, self._seconds = capacity, per_caller, seconds
        self._waiting: list[Call] = []  # the oldest first
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, caller: str, cancel: Callable[[], object]) -> Iterator[Call]:
        """Around the wait for a message. Where it is one too many, the oldest of the greediest caller is ended."""
        call = Call(caller, cancel, time.monotonic() + self._seconds)
        with self._lock:
            self._waiting.append(call)
            live = [each for each in self._waiting if not each.problem]
            callers = Counter(each.caller for each in live)
            greediest, problem = caller, ""
            if callers[caller] > self._per_caller:
                problem = f"more than {self._per_caller} calls at once without a message"
            elif len(live) > self._capacity:
                greediest, problem = callers.most_common(1)[0][0], "too many calls at once without a message"
            if problem:
                next(each for each in live if each.caller == greediest).end(problem)
        try:
            yield call
        finally:
            with self._lock:
                self._waiting.remove(call)

    def sweep(self) -> None:
        with self._lock:
            for call in self._waiting:
                if not call.problem and time.monotonic() > call.deadline:
                    call.end(f"no whole message within {self._seconds:.0f} s")


# --- the transport ----------------------------------------------------------------------------------------------------

_HANDSHAKE = 10.0  # seconds
_GRACE = 0.2  # seconds that calls in progress have when the party ends
_THREADS = 32  # beside two for each party
_SPARE_THREADS = 8  # never held by calls that have not sent their message
_CALLS_OF_A_PARTY = 4  # without a message yet: a heartbeat, an update, and what a lost connection has left of them
_STREAMS = 8  # of a connection
_FIRST_MESSAGE = 60.0  # seconds that a call may take to bring its message, and one more for each of these bytes
_BYTES_PER_SECOND = 1_000_000  # of the largest message allowed, by default eight times the model
_SWEEP = 0.5  # seconds
_FRAMING = 65536  # bytes around the payload: protobuf's and gRPC's
_WILL_NOT_CHANGE = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)


_SERVER = 0
_OTHER_NAME = "Hostname Verification Check failed"  # gRPC's words where a certificate is valid, and another's


class GRPCTransport(Transport):
    """One party's end: a server on its own address, a channel to each peer."""

    def __init__(self, rank: int, silo: Silo, max_message: int) -> None:
        self._parties, self._max_message = silo.addresses, max_message
        self._certificates = None if silo.tls is None else Certificates.read(silo.tls, rank)
        room = connections_allowed(len(silo.addresses))
        self._options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", max_message + _FRAMING),
            ("grpc.enable_http_proxy", 0),
            ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE)),
            ("grpc.max_allowed_incoming_connections", room),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.so_reuseport", 0),  # or a second process could share the port in silence
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        own, num_parties = self._parties[rank], len(self._parties)
        self._num_threads = _THREADS + 2 * num_parties
        capacity = self._num_threads - _SPARE_THREADS
        per_caller = capacity if self._certificates is None else _CALLS_OF_A_PARTY  # an address may be that of several
        self._calls = CallGuard(capacity, per_caller, _FIRST_MESSAGE + max_message / _BYTES_PER_SECOND)
        self._server = self._listen(own if silo.bind is None else Address(silo.bind, own.port), rank)
        self._channels: dict[int, Any] = {}
        super().__init__(rank, num_parties)
        self._connections = ConnectionGuard(own.port, num_parties, room, self.refusals.add)
        self._server.start()
        self._ended = threading.Event()
        threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        stub = gRPCCommManagerStub(self._channel(peer))
        request = pb.CommRequest(client_id=self.rank, message=outgoing.data)
        call = stub.sendMessage.future(request, timeout=max(0.05, outgoing.deadline - time.monotonic()))
        outgoing.on_cancel = call.cancel
        if outgoing.cancelled.is_set():  # meanwhile
            call.cancel()
        try:
            call.result()
        except grpc.FutureCancelledError:
            raise UnreachableError("given up for a newer message") from None
        except grpc.RpcError as error:
            if error.code() in _WILL_NOT_CHANGE:
                raise RefusedError(peer_text(error.details())) from None
            reason = peer_text(str(error.details() or "no answer").splitlines()[0])
            if peer == _SERVER and _OTHER_NAME in reason:  # of a client that is somebody else, the next may be itself
                raise ImpostorError(
                    f"{self._parties[peer]} has a certificate that is not made out to {certificate_name(peer)}"
                ) from None
            raise UnreachableError(f"{self._parties[peer]}: {reason}") from None

    def stop_receive_message(self) -> None:
        super().stop_receive_message()
        self._ended.set()
        self._server.stop(_GRACE).wait()
        for channel in self._channels.values():
            channel.close()

    def _listen(self, address: Address, rank: int) -> Any:
        threads = futures.ThreadPoolExecutor(max_workers=self._num_threads)
        server = grpc.server(threads, options=self._options)
        # On the wire the same as the host's unary method. But a stream's handler is called before the request is read,
        # so that what is too large or broken off, and without a deserializer what is no request, is logged with its
        # sender, too.
        method = grpc.stream_unary_rpc_method_handler(
            self._answer, response_serializer=pb.CommResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("gRPCCommManager", {"sendMessage": method}),)
        )
        try:
            if self._certificates is None:
                server.add_insecure_port(str(address))
            else:
                # Only those are let in who have a certificate of the authority.
                own = [(self._certificates.key, self._certificates.cert)]
                credentials = grpc.ssl_server_credentials(own, self._certificates.ca, require_client_auth=True)
                server.add_secure_port(str(address), credentials)
        except RuntimeError:
            raise HostError(
                f"rank {rank} cannot listen on {address}: the port is taken, or the address is not this machine's. "
                "End the process that has it, or change calfat.silo.parties (calfat.silo.bind, where the others "
                "reach this machine under another address)."
            ) from None
        return server

    def _channel(self, peer: int) -> Any:
        if peer not in self._channels:
            target = str(self._parties[peer])
            if (files := self._certificates) is None:
                self._channels[peer] = grpc.insecure_channel(target, self._options)
            else:
                named = [*self._options, ("grpc.ssl_target_name_override", certificate_name(peer))]
                credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
                self._channels[peer] = grpc.secure_channel(target, credentials, named)
        return self._channels[peer]

    def _answer(self, requests: Iterator[bytes], context: Any) -> Any:
        sender = unquote(str(context.peer()).partition(":")[2])  # host:port
        ranks = self._ranks_of(context)
        proved = ranks if self._certificates else ()
        caller = str(sorted(proved)) if proved else sender.rpartition(":")[0]
        if proved:
            self._connections.is_a_partys(sender, caller, len(ranks))
        with self._calls.waiting(caller, context.cancel) as call:
            try:
                raw = next(requests)
            except (StopIteration, grpc.RpcError):
                reason = f"broken off, or larger than the {self._max_message} bytes that are allowed"
                self.refusals.add(sender, call.problem or reason)
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no whole message")
        try:
            request = pb.CommRequest.FromString(raw)
        except Exception:  # protobuf's DecodeError; whatever it is, the sender is the cause
            self.refusals.add(sender, f"{len(raw)} bytes that are no request")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a request")
        try:
            self.receive(request.message, sender, ranks)
            self._connections.is_a_partys(sender, caller, len(ranks))
        except RefusedError as refused:
            postponed = isinstance(refused, PostponedError)
            status = grpc.StatusCode.UNAVAILABLE if postponed else grpc.StatusCode.FAILED_PRECONDITION
            context.abort(status, peer_text(refused))
        return pb.CommResponse(client_id=self.rank)

    def _guard(self) -> None:
        while not self._ended.wait(_SWEEP):
            self._connections.sweep()
            self._calls.sweep()

    def _ranks_of(self, context: Any) -> frozenset[int]:
        """The ranks that a caller may speak for: those in its certificate; without certificates, all."""
        ranks = range(len(self._parties))
        if self._certificates is None:
            return frozenset(ranks)
        names = context.auth_context().get("peer_dns", ())  # its DNS names alone, not an e-mail address or a URI
        return frozenset(rank for rank in ranks if certificate_name(rank).encode() in names)
