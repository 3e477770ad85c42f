"""The ``ClientApp``: trains the client that a message names, and answers."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from calfat_plugin.errors import CalfatError
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.executors import started
from calfat_plugin.host.flower.messages import MODEL, STATE, Answer, content, fields_of, tensors_of, trouble, update
from calfat_plugin.maths.torch_state import fresh_torch_state

Trains = Callable[[Message, Context], Answer]
Says = Callable[[Context], Mapping[str, Any]]


def app_that(trains: Trains, says: Says | None = None) -> ClientApp:
    """A ``ClientApp`` around a function that trains; what goes wrong in it is the answer, too."""

    def train(message: Message, context: Context) -> Message:
        return answered(message, lambda: update(message, trains(message, context)))

    def query(message: Message, context: Context) -> Message:
        assert says is not None
        return answered(message, lambda: Message(content({}, **says(context)), reply_to=message))

    def answered(message: Message, answer: Callable[[], Message]) -> Message:
        try:
            return answer()
        except CalfatError as error:
            return trouble(message, str(error), is_users=True)
        except Exception as error:  # first, for a server may not take the whole text
            return trouble(message, f"{error!r}\n{traceback.format_exc()}", is_users=False)

    app = ClientApp()
    app.train()(train)
    if says is not None:
        app.query()(query)
    return app


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
