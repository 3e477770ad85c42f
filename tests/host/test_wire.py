"""Messages between the parties, as mappings, and what a worker says of a server's."""

from __future__ import annotations

import pytest
import torch

from calfat_plugin.errors import UpdateError
from calfat_plugin.federation.wire import (
    add_client_state,
    is_refusal,
    pack_downlink,
    pack_refusal,
    pack_update,
    take_client_state,
    unpack_downlink,
    unpack_update,
)
from calfat_plugin.results import LocalUpdate
from tests.methods.helpers import Federation, experiment

W, C = torch.tensor([1.0, 2.0]), torch.tensor([3.0])


def test_a_model_and_its_extras_arrive_apart() -> None:
    assert unpack_downlink(pack_downlink({"w": W}, {"scaffold/c/w": C})) == ({"w": W}, {"scaffold/c/w": C})


def test_what_a_client_keeps_travels_beside_its_message_and_comes_apart_again() -> None:
    wire = pack_update(LocalUpdate({"w": W}, 5, extras={"scaffold/change/w": C}, metrics={"loss": 0.5}))
    whole = add_client_state(wire, {"scaffold/c/w": C, "personal/n": W})
    assert sorted(whole) == [
        *("client/personal/n", "client/scaffold/c/w", "metric/loss", "scaffold/change/w", "w"),
    ]
    message, kept = take_client_state(whole)
    assert kept == {"scaffold/c/w": C, "personal/n": W}
    assert message == wire
    update = unpack_update(message, 5)
    assert (update.num_examples, update.metrics) == (5, {"loss": 0.5})
    assert (update.state, update.extras, update.client_state) == ({"w": W}, {"scaffold/change/w": C}, {})


def test_a_refusal_is_known_and_gives_its_reason() -> None:
    refusal = pack_refusal("client 3: 1 < ∞")
    assert is_refusal(refusal)
    assert not is_refusal(pack_update(LocalUpdate({"w": W}, 5)))
    with pytest.raises(UpdateError) as error:
        unpack_update(refusal, 5)
    assert str(error.value) == "client 3: 1 < ∞"


def test_a_servers_message_that_does_not_fit_is_refused() -> None:
    federation = Federation(experiment("fedpgd", "scaffold"))
    federation.play()
    downlink = federation.server.downlink()
    federation.worker.check_downlink(downlink)  # extras are no part of the model
    downlink["classifier.bias"] = torch.zeros(3)
    with pytest.raises(UpdateError) as error:
        federation.worker.check_downlink(downlink)
    assert str(error.value) == "server: tensor 'classifier.bias' has shape (3,), expected (10,)"
