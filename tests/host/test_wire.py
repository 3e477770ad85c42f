"""Messages between the parties, as mappings, and what a worker says of a server's."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from typing import Any

import pytest
import torch

from calfat_plugin.errors import UpdateError
from calfat_plugin.federation.wire import (
    num_bytes,
    pack_downlink,
    pack_refusal,
    pack_update,
    unpack_downlink,
    unpack_update,
)
from calfat_plugin.peer_text import MAX_TEXT
from calfat_plugin.results import LocalUpdate
from tests.methods.helpers import Federation, experiment
from tests.snapshot import TextSnapshot

W, C = torch.tensor([1.0, 2.0]), torch.tensor([3.0])


def test_a_model_and_its_extras_arrive_apart() -> None:
    assert unpack_downlink(pack_downlink({"w": W}, {"scaffold/c/w": C})) == ({"w": W}, {"scaffold/c/w": C})


def test_a_copy_of_a_message_shares_nothing_with_it() -> None:
    wire = pack_downlink({"w": W.reshape(2, 1).t(), "tied": W}, {"scaffold/c/w": C})
    wire["no tensor"] = unreadable = [1]  # type: ignore[assignment]
    copy = deepcopy(wire)
    assert type(copy) is type(wire)
    assert list(copy) == list(wire)
    assert (copy["no tensor"], copy["no tensor"] is unreadable) == ([1], False)
    for name in ("w", "tied", "scaffold/c/w"):
        assert torch.equal(copy[name], wire[name])
        assert copy[name].stride() == wire[name].stride()
        copy[name].add_(1)
    assert torch.equal(W, torch.tensor([1.0, 2.0]))
    assert torch.equal(C, torch.tensor([3.0]))


def test_an_update_arrives_as_it_was_sent_but_for_what_the_client_keeps() -> None:
    wire = pack_update(LocalUpdate({"w": W}, 5, extras={"scaffold/change/w": C}, metrics={"loss": 0.5}))
    assert sorted(wire) == ["metric/loss", "scaffold/change/w", "w"]
    update = unpack_update(wire, 5)
    assert (update.num_examples, update.metrics) == (5, {"loss": 0.5})
    assert (update.state, update.extras, update.client_state) == ({"w": W}, {"scaffold/change/w": C}, {})


def test_of_a_long_reason_only_what_may_be_shown_is_decoded() -> None:
    for letter, read in (("x", 4 * MAX_TEXT), ("\u221e", 4 * MAX_TEXT // 3)):  # one byte each, and three
        with pytest.raises(UpdateError) as error:
            unpack_update(pack_refusal(letter * 10**5), 5)
        assert str(error.value).count(letter) == read
    with pytest.raises(UpdateError) as error:
        unpack_update({"refused/reason": torch.tensor([[104, 255], [105, 33]])}, 5)
    assert str(error.value) == "h\ufffdi!"


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (1, ""),
        (2**53, ""),
        (0, "it claims 0 training examples; expected 1 or more"),
        (-(2**53), f"it claims -{2**53} training examples; expected 1 or more"),
        (2**53 + 1, "it claims an absurd number of training examples; expected 1 to 2^53"),
        (-(2**53) - 1, "it claims an absurd number of training examples; expected 1 to 2^53"),
        ("7", "it claims 7 training examples; expected 1 or more"),
        (True, "it claims True training examples; expected 1 or more"),
    ],
)
def test_a_number_of_examples_that_cannot_be_weighed_is_refused(count: Any, reason: str) -> None:
    if reason:
        with pytest.raises(UpdateError, match=f"^{re.escape(reason)}$"):
            unpack_update({"w": W}, count)
    else:
        assert unpack_update({"w": W}, count).num_examples == count


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.tensor([1e18], dtype=torch.float64), ""),
        (torch.tensor([-1e18], dtype=torch.float64), ""),
        (torch.tensor([0.0]), ""),
        (torch.tensor(math.nan), ""),
        (torch.tensor(-1.5e18), "its 'metric/loss' is -1.5e+18; expected a number up to 1e+18"),
        (torch.tensor(math.inf), "its 'metric/loss' is inf; expected a number up to 1e+18"),
        (torch.zeros(0), "its 'metric/loss' has shape (0,) and type torch.float32; expected a number"),
        (torch.tensor(1j), "its 'metric/loss' has type torch.complex64; expected a common real or integer type"),
    ],
)
def test_a_metric_is_any_number_that_can_be_summed(value: torch.Tensor, reason: str) -> None:
    if reason:
        with pytest.raises(UpdateError, match=f"^{re.escape(reason)}$"):
            unpack_update({"metric/loss": value}, 5)
    else:
        assert unpack_update({"metric/loss": value}, 5).metrics["loss"] == pytest.approx(float(value), nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "value", "reason"),
    [
        ("passes", 12.0, ""),
        ("passes", math.nan, "its 'metric/passes' is nan; expected a number from 0 to 1e+18"),
        ("passes", -1e18, "its 'metric/passes' is -1e+18; expected a number from 0 to 1e+18"),
        ("alignment", -1.0000001, ""),
        ("alignment", math.nan, "its 'metric/alignment' is nan; expected a number from -1.001 to 1.001"),
        ("alignment", 2.0, "its 'metric/alignment' is 2; expected a number from -1.001 to 1.001"),
    ],
)
def test_a_metric_that_the_record_adds_up_is_in_its_range(metric: str, value: float, reason: str) -> None:
    wire = {f"metric/{metric}": torch.tensor(value, dtype=torch.float64)}
    if reason:
        with pytest.raises(UpdateError, match=f"^{re.escape(reason)}$"):
            unpack_update(wire, 5)
    else:
        assert unpack_update(wire, 5).metrics == {metric: value}


COMMON = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@pytest.mark.parametrize("name", COMMON)
def test_common_types_are_read(name: str) -> None:
    tensor = torch.ones(2, dtype=getattr(torch, name))
    assert torch.equal(unpack_update({"w": tensor}, 5).state["w"], tensor)


def test_bytes_are_those_of_the_tensors() -> None:
    hostile: Any = {"w": W, "scaffold/c/w": C, "n": torch.tensor(1), "half": torch.ones(3).half(), "text": "some text"}
    assert num_bytes(hostile) == 2 * 4 + 4 + 8 + 3 * 2
    assert num_bytes({}) == 0


def test_a_misnamed_tensor_is_not_sent(snapshot: TextSnapshot) -> None:
    for state, extras in (({"w": W, "a/b": W}, {}), ({"w": W}, {"scaffold/c": C, "c": C})):
        for pack in (pack_downlink, lambda state, extras: pack_update(LocalUpdate(state, 5, extras=extras))):
            with snapshot.raises(UpdateError):
                pack(state, extras)


def test_a_servers_message_that_does_not_fit_is_refused() -> None:
    federation = Federation(experiment("fedpgd", "scaffold"))
    federation.play()
    downlink = federation.server.downlink()
    federation.worker.check_downlink(downlink)  # extras are no part of the model
    downlink["classifier.bias"] = torch.zeros(3)
    with pytest.raises(UpdateError, match=r"^server: tensor 'classifier\.bias' has shape \(3,\), expected \(10,\)$"):
        federation.worker.check_downlink(downlink)
