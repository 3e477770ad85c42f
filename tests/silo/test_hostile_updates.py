"""Whatever one client's update holds: it is used, or refused by that client's name, and the others go on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calfat_plugin.host import launch  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.host.transports.message import MODEL, RefusedError, decode, read_envelope
from calfat_plugin.results import RoundRecord
from tests.host.federation import experiment
from tests.methods.helpers import Federation
from tests.silo import hostile
from tests.silo.hostile import AGGREGATORS, CARRIED, EXAMPLES, NAME, NAMES, NESTED, SENT, TENSORS, honest


@cache
def federation(aggregator: str) -> tuple[Federation, Any]:
    """A federation and its state at the start, made once."""
    federation = Federation(experiment(calfat__aggregator=aggregator, train_args__client_num_in_total=3))
    return federation, federation.snapshot()


def round_with(aggregator: str, num_examples: Any, changes: Mapping[Any, Any]) -> RoundRecord:
    """A round in which client 1's message is an honest one with these changes."""
    now, start = federation(aggregator)
    now.server.begin(start)
    state = now.server.state
    wires: dict[int, Any] = {client: honest(state, aggregator, 0.01 * client) for client in range(3)}
    wires[1].update(changes)
    uploads: Any = {client: (num_examples if client == 1 else 10, wire) for client, wire in wires.items()}
    record = now.server.finish_round(1, uploads)
    tensors = [*now.server.state.values(), *now.server.server_state.values(), *now.server.broadcast.values()]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    return record


def assert_used_or_refused(record: RoundRecord) -> None:
    assert {0, 2} <= set(record.clients)
    if 1 in record.clients:
        assert record.refused == {}
    else:
        assert list(record.refused) == [1]
        assert record.refused[1].startswith("client 1: ")
        assert record.refused[1].isprintable()
        assert len(record.refused[1]) < 500
    math.fsum(record.losses.values())  # which the console and the loggers do


def built(description: tuple[torch.dtype, tuple[int, ...] | None, float]) -> Tensor:
    return hostile.built(description, federation("fedavg")[1].global_state[NAME])


@settings(max_examples=250, deadline=None)
@given(AGGREGATORS, EXAMPLES, st.dictionaries(NAMES | st.integers(), TENSORS | NESTED, max_size=3))
def test_an_update_is_used_or_refused_by_name(aggregator: str, num_examples: Any, changes: dict[Any, Any]) -> None:
    made = {name: built(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    assert_used_or_refused(round_with(aggregator, num_examples, made))


def sent(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """What the decoder makes of a message that carries these; None when it refuses it."""
    everything = {"msg_type": 3, "sender": 2, "receiver": 0, **fields}
    data = safetensors.torch.save(dict(tensors), {"calfat": json.dumps(everything)})
    try:
        return decode(data, read_envelope(data))
    except RefusedError:
        return None


@settings(max_examples=120, deadline=None)
@given(AGGREGATORS, st.sampled_from([10, -3, 10**400, True, "7", 1.5, None, math.nan]), SENT)
def test_a_message_is_refused_or_its_update_is(aggregator: str, num_examples: Any, changes: dict[str, Any]) -> None:
    message = sent({"num_samples": num_examples}, {name: built(value) for name, value in changes.items()})
    if type(num_examples) is not int:
        assert message is None
    if message is not None:
        assert_used_or_refused(round_with(aggregator, message.get("num_samples"), message.get(MODEL)))


@pytest.mark.parametrize("dtype", [dtype for dtype in CARRIED if "float8" in str(dtype)], ids=str)
@pytest.mark.parametrize("name", [NAME, "metric/loss", "a/b", "refused/reason"])
def test_float8_is_refused_by_name(dtype: torch.dtype, name: str) -> None:
    message = sent({"num_samples": 10}, {name: torch.zeros(1).to(dtype)})
    record = round_with("fedavg", 10, message.get(MODEL))
    assert record.refused == {1: f"client 1: its '{name}' has type {dtype}; expected a common real or integer type"}


def test_updates_that_overflow_only_together_are_refused_by_their_size() -> None:
    """Each weight is finite, and their product is not."""
    _, start = federation("fedavg")
    huge = {name: tensor * 1e14 for name, tensor in start.global_state.items()}
    record = round_with("fedavg", 10, huge)
    assert record.clients == (0, 2)
    assert re.fullmatch(
        r"client 1: tensor 'body\.0\.weight' changes by [\d.]+e\+13; expected up to 1e\+04", record.refused[1]
    )


def test_one_number_does_not_get_the_others_refused() -> None:
    """A negative variance makes every logit nan, though the update that holds it moves less far than honest ones."""
    federation = Federation(experiment(model_args__model="vgg8", train_args__client_num_in_total=3))
    state = federation.server.state
    wires: dict[int, Any] = {client: honest(state, "fedavg", 0.01 * client) for client in range(3)}
    name = next(name for name in state if name.endswith("running_var"))
    wires[1] = {**honest(state, "fedavg", 0.0), name: state[name].index_fill(0, torch.tensor(0), -4.0)}
    record = federation.server.finish_round(1, {client: (10, wire) for client, wire in wires.items()})
    assert_used_or_refused(record)
    assert record.refused[1].startswith("client 1: with its update, which is of no use by itself, a logit of the ")
