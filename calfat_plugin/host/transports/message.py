"""What the parties of a run send each other: a record of named fields, of which one may hold tensors.

The host pickles its ``Message`` objects, so whoever reaches its port runs code in its process. Here nothing that
arrives is ever executed, and nothing is believed: a message is one safetensors file with typed fields in its header,
the header is checked against the bytes that are there before a single tensor is made, and only fields of the table
below are read.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from calfat_plugin.tensor_files import apart

READY = 0  # the type of the message with which a loop begins
TYPE, SENDER, RECEIVER, MODEL = "msg_type", "sender", "receiver", "model_params"
#: Names of the fields that a message may have, and their types. The first block is the host's, the second ours.
FIELDS: Mapping[str, type] = {
    "msg_type": int,
    "sender": int,
    "receiver": int,
    "num_samples": int,
    "client_idx": str,
    "client_status": str,
    "client_os": str,
    "round": int,  # 1-based round that a model or an update belongs to
    "rounds": int,  # of a goodbye: how many were done
    "used": int,  # last round in which the receiver's update was used; 0: none yet
    "ticket": str,  # given out with the model of a round; the update has to show it
    "session": str,  # chosen by a client when it starts; the server's messages have to show it
    "notice": str,  # of the server, for the user of a client
    "recipe": str,  # fingerprint of what the sender runs
    "run": str,  # what the server calls its run, for the user of a client
}
_REQUIRED = (TYPE, SENDER, RECEIVER)
_MAX_HEADER = 16_000_000
_MAX_TEXT = 200
_MAX_NAME = 1000  # of a tensor, which joins the names of the modules around it
_KEY = "calfat"
_LENGTH = 8  # safetensors: the header's length, little endian


class Message:
    """A message; FedML's managers take it for one of theirs, whose methods it has."""

    def __init__(self, type: int = READY, sender_id: int = 0, receiver_id: int = 0, **fields: Any) -> None:
        self._params: dict[str, Any] = {TYPE: type, SENDER: sender_id, RECEIVER: receiver_id, **fields}

    def get_type(self) -> int:
        return int(self._params[TYPE])

    def get_sender_id(self) -> int:
        return int(self._params[SENDER])

    def get_receiver_id(self) -> int:
        return int(self._params[RECEIVER])

    def add_params(self, key: str, value: Any) -> None:
        self._params[key] = value

    def get(self, key: str) -> Any:
        return self._params.get(key)

    def get_params(self) -> dict[str, Any]:
        return self._params


class RefusedError(Exception):
    """A message that is not let in. The text says why, for the log and for the sender."""


def sendable(text: str) -> str:
    """A text of ours as a field may hold it: printable ASCII, not too long."""
    ascii_only = text.encode("ascii", errors="replace").decode()
    return re.sub(r"[^ -~]", "?", ascii_only)[:_MAX_TEXT]


class ImpostorError(RefusedError):
    """Whoever is at a party's address has proved to be somebody else, so nothing is sent there."""


def encode(message: Message) -> bytes:
    """Write a message; ``read_envelope`` and ``decode`` are the inverse."""
    params = dict(message.get_params())
    tensors: Mapping[str, Tensor] = params.pop(MODEL, None) or {}
    for name, value in params.items():
        if type(value) is not FIELDS.get(name):
            raise TypeError(f"message field '{name}' = {value!r} cannot be sent")
    return bytes_of(tensors, {_KEY: json.dumps(params)})


def bytes_of(tensors: Mapping[str, Tensor], fields: dict[str, str] | None = None) -> bytes:
    """A safetensors file of these tensors, wherever they are; :func:`tensors_in` is the inverse."""
    return safetensors.torch.save(apart(tensors), fields)


def read_envelope(data: bytes) -> Message:
    """Check the structure of what arrived, and read its fields: a message without tensors, none of which is made."""
    metadata = _checked_metadata(data)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), str):
        raise RefusedError("not a message of calfat_plugin (its header has no fields)")
    fields = _json(metadata[_KEY], "its fields")
    for name, value in fields.items():
        if name not in FIELDS:
            raise RefusedError(f"unknown field {name[:_MAX_TEXT]!r}")
        if type(value) is not FIELDS[name]:
            raise RefusedError(f"field '{name}' is of type {type(value).__name__}, expected {FIELDS[name].__name__}")
        if isinstance(value, str):
            if len(value) > _MAX_TEXT:
                raise RefusedError(f"field '{name}' is {len(value)} characters long")
            if not (value.isascii() and value.isprintable()):
                raise RefusedError(f"field '{name}' holds other signs than printable ASCII")
    for name in _REQUIRED:
        if name not in fields:
            raise RefusedError(f"field '{name}' is missing")
    return Message(fields.pop(TYPE), fields.pop(SENDER), fields.pop(RECEIVER), **fields)


def decode(data: bytes, envelope: Message) -> Message:
    """Add the tensors to what :func:`read_envelope` has read of the same bytes."""
    envelope.add_params(MODEL, tensors_in(data))
    return envelope


def tensors_in(data: bytes) -> OrderedDict[str, Tensor]:
    """The tensors of a safetensors file that somebody else wrote, sorted by name: the reader's order is by chance."""
    _checked_metadata(data)
    try:
        return OrderedDict(sorted(safetensors.torch.load(data).items()))
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise RefusedError(f"its tensors cannot be read ({error})") from None


def _checked_metadata(data: bytes) -> Any:
    """The header's metadata. A header that claims more bytes than there are is refused here, and never believed."""
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > _MAX_HEADER or length > len(data) - _LENGTH:
        raise RefusedError(f"{len(data)} bytes that claim a header of {length}")
    header = _json(data[_LENGTH : _LENGTH + length], "its header")
    metadata = header.pop("__metadata__", None)
    for name, entry in header.items():
        if len(name) > _MAX_NAME:
            raise RefusedError(f"a tensor's name is {len(name)} characters long")
        offsets: object = None
        if isinstance(entry, dict):
            offsets = entry.get("data_offsets")
        if not isinstance(offsets, list) or [type(end) for end in offsets] != [int, int]:
            raise RefusedError(f"tensor {name[:_MAX_TEXT]!r} is not described")
        begin, end = offsets
        if not 0 <= begin <= end <= len(data):
            raise RefusedError(f"tensor {name[:_MAX_TEXT]!r} claims bytes {begin} to {end} of {len(data)}")
    return metadata


def _json(text: bytes | str, part: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedError(f"{part} cannot be read") from None
    if not isinstance(value, dict):
        raise RefusedError(f"{part} cannot be read")
    return value
