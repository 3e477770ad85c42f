"""Our messages as Flower carries them: tensors as one safetensors text each, numbers as a record, nothing pickled.

What comes from a node is not believed. A reply that cannot be read as :func:`update` writes it counts as a refused
update, and the server gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from calfat_plugin.federation.wire import Wire, pack_refusal
from calfat_plugin.host.transports.message import RefusedError, bytes_of, tensors_in
from calfat_plugin.peer_text import peer_text

MODEL, STATE = "model", "state"
_TENSORS, _FIELDS = "tensors", "fields"
_FORMAT = "safetensors"


@dataclass(frozen=True)
class Answer:
    """What a client sent."""

    num_examples: int  # as it says
    wire: Wire  # its update, or a refusal
    state: dict[str, Tensor]  # what it keeps, where that travels
    trouble: tuple[str, bool] | None = None  # why it could not train, and whether that is the user's to fix


def packed(tensors: Mapping[str, Tensor]) -> Array:
    """Tensors as an array of bytes, whatever their types; several messages may share it."""
    data = bytes_of(tensors)
    return Array(dtype="uint8", shape=(len(data),), stype=_FORMAT, data=data)


def content(arrays: Mapping[str, Array], **fields: Any) -> RecordDict:
    """What a message of ours carries: tensors by name, as :func:`packed` makes them, and fields."""
    return RecordDict({_TENSORS: ArrayRecord(dict(arrays)), _FIELDS: ConfigRecord(fields)})


def fields_of(message: Message) -> Mapping[str, Any]:
    """The fields of a message; a message that has none is a ``KeyError``."""
    fields: Mapping[str, Any] = message.content.config_records[_FIELDS]
    return fields


def tensors_of(message: Message, name: str, limit: int | None = None) -> dict[str, Tensor]:
    """The tensors of a message under that name: the inverse of :func:`packed`.

    One that is larger than ``limit`` bytes, or cannot be read, is a :class:`RefusedError`.
    """
    array = message.content.array_records[_TENSORS][name]
    if array.stype != _FORMAT or not isinstance(array.data, bytes):
        raise RefusedError("it is not in our format")
    if limit is not None and len(array.data) > limit:
        raise RefusedError(f"it has {len(array.data)} bytes; at most {limit} are accepted")
    return tensors_in(array.data)


def update(message: Message, answer: Answer) -> Message:
    """The reply of a client that has trained."""
    arrays = {MODEL: packed(answer.wire), STATE: packed(answer.state)}
    return Message(content(arrays, num_examples=answer.num_examples), reply_to=message)


def trouble(message: Message, text: str, *, is_users: bool) -> Message:
    """The reply of a client that could not train; ``is_users``: its user can fix that."""
    return Message(content({}, trouble=text, is_users=is_users), reply_to=message)


def answer_in(reply: Message, limit: int | None) -> Answer:
    """What a client sent, or a refusal in its place.

    ``limit`` is the most bytes of tensors that are accepted from a party; None: it comes from a process of ours, and
    what the client keeps comes along.
    """
    try:
        fields = fields_of(reply)
        if "trouble" in fields:
            reason = (str(fields["trouble"]), fields["is_users"] is True)
            return Answer(0, Wire(), {}, trouble=reason)
        wire = Wire(tensors_of(reply, MODEL, limit))
        state: dict[str, Tensor] = {}
        if limit is None:
            state = tensors_of(reply, STATE)
        return Answer(fields["num_examples"], wire, state)
    except KeyError as error:
        return Answer(1, pack_refusal(f"its message has no {peer_text(error)}"), {})
    except RefusedError as error:
        return Answer(1, pack_refusal(f"its message cannot be read: {peer_text(error)}"), {})
