"""An S3-compatible store for what is too large for an MQTT broker: put, fetch with a limit, remove."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import UnreachableError
from calfat_plugin.host.transports.messages import RefusedError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import S3Settings

_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}
_SERVER_ERROR = 500


class ObjectStore:
    """One party's view of the bucket.

    Keys are ``prefix/run/sender's name/message id``, so that a receiver derives them from what it knows already and
    nobody can send it to read anything else.

    Args:
        settings: endpoint, bucket and so on; credentials come from where boto3 looks for them.
        run: name of the federation.
    """

    def __init__(self, settings: S3Settings, run: str) -> None:
        self._settings, self._run = settings, run
        try:
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=settings.endpoint,
                # A store that has no regions signs with any; boto3 insists on one.
                region_name=settings.region or (None if settings.endpoint is None else "us-east-1"),
                verify=settings.ca,
                config=Config(
                    **_TIMEOUTS,
                    retries={"mode": "standard", "max_attempts": 2},
                    s3={"addressing_style": "auto" if settings.endpoint is None else "path"},
                    request_checksum_calculation="when_required",  # newer ones are not known to all stores
                    response_checksum_validation="when_required",
                ),
            )
        except (BotoCoreError, ValueError) as error:
            raise HostError(f"calfat.silo.s3: {error}.") from None

    def __str__(self) -> str:
        return f"{self._settings.endpoint or 'https://s3.amazonaws.com'}, bucket {self._settings.bucket}"

    def put(self, sender: str, message_id: str, data: bytes) -> None:
        """Leave an object.

        Raises:
            UnreachableError: another try may succeed.
            RefusedError: the store says no.
        """
        self._call("put_object", Key=self._key(sender, message_id), Body=data)

    def fetch(self, sender: str, message_id: str, num_bytes: int, sha256: str) -> bytes:
        """Read what a peer has announced, no byte more.

        Raises:
            UnreachableError: another try may succeed.
            RefusedError: there is no such object, or it is not what was announced.
        """
        answer = self._call("get_object", Key=self._key(sender, message_id))
        with answer["Body"] as body:
            if answer["ContentLength"] != num_bytes:
                raise RefusedError(f"its object has {answer['ContentLength']} bytes, {num_bytes} were announced")
            try:
                data: bytes = body.read(num_bytes)
            except (BotoCoreError, OSError) as error:
                raise UnreachableError(peer_text(f"the store broke off: {error}")) from None
        if not secrets.compare_digest(hashlib.sha256(data).hexdigest(), sha256):
            raise RefusedError("its object is not the one that was announced (SHA-256)")
        return data

    def remove(self, sender: str, message_id: str) -> None:
        """Take an object away.

        Raises:
            UnreachableError, RefusedError: as for :meth:`put`.
        """
        self._call("delete_object", Key=self._key(sender, message_id))

    def sweep(self, sender: str) -> None:
        """Take away all that a party of this name left there when it was killed.

        Raises:
            UnreachableError, RefusedError: as for :meth:`put`.
        """
        for entry in self._call("list_objects_v2", Prefix=self._key(sender, "")).get("Contents", ()):
            self._call("delete_object", Key=entry["Key"])

    def check(self, sender: str) -> None:
        """Write and remove a small object, so that a run does not begin without a store.

        Raises:
            UnreachableError: it does not answer.
            HostError: it does not let this party in.
        """
        try:
            self.put(sender, "hello", b"")
            self.remove(sender, "hello")
        except RefusedError as refused:
            raise HostError(
                f"calfat.silo.s3: {refused}. Check bucket and endpoint, and the credentials that boto3 finds "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
            ) from None

    def _key(self, sender: str, message_id: str) -> str:
        return f"{self._settings.prefix}/{self._run}/{sender}/{message_id}"

    def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, operation)(Bucket=self._settings.bucket, **arguments)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
            code = error.response.get("Error", {}).get("Code", status)
            reason = peer_text(f"the store ({self}) says {code}")
            raise (UnreachableError if status >= _SERVER_ERROR else RefusedError)(reason) from None
        except BotoCoreError as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
                raise RefusedError(f"the store ({self}) needs credentials: {error}") from None
            raise UnreachableError(peer_text(f"the store ({self}): {error}")) from None
