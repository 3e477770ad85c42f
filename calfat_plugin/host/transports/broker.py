"""The connection to an MQTT broker, which comes back by itself."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paho.mqtt import client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from calfat_plugin.disk import expanded
from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.recipe.silo import Silo, certificate_name, for_rank

log = logging.getLogger(__name__)

_MAX_PACKET = 65_536  # bytes; the broker is asked to keep anything larger
_KEEPALIVE = 20  # seconds
_FAILURE = 0x80  # MQTT 5: reason codes from here on are errors
_PAUSE = 1.0  # seconds between two tries to reach the broker


class Broker:
    """The connection. ``is_there`` says whether messages can be sent and received now.

    Topics are ``calfat/<run>/<sender>/<receiver>`` with the names of the parties' certificates, so that two access
    rules keep everyone in their place.

    ``on_message`` is given (sender's name, message of the library) in the library's thread. It must not wait.
    """

    def __init__(self, silo: Silo, rank: int, on_message: Callable[[str, Any], None]) -> None:
        self._rank = rank
        self._settings = silo.mqtt
        self._name = certificate_name(rank)
        self._on_message = on_message
        self.is_there = threading.Event()
        self._lost = threading.Event()
        self._closing = False
        self._denied = ""  # why the broker does not let this party in
        self._failure = "no answer"  # of the last try to reach it
        self._client = _client(silo, rank)
        self._client.on_connect = self._connected
        self._client.on_subscribe = self._subscribed
        self._client.on_disconnect = self._disconnected
        self._client.on_message = self._arrived
        self._thread = threading.Thread(target=self._keep_connected, name="broker", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"the MQTT broker {self._settings.broker}"

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
        """Wait for the connection, at the latest until this monotonic time."""
        where = f"{self} (calfat.silo.mqtt.broker)"
        while not self.is_there.wait(0.05):
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

    # --- a thread of ours that keeps up the connection; the library's own thread reads and writes ---

    def _keep_connected(self) -> None:
        """Connect, and again whenever the connection breaks."""
        logged = ""
        while not self._closing:
            self._lost.clear()
            self._failure = self._connect_until_lost()
            self.is_there.clear()
            if self._closing:
                return
            if self._failure != logged:
                log.warning("%s: %s; trying again", self, self._failure)
                logged = self._failure
            time.sleep(_PAUSE)

    def _connect_until_lost(self) -> str:
        """Connect, and return when the connection has ended, with the reason."""
        address = self._settings.address
        properties = Properties(PacketTypes.CONNECT)
        properties.MaximumPacketSize = _MAX_PACKET
        try:
            self._client.connect(address.host, address.port, _KEEPALIVE, clean_start=True, properties=properties)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; a name that no host can have, a ValueError
            return str(error) or type(error).__name__
        # Not loop_forever in this thread: whoever publishes would then write to the socket beside it.
        self._client.loop_start()
        reader = self._client._thread
        reason = "it closes the connection"
        while not self._closing and not self._lost.wait(_PAUSE):
            # The reader also dies of a packet that it cannot read, such as one with U+FEFF in a text. It calls nobody.
            if not reader.is_alive():
                reason = "it forwarded a message that cannot be read"
                break
        self._client.loop_stop()
        return reason

    # --- callbacks, in the library's thread ---

    def _connected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.value >= _FAILURE:
            self._note_denial(str(reason))
        else:
            client.subscribe(f"calfat/{self._settings.run}/+/{self._name}", qos=1)

    def _subscribed(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if reasons[0].value >= _FAILURE:
            self._note_denial(f"it may not read its topic ({reasons[0]})")
        else:
            self.is_there.set()

    def _note_denial(self, reason: str) -> None:
        self._denied = reason
        log.error("%s refuses this party: %s", self, reason)

    def _disconnected(self, client: Any, userdata: Any, reason: Any, properties: Any = None) -> None:
        self.is_there.clear()
        self._lost.set()

    def _arrived(self, client: Any, userdata: Any, message: Any) -> None:
        try:
            sender = str(message.topic).split("/")[-2]
            self._on_message(sender, message)
        except Exception:  # our bug; but the library's thread, and with it the connection, must not end
            log.exception("a message could not be processed")


def _client(silo: Silo, rank: int) -> Any:
    """The library's client, with the password and certificates that the recipe names for party ``rank``."""
    client = mqtt.Client(protocol=mqtt.MQTTv5, reconnect_on_failure=False)
    if silo.mqtt.username is not None:
        path = expanded(for_rank(str(silo.mqtt.password_file), rank))
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise HostError(f"calfat.silo.mqtt.password_file: {path} cannot be read ({error.strerror}).") from None
        except UnicodeDecodeError:
            raise HostError(f"calfat.silo.mqtt.password_file: {path} cannot be read (it is not UTF-8).") from None
        first_line = text.partition("\n")[0]
        client.username_pw_set(for_rank(silo.mqtt.username, rank), first_line)
    if silo.tls is not None:
        client.tls_set_context(Certificates.read(silo.tls, rank).client_context)
    elif silo.mqtt.tls:
        client.tls_set_context(ssl.create_default_context())
    return client
