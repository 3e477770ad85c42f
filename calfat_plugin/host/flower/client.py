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

Train = Callable[[Message, Context], Answer]
Describe = Callable[[Context], Mapping[str, Any]]


def app_that(train: Train, describe: Describe | None = None) -> ClientApp:
    """A ``ClientApp`` around a function that trains; an error in it is its answer.

    ``describe`` answers a query of the server: which client this is, and what it runs.
    """

    def answer_train(message: Message, context: Context) -> Message:
        return update(message, train(message, context))

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
            return trouble(message, str(error), is_users=True)
        except Exception as error:
            # The error comes before its traceback, because a server may cut the text.
            return trouble(message, f"{error!r}\n{traceback.format_exc()}", is_users=False)

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
