"""Our messages as Flower carries them, and the ``ClientApp`` that answers them.

Tensors travel as one safetensors file each, numbers as a record; nothing is pickled. What comes from a node is not
believed: a reply that cannot be read counts as a refused update, and the server gives the reason.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from calfat_plugin.errors import CalfatError
from calfat_plugin.federation.wire import Wire, pack_refusal
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.executors import started
from calfat_plugin.host.transports.message import RefusedError, bytes_of, tensors_in
from calfat_plugin.maths.torch_state import fresh_torch_state
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


# --- the client's side ------------------------------------------------------------------------------------------------

Train = Callable[[Message, Context], Answer]
Describe = Callable[[Context], Mapping[str, Any]]


def app_that(train: Train, describe: Describe | None = None) -> ClientApp:
    """A ``ClientApp`` around a function that trains; an error in it is its answer.

    ``describe`` answers a query of the server: which client this is, and what it runs.
    """

    def answer_train(message: Message, context: Context) -> Message:
        answer = train(message, context)
        arrays = {MODEL: packed(answer.wire), STATE: packed(answer.state)}
        return Message(content(arrays, num_examples=answer.num_examples), reply_to=message)

    app = ClientApp()
    app.train()(_reporting_errors(answer_train))
    if describe is not None:

        def answer_query(message: Message, context: Context) -> Message:
            return Message(content({}, **describe(context)), reply_to=message)

        app.query()(_reporting_errors(answer_query))
    return app


def _reporting_errors(answer: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    """The same function, except that an error in it becomes a reply."""

    def answer_or_report(message: Message, context: Context) -> Message:
        try:
            return answer(message, context)
        except CalfatError as error:
            trouble = content({}, trouble=str(error), is_users=True)
        except Exception as error:
            # The error comes before its traceback, because a server may cut the text.
            trouble = content({}, trouble=f"{error!r}\n{traceback.format_exc()}", is_users=False)
        return Message(trouble, reply_to=message)

    return answer_or_report


def any_client_app(start: Callable[[], Worker]) -> ClientApp:
    """A ``ClientApp`` for processes that train any client, whose state comes and goes with the messages."""
    pickled = pickle.dumps(start)
    return app_that(lambda message, context: any_client(pickled, message))


@fresh_torch_state()
def any_client(start: bytes, message: Message) -> Answer:
    """Train the client that a message names, from the state that it brings."""
    worker = started(start)
    fields = fields_of(message)
    client, round = fields["client"], fields["round"]
    worker.client_states[client] = tensors_of(message, STATE)
    wire = worker.fit(client, round, tensors_of(message, MODEL))
    return Answer(worker.num_examples(client), wire, dict(worker.client_states.pop(client)))
