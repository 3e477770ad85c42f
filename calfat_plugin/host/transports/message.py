"""What the parties of a run send each other: a record of named fields, of which one may hold tensors."""

from __future__ import annotations

from typing import Any

READY = 0  # the type of the message with which a loop begins
TYPE, SENDER, RECEIVER, MODEL = "msg_type", "sender", "receiver", "model_params"


class Message:
    """A message; FedML's managers take it for one of theirs, whose methods it has.

    Args:
        type: what it is, and so who handles it.
        sender_id: rank of the party that sends it.
        receiver_id: rank of the party that it is for.
        fields: what else it says.
    """

    def __init__(self, type: int = READY, sender_id: int = 0, receiver_id: int = 0, **fields: Any) -> None:
        self._params: dict[str, Any] = {TYPE: type, SENDER: sender_id, RECEIVER: receiver_id, **fields}

    def get_type(self) -> int:
        return int(self._params[TYPE])

    def get_sender_id(self) -> int:
        return int(self._params[SENDER])

    def get_receiver_id(self) -> int:
        return int(self._params[RECEIVER])

    def add_params(self, key: str, value: Any) -> None:
        """Set a field."""
        self._params[key] = value

    def get(self, key: str) -> Any:
        """A field; None where it is missing."""
        return self._params.get(key)

    def get_params(self) -> dict[str, Any]:
        """All fields."""
        return self._params
