"""What evaluators are given of a round's clients, how often they are set up, and what fine-tuning leaves behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from calfat_plugin.entries import EvaluatorEntry
from calfat_plugin.errors import PluginError, RecipeError, RunError
from calfat_plugin.evaluators.natural import Natural
from calfat_plugin.federation.server import Server
from calfat_plugin.federation.wire import unpack_update
from calfat_plugin.interfaces import EvaluationTask, SetUpTask
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import EvaluationResult
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.seeds import derive_seed
from calfat_plugin.testing.tiny import builtin_registry, tiny_experiment
from tests.methods.helpers import CPU, Federation, experiment, same_bits
from tests.plugins import offering
from tests.snapshot import TextSnapshot

Seen = list[tuple[str, Any]]


class Watching(Natural):
    """Notes what it is given, in a list that the test has."""

    seen: Seen

    def set_up(self, task: SetUpTask) -> None:
        self.seen.append(("set up", task))

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        clients = task.clients()
        self.seen.append((label, (clients, {client: clients.model(client).state_dict() for client in clients.ids})))
        return super().evaluate(task, label)


def watching(seen: Seen, uses_clients: bool = True) -> Any:
    """A plugin with the evaluator ``watch``."""
    build = type("Watch", (Watching,), {"seen": seen})

    entry = EvaluatorEntry("watch", build=lambda options: build(options), uses_clients=uses_clients)
    return offering(entry)


def federation(seen: Seen, **sections: Any) -> Federation:
    registry = builtin_registry(watching(seen))
    sections = {"evaluators": ["watch"], "monitor": {"evaluators": ["watch"], "every": 1}, **sections}
    return Federation(tiny_experiment(registry, **sections))


def played(run: Federation) -> dict[int, Any]:
    """One round; client id to what its worker sent."""
    sent = {}
    fit = run.worker.fit

    def noted(client: int, *arguments: Any) -> Any:
        wire = fit(client, *arguments)
        sent[client] = unpack_update(wire, 1).state
        return wire

    run.worker.fit = noted  # type: ignore[method-assign]
    run.play()
    run.worker.fit = fit  # type: ignore[method-assign]
    return sent


def test_an_evaluator_is_set_up_once_whatever_it_measures() -> None:
    """One that is named twice is two; a resumed run sets up and tries nothing."""
    seen: Seen = []
    run = federation(seen)
    run.server.begin(None)
    assert [what for what, _ in seen] == ["set up", "set up", "watch", "watch"]
    for _ in range(3):
        run.play()
    run.server.final_evaluation()
    run.server.final_evaluation()
    assert [what for what, _ in seen] == ["set up", "set up", *["watch"] * 7]
    (first, second) = (task for what, task in seen if what == "set up")
    assert (first.num_classes, first.in_channels, first.image_size, first.has_clients) == (10, 1, (8, 8), True)
    assert first == second
    resumed: Seen = []
    federation(resumed).server.begin(run.snapshot())
    assert [what for what, _ in resumed] == ["set up", "set up"]


def test_clients_have_what_they_sent_in_the_last_round() -> None:
    """With partial participation the clients of the round; in the end those of the last."""
    seen: Seen = []
    run = federation(seen, train_args={"client_num_per_round": 2})
    for number in (1, 2, 3):
        sent = played(run)
        clients, models = seen[-1][1]
        assert clients.ids == clients.honest == run.server.clients_of(number)
        assert models.keys() == sent.keys()
        assert all(same_bits(models[client], sent[client]) for client in sent)
    run.server.final_evaluation()
    _, models = seen[-1][1]
    assert all(same_bits(models[client], sent[client]) for client in sent)


def test_an_attacker_has_the_model_that_it_sent_and_is_not_honest() -> None:
    seen: Seen = []
    run = federation(seen, clients=[{"ids": 1, "attacker": "sign_flip"}])
    before = run.server.state
    sent = played(run)
    clients, models = seen[-1][1]
    assert (clients.ids, clients.honest) == ((0, 1, 2), (0, 2))
    assert all(same_bits(models[client], sent[client]) for client in (0, 2))
    for name, start in before.items():  # turned around
        assert torch.allclose(models[1][name] - start, start - sent[1][name], atol=1e-6)
    assert not same_bits(models[1], sent[1])


def test_personal_tensors_are_part_of_a_clients_model() -> None:
    run = Federation(experiment("fedrbn", calfat__evaluators=["internal2"]))
    sent = played(run)
    (name, *_) = sorted(run.worker._personal)
    clients = run.server._clients()
    assert clients is not None
    found = [clients.model(client).state_dict()[name] for client in sent]
    assert all(torch.equal(one, sent[client][name]) for client, one in zip(sent, found, strict=True))
    assert not torch.equal(found[0], found[1])


def test_models_are_copies_in_evaluation_mode_and_class_counts_the_clients_own() -> None:
    seen: Seen = []
    run = federation(seen)
    run.play()
    clients = seen[-1][1][0]
    first, again = clients.model(0), clients.model(0)
    assert not first.training
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert not same_bits(first.state_dict(), again.state_dict())
    assert same_bits(again.state_dict(), clients.model(0).state_dict())
    for client, shard in run.worker.shards.items():
        assert clients.class_counts(client) == tuple(torch.bincount(shard.y, minlength=10).tolist())


def test_before_the_first_round_two_honest_clients_have_the_initial_model() -> None:
    seen: Seen = []
    run = federation(seen, clients=[{"ids": 0, "attacker": "sign_flip"}])
    run.server.begin(None)
    clients, models = seen[-1][1]
    assert clients.ids == clients.honest == (1, 2)
    assert all(same_bits(model, run.server.state) for model in models.values())
    assert same_bits(clients.fine_tuned(1, 5).state_dict(), run.server.state)


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def tuned(run: Federation, client: int, epochs: int) -> Any:
    clients = run.server._clients()
    assert clients is not None
    return clients.fine_tuned(client, epochs).state_dict()


def scaffold(epochs: int = 1, seed: int | None = None, **groups: Any) -> Federation:
    asked = experiment("fedpgd", "scaffold", train_args__epochs=epochs, calfat__evaluators=["internal2"], **groups)
    if seed is not None:  # beyond what a recipe may say
        asked = dataclasses.replace(asked, common=dataclasses.replace(asked.common, random_seed=seed))
    return Federation(asked)


def test_fine_tuning_is_what_the_client_would_do_next_with_more_epochs_and_other_draws() -> None:
    """From the global model, with what it keeps (SCAFFOLD's variate) and the server's extras; of a derived seed."""
    run = scaffold()
    run.play()
    other = scaffold(epochs=3, seed=derive_seed(0, "fine-tune"))
    other.worker.client_states.update(run.worker.client_states)
    for client in (0, 1):
        assert run.worker.client_states[client]
        wire = other.worker.fit(client, 1, run.server.downlink())
        assert same_bits(tuned(run, client, 3), unpack_update(wire, 1).state)
    assert not same_bits(tuned(run, 0, 1), tuned(run, 0, 3))


def test_fine_tuning_leaves_nothing_behind() -> None:
    run, undisturbed = scaffold(), scaffold()
    for each in (run, undisturbed):
        each.play()
    kept = {client: dict(state) for client, state in run.worker.client_states.items()}
    assert same_bits(tuned(run, 1, 2), tuned(run, 1, 2))
    assert run.worker.client_states.keys() == kept.keys()
    assert all(same_bits(run.worker.client_states[client], state) for client, state in kept.items())
    for each in (run, undisturbed):
        each.play()
    assert same_bits(run.server.state, undisturbed.server.state)


def test_a_client_of_a_group_is_tuned_by_its_groups_recipe() -> None:
    """But for its local steps, in whose place the epochs are."""
    changes = {"trainer": "standard", "learning_rate": 0.5}
    grouped = scaffold(calfat__clients=[{"ids": 1, "local_steps": 1, **changes}])
    own = scaffold(epochs=2, seed=derive_seed(0, "fine-tune"), calfat__clients=[{"ids": 1, **changes}])
    grouped.play()
    own.worker.client_states.update(grouped.worker.client_states)
    for client in (0, 1):
        wire = own.worker.fit(client, 1, grouped.server.downlink())
        assert same_bits(tuned(grouped, client, 2), unpack_update(wire, 1).state)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_only_the_last_round_keeps_the_clients_models_and_only_for_who_needs_them(tmp_path: Any) -> None:
    run, plain = (
        federation([], train_args={"comm_round": 2}),
        Federation(tiny_experiment(None, train_args={"comm_round": 2})),
    )
    for each in (run, plain):
        each.play()
        assert each.snapshot().client_models == {}
        each.play()
    assert plain.snapshot().client_models == {}
    snapshot = run.snapshot()
    assert list(snapshot.client_models) == [0, 1, 2]
    save_checkpoint(tmp_path / "last.safetensors", snapshot, {})
    loaded, _ = load_checkpoint(tmp_path / "last.safetensors")
    assert all(same_bits(loaded.client_models[c], state) for c, state in snapshot.client_models.items())
    assert same_bits(loaded.global_state, snapshot.global_state)

    seen: Seen = []
    resumed = federation(seen, train_args={"comm_round": 2})
    resumed.server.begin(loaded)
    resumed.server.final_evaluation()
    _, models = seen[-1][1]
    assert all(same_bits(models[c], state) for c, state in snapshot.client_models.items())


def test_a_run_that_ends_earlier_than_it_was_asked_to_lacks_its_clients(snapshot: TextSnapshot) -> None:
    run = federation([])
    run.play()
    shorter = federation([], train_args={"comm_round": 1})
    with snapshot.raises(RunError, "train_args.comm_round=2"):
        shorter.server.begin(run.snapshot())


# --- who may look, and where ------------------------------------------------------------------------------------------


def test_who_may_not_look_is_told(snapshot: TextSnapshot) -> None:
    """An entry that does not say that it does; across silos, who tunes clients or asks for their classes."""
    run = Federation(tiny_experiment(builtin_registry(watching([], uses_clients=False)), evaluators=["watch"]))
    with snapshot.raises(PluginError):
        run.server.begin(None)
    run = scaffold()
    server = Server(run.server.experiment, run.server.dataset, CPU, RunObserver())
    clients = server._clients({0: server.state})
    assert clients is not None
    with snapshot.raises(PluginError):
        clients.class_counts(0)
    silos = {"common_args__training_type": "cross_silo", "comm_args__backend": "GRPC"}
    assert experiment("fedpgd", calfat__evaluators=["internal"], **silos).evaluators[0].entry.uses_clients
    with snapshot.raises(RecipeError, "calfat.evaluators[0]"):
        experiment("fedpgd", calfat__evaluators=["personalised"], **silos)


def test_every_metric_of_a_round_is_a_column() -> None:
    run = Federation(
        experiment("fedpgd", calfat__monitor={"evaluators": ["internal2", {"name": "personalised", "steps": 2}]})
    )
    columns = run.server.experiment.metric_columns
    assert {"internal2/worst", "internal2/mean", "personalised/tuned_robust_worst"} <= set(columns)
    for record in (run.play(), run.play()):
        due = {name for name in columns if "/" in name and name.partition("/")[0] in record.evaluations}
        assert due <= record.metrics.keys()
