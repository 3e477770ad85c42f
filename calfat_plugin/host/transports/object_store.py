"""The S3-compatible store through which MQTT's large messages go."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from calfat_plugin.disk import expanded
from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import UnreachableError
from calfat_plugin.host.transports.message import RefusedError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import S3Settings

_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_FETCH_SECONDS = 60.0  # that an object may take in all, and one more for each of these bytes
_BYTES_PER_SECOND = 125_000
_PIECE = 65_536  # bytes
_PAUSE = 1.0  # seconds between two tries to reach the store at the start
_SERVER_ERROR = 500  # HTTP status codes from here on are errors of the store
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")


class ObjectStore:
    """One party's view of the bucket.

    Keys are ``prefix/run/sender's name/message id``, so that a receiver derives them from what it knows already and
    nobody can send it to read anything else.
    """

    def __init__(self, settings: S3Settings, run: str) -> None:
        self._settings = settings
        self._run = run
        try:
            self._client = _client(settings)
        except (BotoCoreError, ValueError) as error:
            raise HostError(f"calfat.silo.s3: {error}.") from None

    def __str__(self) -> str:
        return f"{self._settings.endpoint or 'https://s3.amazonaws.com'}, bucket {self._settings.bucket}"

    def put(self, sender: str, message_id: str, data: bytes) -> None:
        self._call("put_object", Key=self._key(sender, message_id), Body=data)

    def fetch(self, sender: str, message_id: str, num_bytes: int, sha256: str) -> bytes:
        """Read what a peer has announced, and no byte more.

        Raises:
            RefusedError: it is not what was announced.
            UnreachableError: the store did not give it, this time or in time.
        """
        answer = self._call("get_object", Key=self._key(sender, message_id))
        with answer["Body"] as body:
            if answer["ContentLength"] != num_bytes:
                raise RefusedError(f"its object has {answer['ContentLength']} bytes, {num_bytes} were announced")
            try:
                data = _read(body, num_bytes)
            except (HTTPError, OSError) as error:  # of urllib3, whose own answer the body is
                raise UnreachableError(peer_text(f"the store broke off: {error}")) from None
        if len(data) < num_bytes:  # boto3 lets a connection that ends early pass for an object's end
            raise UnreachableError(f"the store broke off after {len(data)} of {num_bytes} bytes")
        if not secrets.compare_digest(hashlib.sha256(data).hexdigest(), sha256):
            raise RefusedError("its object is not the one that was announced (SHA-256)")
        return data

    def remove(self, sender: str, message_id: str) -> None:
        self._call("delete_object", Key=self._key(sender, message_id))

    def wait(self, sender: str, until: float) -> None:
        """Wait until a small object could be written and removed, at the latest until this monotonic time."""
        while True:
            try:
                self.put(sender, "hello", b"")
                self.remove(sender, "hello")
                return
            except RefusedError as refused:
                raise HostError(
                    f"calfat.silo.s3: {refused}. Check bucket and endpoint, and the credentials that boto3 finds "
                    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
                ) from None
            except UnreachableError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"calfat.silo.s3: {error}. It did not answer before calfat.silo.start_deadline. Start it, or "
                        "correct the endpoint."
                    ) from None
            time.sleep(_PAUSE)

    def _key(self, sender: str, message_id: str) -> str:
        return f"{self._settings.prefix}/{self._run}/{sender}/{message_id}"

    def _call(self, operation: str, **arguments: Any) -> Any:
        """Call the store: an error that may pass is an ``UnreachableError``, any other a ``RefusedError``."""
        try:
            return getattr(self._client, operation)(Bucket=self._settings.bucket, **arguments)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
            code = error.response.get("Error", {}).get("Code", status)
            reason = peer_text(f"the store ({self}) says {code}")
            if status >= _SERVER_ERROR or code == "NoSuchKey":
                raise UnreachableError(reason) from None
            raise RefusedError(reason) from None
        except BotoCoreError as error:
            if type(error).__name__ in _NO_CREDENTIALS:
                raise RefusedError(f"the store ({self}) needs credentials: {error}") from None
            raise UnreachableError(peer_text(f"the store ({self}): {error}")) from None


def _read(body: Any, num_bytes: int) -> bytes:
    """At most this many bytes of an object; fewer where the connection ends early."""
    seconds = _FETCH_SECONDS + num_bytes / _BYTES_PER_SECOND
    deadline = time.monotonic() + seconds
    data = bytearray()
    while len(data) < num_bytes:
        # read1 returns what has come. read would wait for all, and a socket's time limit begins anew with each byte.
        piece = body.read1(min(_PIECE, num_bytes - len(data)))
        if not piece:
            break
        data += piece
        if time.monotonic() > deadline:
            raise UnreachableError(f"the store gave {len(data)} of {num_bytes} bytes in {seconds:.0f} s")
    return bytes(data)


def _client(settings: S3Settings) -> Any:
    region = settings.region
    addressing_style = "auto"
    if settings.endpoint is not None:
        addressing_style = "path"
        region = region or "us-east-1"  # boto3 needs one; a store without regions takes any
    ca = None
    if settings.ca is not None:
        ca = str(expanded(settings.ca))
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "max_attempts": 2},
        s3={"addressing_style": addressing_style},
        request_checksum_calculation="when_required",  # newer checksums are not known to all stores
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session()
    return session.client("s3", endpoint_url=settings.endpoint, region_name=region, verify=ca, config=config)
