"""The codec of messages: what is written is read back, and nothing else gets through or raises anything else."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.host import launch  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.host.transports import message as ours
from calfat_plugin.host.transports.message import FIELDS, MODEL, Message, RefusedError, decode, encode, read_envelope
from tests.silo.hostile import BYTES, EXECUTED

WHOLE = torch.arange(6.0).reshape(2, 3)
TENSORS = {  # parts of one memory are sent whole
    **{"w": WHOLE, "part": WHOLE[1], "turned": WHOLE.t()},
    **{"n": torch.tensor(4), "metric/loss": torch.ones(())},
}


def written() -> bytes:
    message = Message(3, 2, 0)
    message.add_params("num_samples", 17)
    message.add_params("ticket", "t" * 32)
    message.add_params(MODEL, dict(TENSORS))
    return encode(message)


def test_round_trip() -> None:
    data = written()
    envelope = read_envelope(data)
    assert envelope.get(MODEL) is None
    message = decode(data, envelope)
    assert (message.get_type(), message.get_sender_id(), message.get_receiver_id()) == (3, 2, 0)
    assert (message.get("num_samples"), message.get("ticket")) == (17, "t" * 32)
    tensors = message.get(MODEL)
    assert sorted(tensors) == ["metric/loss", "n", "part", "turned", "w"]
    assert all(tensors[name].equal(tensor) for name, tensor in TENSORS.items())


def test_a_field_that_is_not_in_the_table_is_our_bug() -> None:
    message = Message(3, 2, 0)
    message.add_params("model_params_url", "http://")
    with pytest.raises(TypeError, match="message field 'model_params_url' = 'http://' cannot be sent"):
        encode(message)


def read(data: bytes) -> Message | None:
    try:
        return decode(data, read_envelope(data))
    except RefusedError:
        return None


@pytest.mark.parametrize("name", BYTES)
def test_what_no_party_of_ours_writes_is_refused(name: str) -> None:
    assert read(BYTES[name]) is None
    assert not EXECUTED.exists()


@settings(max_examples=300)
@given(st.integers(0, len(written()) - 1), st.binary(min_size=1, max_size=12), st.booleans())
def test_damaged_messages_are_refused_or_still_well_formed(place: int, damage: bytes, cut: bool) -> None:
    data = written()
    data = data[:place] if cut else data[:place] + damage + data[place + len(damage) :]
    message = read(data)
    if message is not None:
        assert not cut
        assert set(message.get_params()) <= {*FIELDS, MODEL}
        assert all(type(message.get(name)) in (int, str) for name in message.get_params() if name != MODEL)


@pytest.mark.parametrize(
    "fields", [{"round": "1"}, {"ticket": 7}, {"msg_type": True}, {"used": 1.0}, {"other": 1}, [3]]
)
def test_fields_of_other_names_and_types_are_refused(fields: object) -> None:
    whole = {"msg_type": 3, "sender": 2, "receiver": 0, **fields} if isinstance(fields, dict) else fields
    header = json.dumps({"__metadata__": {"calfat": json.dumps(whole)}}).encode()
    assert read(len(header).to_bytes(8, "little") + header) is None


def test_messages_have_the_names_that_the_hosts_managers_look_for() -> None:
    from fedml.core.distributed.communication.constants import CommunicationConstants
    from fedml.core.distributed.communication.message import Message as Theirs

    theirs = Theirs(3, 2, 0)
    assert ours.READY == CommunicationConstants.MSG_TYPE_CONNECTION_IS_READY
    assert ours.MODEL == Theirs.MSG_ARG_KEY_MODEL_PARAMS
    assert (theirs.get_params(), encode(theirs)) == (Message(3, 2, 0).get_params(), encode(Message(3, 2, 0)))
