"""The host's gRPC service without pickle, in both directions, with mutual TLS where there are certificates.

Method and request are the host's own (``gRPCCommManager/sendMessage``); what the request carries is ours. What one
caller may hold of a party that listens is limited (``guards.py``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any
from urllib.parse import unquote

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read once, on import; its core writes past Python's stderr

import grpc
from fedml.core.distributed.communication.grpc import grpc_comm_manager_pb2 as pb
from fedml.core.distributed.communication.grpc.grpc_comm_manager_pb2_grpc import gRPCCommManagerStub

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import Outgoing, PostponedError, Transport, UnreachableError
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.host.transports.guards import CallGuard, ConnectionGuard, connections_allowed
from calfat_plugin.host.transports.message import ImpostorError, RefusedError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import Address, Silo, certificate_name

_SERVER = 0
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
_OTHER_NAME = "Hostname Verification Check failed"  # gRPC's words where a certificate is valid, and another's


class GRPCTransport(Transport):
    """One party's end: a server on its own address, a channel to each peer."""

    def __init__(self, rank: int, silo: Silo, max_message: int) -> None:
        self._parties = silo.addresses
        self._max_message = max_message
        self._certificates: Certificates | None = None
        if silo.tls is not None:
            self._certificates = Certificates.read(silo.tls, rank)
        num_parties = len(self._parties)
        room = connections_allowed(num_parties)
        self._options = _options(max_message, room)
        num_threads = _THREADS + 2 * num_parties
        capacity = num_threads - _SPARE_THREADS
        calls_per_caller = capacity  # without certificates a caller is an address, which may be that of several parties
        if self._certificates is not None:
            calls_per_caller = _CALLS_OF_A_PARTY
        self._calls = CallGuard(capacity, calls_per_caller, _FIRST_MESSAGE + max_message / _BYTES_PER_SECOND)
        address = self._parties[rank]
        if silo.bind is not None:
            address = Address(silo.bind, address.port)
        self._server = self._listen(address, rank, num_threads)
        self._channels: dict[int, Any] = {}
        super().__init__(rank, num_parties)
        self._connections = ConnectionGuard(address.port, num_parties, room, self.refusals.add)
        self._server.start()
        self._ended = threading.Event()
        threading.Thread(target=self._keep_sweeping, name="guard", daemon=True).start()

    def stop_receive_message(self) -> None:
        super().stop_receive_message()
        self._ended.set()
        self._server.stop(_GRACE).wait()
        for channel in self._channels.values():
            channel.close()

    def _keep_sweeping(self) -> None:
        while not self._ended.wait(_SWEEP):
            self._connections.sweep()
            self._calls.sweep()

    # --- sending ---

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
            address = self._parties[peer]
            reason = peer_text(str(error.details() or "no answer").splitlines()[0])
            if peer == _SERVER and _OTHER_NAME in reason:  # at a client's address the right one may come later
                name = certificate_name(peer)
                raise ImpostorError(f"{address} has a certificate that is not made out to {name}") from None
            raise UnreachableError(f"{address}: {reason}") from None

    def _channel(self, peer: int) -> Any:
        """The connection to a peer, which gRPC opens anew when it breaks."""
        if peer in self._channels:
            return self._channels[peer]
        target = str(self._parties[peer])
        files = self._certificates
        if files is None:
            channel = grpc.insecure_channel(target, self._options)
        else:
            options = [*self._options, ("grpc.ssl_target_name_override", certificate_name(peer))]
            credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
            channel = grpc.secure_channel(target, credentials, options)
        self._channels[peer] = channel
        return channel

    # --- receiving, in threads of gRPC ---

    def _listen(self, address: Address, rank: int, num_threads: int) -> Any:
        threads = futures.ThreadPoolExecutor(max_workers=num_threads)
        server = grpc.server(threads, options=self._options)
        # On the wire the same as the host's unary method. But a stream's handler is called before the request is read,
        # and without a deserializer. So the log says who sent what is too large, broken off or no request at all.
        method = grpc.stream_unary_rpc_method_handler(
            self._answer, response_serializer=pb.CommResponse.SerializeToString
        )
        service = grpc.method_handlers_generic_handler("gRPCCommManager", {"sendMessage": method})
        server.add_generic_rpc_handlers((service,))
        files = self._certificates
        try:
            if files is None:
                server.add_insecure_port(str(address))
            else:  # only parties with a certificate of the authority are let in
                pair = [(files.key, files.cert)]
                credentials = grpc.ssl_server_credentials(pair, files.ca, require_client_auth=True)
                server.add_secure_port(str(address), credentials)
        except RuntimeError:
            raise HostError(
                f"rank {rank} cannot listen on {address}: the port is taken, or the address is not this machine's. "
                "End the process that has it, or change calfat.silo.parties (calfat.silo.bind, where the others "
                "reach this machine under another address)."
            ) from None
        return server

    def _answer(self, requests: Iterator[bytes], context: Any) -> Any:
        """Take a message, and answer whether it is in the inbox."""
        sender = unquote(str(context.peer()).partition(":")[2])  # host:port
        ranks = self._ranks_of(context)
        is_proved = self._certificates is not None and len(ranks) > 0
        caller = sender.rpartition(":")[0]
        if is_proved:
            caller = str(sorted(ranks))
            self._connections.note_party(sender, caller, len(ranks))
        with self._calls.waiting(caller, context.cancel) as call:
            try:
                content = next(requests)
            except (StopIteration, grpc.RpcError):
                reason = f"broken off, or larger than the {self._max_message} bytes that are allowed"
                self.refusals.add(sender, call.problem or reason)
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no whole message")
                raise  # not reached: abort raises
        try:
            request = pb.CommRequest.FromString(content)
        except Exception:  # protobuf's DecodeError; whatever it is, the sender is the cause
            self.refusals.add(sender, f"{len(content)} bytes that are no request")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a request")
        try:
            self.receive(request.message, sender, ranks)
        except PostponedError as refused:
            context.abort(grpc.StatusCode.UNAVAILABLE, peer_text(refused))
        except RefusedError as refused:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, peer_text(refused))
        self._connections.note_party(sender, caller, len(ranks))
        return pb.CommResponse(client_id=self.rank)

    def _ranks_of(self, context: Any) -> frozenset[int]:
        """The ranks that a caller may speak for: those in its certificate; without certificates, all."""
        ranks = range(len(self._parties))
        if self._certificates is None:
            return frozenset(ranks)
        names = context.auth_context().get("peer_dns", ())  # its DNS names alone, not an e-mail address or a URI
        return frozenset(rank for rank in ranks if certificate_name(rank).encode() in names)


def _options(max_message: int, num_connections: int) -> list[tuple[str, int]]:
    """gRPC's own settings of a server and its channels."""
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", max_message + _FRAMING),
        ("grpc.enable_http_proxy", 0),
        ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE)),
        ("grpc.max_allowed_incoming_connections", num_connections),
        ("grpc.max_concurrent_streams", _STREAMS),
        ("grpc.so_reuseport", 0),  # or a second process could share the port in silence
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
