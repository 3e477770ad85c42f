"""The host's messages as bytes that are safe to read: one safetensors file with typed fields in its header.

The host pickles its ``Message`` objects, so whoever reaches its port runs code in its process. Here nothing that
arrives is ever executed, and nothing is believed: the header is checked against the bytes that are there before a
single tensor is made, and only fields of the table below are read.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from fedml.core.distributed.communication.message import Message
from safetensors import SafetensorError
from torch import Tensor

MODEL = Message.MSG_ARG_KEY_MODEL_PARAMS

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
    "used": int,  # last round in which the receiver's update was used; 0: none yet
    "ticket": str,  # given out with the model of a round; the update has to show it
    "session": str,  # chosen by a client when it starts; the server's messages have to show it
    "notice": str,  # of the server, for the user of a client
    "recipe": str,  # fingerprint of what the sender runs
    "batch": int,  # of num_batches, done by a client that a worker trains
    "num_batches": int,
    "loss": float,  # its mean loss in this epoch
}
_REQUIRED = ("msg_type", "sender", "receiver")
_MAX_HEADER = 16_000_000
_MAX_TEXT = 200
_MAX_NAME = 1000  # of a tensor, which joins the names of the modules around it
_KEY = "calfat"
_LENGTH = 8  # safetensors: the header's length, little endian


class RefusedError(Exception):
    """A message that is not let in. The text says why, for the log and for the sender."""


class PostponedError(RefusedError):
    """A message that is not let in now; the sender should try again."""


@dataclass(frozen=True)
class Envelope:
    """The fields of a message, read before its tensors."""

    type: int
    sender: int
    receiver: int
    fields: Mapping[str, Any]


def encode(message: Message) -> bytes:
    """Write a message; ``read_envelope`` and ``decode`` are the inverse.

    Raises:
        TypeError: a field that is not in the table; our bug, or a change in the host.
    """
    params = dict(message.get_params())
    tensors: Mapping[str, Tensor] = params.pop(MODEL, None) or {}
    for name, value in params.items():
        if type(value) is not FIELDS.get(name):
            raise TypeError(f"message field '{name}' = {value!r} cannot be sent")
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, {_KEY: json.dumps(params)})


def read_envelope(data: bytes) -> Envelope:
    """Check the structure of what arrived, and read its fields. No tensor is made.

    Raises:
        RefusedError: anything is not as :func:`encode` writes it.
    """
    header = _read_header(data)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), str):
        raise RefusedError("not a message of calfat_plugin (its header has no fields)")
    _check_sizes(header, len(data))
    fields = _json(metadata[_KEY], "its fields")
    for name, value in fields.items():
        if name not in FIELDS:
            raise RefusedError(f"unknown field {name[:_MAX_TEXT]!r}")
        if type(value) is not FIELDS[name]:
            raise RefusedError(f"field '{name}' is of type {type(value).__name__}, expected {FIELDS[name].__name__}")
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise RefusedError(f"field '{name}' is {len(value)} characters long")
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            raise RefusedError(f"field '{name}' holds other signs than printable ASCII")
    for name in _REQUIRED:
        if name not in fields:
            raise RefusedError(f"field '{name}' is missing")
    return Envelope(fields["msg_type"], fields["sender"], fields["receiver"], fields)


def decode(data: bytes, envelope: Envelope) -> Message:
    """Make the host's message object, tensors included.

    Raises:
        RefusedError: the tensors do not fit their description.
    """
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise RefusedError(f"its tensors cannot be read ({error})") from None
    message = Message(envelope.type, envelope.sender, envelope.receiver)
    for name, value in envelope.fields.items():
        message.add_params(name, value)
    message.add_params(MODEL, OrderedDict(tensors))
    return message


def _read_header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > _MAX_HEADER or length > len(data) - _LENGTH:
        raise RefusedError(f"{len(data)} bytes that claim a header of {length}")
    return _json(data[_LENGTH : _LENGTH + length], "its header")


def _json(text: bytes | str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedError(f"{what} cannot be read") from None
    if not isinstance(value, dict):
        raise RefusedError(f"{what} cannot be read")
    return value


def _check_sizes(header: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse a description that claims more bytes than there are, before anyone believes it."""
    for name, entry in header.items():
        if len(name) > _MAX_NAME:
            raise RefusedError(f"a tensor's name is {len(name)} characters long")
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(end) is int for end in offsets)):
            raise RefusedError(f"tensor {name[:_MAX_TEXT]!r} is not described")
        if not 0 <= offsets[0] <= offsets[1] <= num_bytes:
            raise RefusedError(f"tensor {name[:_MAX_TEXT]!r} claims bytes {offsets[0]} to {offsets[1]} of {num_bytes}")
