"""One party's connection to an MQTT broker: kept up, subscribed to what is for this party, and proved who it is."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paho.mqtt import client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.recipe.silo import MQTTSettings, Silo, certificate_name, for_rank

log = logging.getLogger(__name__)

_MAX_PACKET = 65_536  # bytes; the broker keeps anything larger from us
_KEEPALIVE = 20  # seconds
_PAUSE = 1.0  # seconds between two tries
_FAILURE = 0x80  # MQTT 5: reason codes from here on are errors


class Broker:
    """The connection; it comes back by itself.

    Topics are ``calfat/<run>/<sender>/<receiver>`` with the names of the parties' certificates, so that two access
    rules keep everyone in their place.

    Args:
        silo: address, run, password or certificates.
        rank: of this party.
        on_message: called with (sender's name, message) in the library's thread; must not wait.

    Raises:
        HostError: certificates or password cannot be read.
    """

    def __init__(self, silo: Silo, rank: int, on_message: Callable[[str, Any], None]) -> None:
        self._rank, self._settings, self._name = rank, silo.mqtt, certificate_name(rank)
        self._on_message = on_message
        self._subscribed, self._lost = threading.Event(), threading.Event()
        self._denied, self._failure = "", "no answer"
        self._closing = False
        self._client = _client(silo, rank)
        self._client.on_connect, self._client.on_subscribe = self._connected, self._answered
        self._client.on_disconnect, self._client.on_message = self._disconnected, self._arrived
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"the MQTT broker {self._settings.broker}"

    @property
    def is_there(self) -> bool:
        """Whether messages can be sent and received now."""
        return self._subscribed.is_set()

    def publish(self, peer: int, kind: str, message_id: str, payload: bytes, life: int) -> Any:
        """Send to rank ``peer``; the broker forgets it after ``life`` seconds. Returns the library's receipt."""
        properties = Properties(PacketTypes.PUBLISH)
        properties.CorrelationData = message_id.encode()
        properties.UserProperty = ("calfat", kind)
        properties.MessageExpiryInterval = life
        topic = f"calfat/{self._settings.run}/{self._name}/{certificate_name(peer)}"
        # Never retained: the next run would receive it.
        return self._client.publish(topic, payload, qos=1, retain=False, properties=properties)

    def wait(self, until: float) -> None:
        """Wait for the connection.

        Raises:
            HostError: the broker refuses this party, or does not let it in before ``until`` (monotonic).
        """
        where = f"{self} (calfat.silo.mqtt.broker)"
        while not self._subscribed.wait(0.05):
            if self._denied:
                raise HostError(
                    f"{where} refuses rank {self._rank}: {self._denied}. Check its access rules, and this party's "
                    "certificate or password."
                )
            if time.monotonic() > until:
                raise HostError(
                    f"{where} did not let rank {self._rank} in before calfat.silo.start_deadline: {self._failure}. "
                    "Start it, or correct its address or the certificates."
                )

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self._closing = True
        with suppress(OSError):  # a connection that never came about cannot be ended in order
            self._client.disconnect()
        self._lost.set()
        self._thread.join()

    # --- keeping up the connection ---

    def _serve(self) -> None:
        """Connect, and again whenever the connection breaks. The library's own thread reads and writes."""
        address, logged = self._settings.address, ""
        while not self._closing:
            self._lost.clear()
            try:
                self._client.connect(
                    address.host, address.port, _KEEPALIVE, clean_start=True, properties=_connect_properties()
                )
            except OSError as error:  # ssl.SSLError is one
                self._failure = str(error) or type(error).__name__
            else:
                # Not loop_forever in this thread: whoever publishes would then write to the socket beside it.
                self._client.loop_start()
                if not self._closing:
                    self._lost.wait()
                self._client.loop_stop()
                self._failure = "it closes the connection"
            self._subscribed.clear()
            if not self._closing and self._failure != logged:
                log.warning("%s: %s; trying again", self, self._failure)
                logged = self._failure
            if not self._closing:
                time.sleep(_PAUSE)

    # --- callbacks, in the library's thread ---

    def _connected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.value >= _FAILURE:
            self._deny(str(reason))
        else:
            client.subscribe(f"calfat/{self._settings.run}/+/{self._name}", qos=1)

    def _answered(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if reasons[0].value >= _FAILURE:
            self._deny(f"it may not read its topic ({reasons[0]})")
        else:
            self._subscribed.set()

    def _deny(self, reason: str) -> None:
        self._denied = reason
        log.error("%s refuses this party: %s", self, reason)

    def _disconnected(self, client: Any, userdata: Any, reason: Any, properties: Any = None) -> None:
        self._subscribed.clear()
        self._lost.set()

    def _arrived(self, client: Any, userdata: Any, message: Any) -> None:
        try:
            self._on_message(str(message.topic).split("/")[-2], message)
        except Exception:  # our bug; but the library's thread, and with it the connection, must not end
            log.exception("a message could not be processed")


def _client(silo: Silo, rank: int) -> Any:
    """The library's client, with what proves who we are."""
    settings = silo.mqtt
    client = mqtt.Client(protocol=mqtt.MQTTv5, reconnect_on_failure=False)
    if settings.username is not None:
        client.username_pw_set(for_rank(settings.username, rank), _password(settings, rank))
    if silo.tls is not None:
        client.tls_set_context(Certificates.read(silo.tls, rank).client_context)
    elif settings.tls:
        client.tls_set_context(ssl.create_default_context())
    return client


def _password(settings: MQTTSettings, rank: int) -> str:
    path = Path(for_rank(str(settings.password_file), rank)).expanduser()
    try:
        return path.read_text().partition("\n")[0]
    except OSError as error:
        raise HostError(f"calfat.silo.mqtt.password_file: {path} cannot be read ({error.strerror}).") from None


def _connect_properties() -> Properties:
    properties = Properties(PacketTypes.CONNECT)
    properties.MaximumPacketSize = _MAX_PACKET
    return properties
