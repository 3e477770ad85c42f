"""Groups in a federation: each client trains by its group's recipe, attackers send what they say, a resume is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calfat_plugin import testing
from calfat_plugin.attackers.colluding import hidden_deviations
from calfat_plugin.entries import AttackerEntry
from calfat_plugin.errors import PluginError
from calfat_plugin.federation.updates import Attackers
from calfat_plugin.federation.wire import unpack_update
from calfat_plugin.interfaces import Attacker, AttackTask
from calfat_plugin.results import State
from calfat_plugin.testing.tiny import tiny_experiment
from tests.methods.helpers import Federation, experiment, same_bits, tasks_of
from tests.plugins import offering
from tests.snapshot import TextSnapshot


def played(clients: Any = None, rounds: int = 2, **settings: Any) -> Federation:
    more = {} if clients is None else {"calfat__clients": clients}
    recipe = experiment(settings.pop("trainer", "fedpgd"), settings.pop("aggregator", "fedavg"), **more, **settings)
    federation = Federation(recipe)
    for _ in range(rounds):
        federation.play()
    return federation


def sent(federation: Federation, client: int) -> Any:
    """What a client's worker trains in the first round."""
    server = federation.server
    return federation.worker.fit(client, 1, server.downlink())


@pytest.mark.parametrize(
    ("group", "same_as"),
    [
        ({"trainer": "standard"}, {"trainer": "standard"}),
        ({"trainer": {"name": "fedtrades", "beta": 2}}, {"trainer": {"name": "fedtrades", "beta": 2}}),
        ({"trainer": {"name": "fedpgd", "loss": "logitadj"}}, {"trainer": {"name": "fedpgd", "loss": "logitadj"}}),
        ({"threat": {"eps": 0.01}}, {"calfat__threat__eps": 0.01}),
        ({"epochs": 3}, {"train_args__epochs": 3}),
        ({"local_steps": 5}, {"train_args__local_steps": 5}),
        ({"batch_size": 2}, {"train_args__batch_size": 2}),
        ({"learning_rate": 0.5}, {"train_args__learning_rate": 0.5}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_client_of_a_group_trains_as_all_would_by_that_recipe(group: Any, same_as: Any) -> None:
    """And the others as without groups: nothing of a group reaches them."""
    mixed, plain = (
        Federation(experiment("fedpgd", calfat__clients=[{"ids": 1, **group}])),
        Federation(experiment("fedpgd")),
    )
    other = dict(same_as)
    whole = Federation(experiment(other.pop("trainer", "fedpgd"), **other))
    assert same_bits(sent(mixed, 1), sent(whole, 1))
    assert not same_bits(sent(mixed, 1), sent(plain, 1))
    for client in (0, 2):
        assert same_bits(sent(mixed, client), sent(plain, client))


def test_each_group_has_its_own() -> None:
    groups = [{"ids": 0, "trainer": "standard"}, {"ids": 1, "trainer": "fedtrades"}]
    mixed = Federation(experiment("fedpgd", calfat__clients=groups))
    for client, trainer in enumerate(("standard", "fedtrades", "fedpgd")):
        assert same_bits(sent(mixed, client), sent(Federation(experiment(trainer)), client))


def test_means_of_groups_are_over_their_own_clients() -> None:
    record = played([{"ids": [0, 2], "epochs": 2, "name": "two"}], rounds=0).play()
    for column, numbers in (("loss", record.losses), ("update_norm", record.update_norms)):
        assert record.metrics[f"group/two/{column}"] == pytest.approx((numbers[0] + numbers[2]) / 2)
        assert record.metrics[f"group/others/{column}"] == pytest.approx(numbers[1])


def test_the_same_group_for_all_is_the_plain_recipe() -> None:
    grouped = played([{"share": 1, "epochs": 2, "trainer": "standard"}])
    plain = played(trainer="standard", train_args__epochs=2)
    assert same_bits(grouped.server.state, plain.server.state)


def test_roles_of_fedrbn_are_groups() -> None:
    """The same bits as with a role for each client in turn, at the server and at the clients."""
    warm = {"name": "fedrbn", "pnc_warmup": 1}
    listed = played(trainer={**warm, "roles": "at st at"}, rounds=3)
    for trainer, clients in (
        (warm, [{"ids": 1, "trainer": {**warm, "role": "st"}}]),
        ({**warm, "role": "st"}, [{"ids": [0, 2], "trainer": {**warm, "role": "at"}}]),
    ):
        grouped = played(clients, trainer=trainer, rounds=3)
        assert same_bits(grouped.server.state, listed.server.state)
        assert same_bits(grouped.server.broadcast, listed.server.broadcast)
        kept, wanted = grouped.worker.client_states, listed.worker.client_states
        assert all(same_bits(kept[client], wanted[client]) for client in wanted)


@pytest.mark.parametrize(("group", "unattacked"), [({"trainer": "standard"}, {2}), ({"epochs": 3}, set())])
def test_the_aggregator_knows_who_trains_without_an_attack(
    monkeypatch: pytest.MonkeyPatch, group: Any, unattacked: set[int]
) -> None:
    federation = played([{"ids": 2, **group}], rounds=1, aggregator="sfat")
    found = []
    combine = federation.server._aggregator.combine
    monkeypatch.setattr(federation.server._aggregator, "combine", lambda task: found.append(task) or combine(task))
    federation.play()
    assert [set(task.unattacked) for task in found] == [unattacked]


# --- attackers --------------------------------------------------------------------------------------------------------


def moves(federation: Federation) -> dict[int, Any]:
    """Each client's displacement of the first parameter, as the aggregator gets it."""
    seen: dict[int, Any] = {}
    server = federation.server
    combine = server._aggregator.combine

    def watching(task: Any) -> Any:
        name = task.parameter_names[0]
        seen.update({c: (u.state[name] - task.global_state[name]).double() for c, u in task.updates.items()})
        return combine(task)

    server._aggregator.combine = watching  # type: ignore[method-assign]
    federation.play()
    return seen


@pytest.mark.parametrize(
    ("attacker", "factor"),
    [
        ({"name": "sign_flip", "scale": 5}, -5),
        ("sign_flip", -1),
        ({"name": "scaling", "factor": 7}, 7),
        ("scaling", 100),
    ],
)
def test_a_multiple_of_its_own_update(attacker: Any, factor: float) -> None:
    honest = moves(played(rounds=0))
    attacked = moves(played([{"ids": 1, "attacker": attacker}], rounds=0))
    torch.testing.assert_close(attacked[1], factor * honest[1], rtol=1e-4, atol=1e-5)
    for client in (0, 2):
        assert torch.equal(attacked[client], honest[client])


def test_noise_is_anew_each_round_and_the_same_each_time() -> None:
    group = [{"ids": 1, "attacker": {"name": "gaussian_noise", "std": 0.5}}]
    first = played(group, rounds=0)
    one, two = moves(first)[1], moves(first)[1]
    assert not torch.allclose(one, two, atol=1e-3)  # the same draw comes back from another model, but for rounding
    assert 0.1 < float(one.std()) < 1.0
    assert torch.equal(moves(played(group, rounds=0))[1], one)


def test_flipped_labels_are_trained_on() -> None:
    honest, attacked = (
        Federation(experiment("fedpgd")),
        Federation(experiment("fedpgd", calfat__clients=[{"ids": 1, "attacker": "label_flip"}])),
    )
    assert not same_bits(sent(honest, 1), sent(attacked, 1))
    assert same_bits(sent(honest, 0), sent(attacked, 0))
    labels = attacked.worker.shards[1].y
    classes = attacked.worker._dataset.num_classes
    assert torch.equal(tasks_of(attacked)[1].data.y, classes - 1 - labels)
    assert torch.equal(attacked.worker.shards[1].y, labels)


@pytest.mark.parametrize(
    ("attacker", "expected"),
    [
        ({"name": "alie", "z": 1.5}, lambda rows: rows.mean(0) - 1.5 * rows.std(0, correction=0)),
        ({"name": "ipm", "epsilon": 0.3}, lambda rows: -0.3 * rows.mean(0)),
    ],
)
@pytest.mark.parametrize("ids", [[2], [1, 2]])
def test_colluding_attackers_see_the_honest_clients_alone(ids: list[int], attacker: Any, expected: Any) -> None:
    honest = moves(played(rounds=0))
    found = moves(played([{"ids": ids, "attacker": attacker}], rounds=0))
    rows = torch.stack([honest[client] for client in range(3) if client not in ids])
    for client in ids:
        torch.testing.assert_close(found[client], expected(rows), rtol=1e-4, atol=1e-5)


class Looking(Attacker):
    def sent(self, task: AttackTask) -> State:
        return next(iter(task.honest().values()))


@pytest.mark.parametrize("sees_honest", [True, False])
def test_who_looks_at_honest_models_has_to_declare_it(sees_honest: bool, snapshot: TextSnapshot) -> None:
    entry = AttackerEntry("looking", build=Looking, sees_honest=sees_honest)
    known = testing.builtin_registry(offering(entry, name="looking"))
    recipe = tiny_experiment(known, trainer="fedpgd", clients=[{"ids": [1], "attacker": "looking"}])
    federation = Federation(recipe)
    if sees_honest:
        found = moves(federation)
        assert torch.equal(found[1], found[0])
        return
    with snapshot.raises(PluginError):
        federation.play()


@pytest.mark.parametrize(
    ("clients", "attackers", "z"), [(20, 4, 0.157311), (50, 12, 0.336038), (24, 4, 0.125661), (10, 6, 3.090232)]
)
def test_the_deviation_that_hides_them(clients: int, attackers: int, z: float) -> None:
    """Of 20 clients 4 attack: s = 11 - 4 = 7 supporters, so phi(z) = (16 - 7) / 16; of 50 with 12: 24 / 38."""
    assert hidden_deviations(clients, attackers) == pytest.approx(z, abs=1e-4)


def test_masked_gradients_multiply_the_logits() -> None:
    plain = played(rounds=0)
    masked = Federation(
        experiment("fedpgd", calfat__clients=[{"ids": 1, "attacker": {"name": "masked_gradients", "factor": 9}}])
    )
    server, client = masked.server, 1
    update = unpack_update(sent(masked, client), 4)
    attackers = Attackers(masked.server.experiment, masked.server._groups, server._parameter_names)
    state = attackers.send(1, {client: update}, server.state)[client].state
    model = plain.worker._model.eval()
    x = torch.rand(3, *masked.worker._dataset.train.x.shape[1:])
    with torch.no_grad():
        model.load_state_dict(dict(update.state))
        wanted = 9 * model(x)
        model.load_state_dict(dict(state))
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def test_what_an_attacker_sends_is_checked_as_anyones() -> None:
    federation = played([{"ids": 1, "attacker": {"name": "scaling", "factor": 1e30}}], rounds=0)
    record = federation.play()
    assert record.clients == (0, 2)
    assert list(record.refused) == [1]
    assert "expected values up to 1e+18" in record.refused[1]


def test_a_record_says_which_share_of_the_attackers_was_named() -> None:
    group = [{"ids": 1, "attacker": {"name": "scaling", "factor": 1000}}]
    downlink = (federation := played(group, rounds=0)).server.downlink()
    uploads = {client: (8, federation.worker.fit(client, 1, downlink)) for client in range(3)}
    record = federation.server.finish_round(1, uploads)
    assert (record.attackers_named, record.others_named) == (1.0, 0.0)
    assert [alarm.partition(" has")[0] for alarm in record.alarms] == ["large-update: the update of client 1"]
