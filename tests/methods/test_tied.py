"""A tensor that a network has under two names is one tensor to every rule: as in the network that registers it once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from calfat_plugin import entries
from calfat_plugin.errors import ModelError, UpdateError
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.worker import Worker
from calfat_plugin.maths.tied import state_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import RoundRecord
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.loaded_run import LoadedRun
from calfat_plugin.testing import builtin_registry, same_bits, tiny_dataset
from calfat_plugin.testing.federation import TinyFederation
from calfat_plugin.testing.tiny import CPU, tiny_experiment
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.methods.tied_models import Tied, TiedBuffers
from tests.plugins import offering

REGISTRY = builtin_registry()
SHARED = ("again.weight", "again_norm.weight", "b.weight")  # second names
ROUNDS = 3


def names_of(kind: type) -> list[str]:
    return [entry.name for entry, _ in REGISTRY.offers(kind)]


def federation(network: str, snapshot: Snapshot | None = None, registry: Any = REGISTRY, **sections: Any) -> Any:
    model = {"model": f"tests.methods.tied_models:{network}"}
    sections = {"trainer": "fedpgd", **sections}
    return TinyFederation(tiny_experiment(registry, model_args=model, **sections), snapshot)


def played(network: str, **sections: Any) -> tuple[TinyFederation, list[RoundRecord]]:
    made: TinyFederation = federation(network, **sections)
    return made, [made.play() for _ in range(ROUNDS)]


def check_same(**sections: Any) -> None:
    """Both networks go the same way, in every number of every round."""
    tied, records = played("Tied", **sections)
    once, expected = played("Once", **sections)
    assert not any(record.refused for record in records)
    for part in ("state", "average", "server_state", "broadcast"):
        assert same_bits(getattr(tied.server, part), getattr(once.server, part)), part
    assert tied.worker.client_states.keys() == once.worker.client_states.keys()
    for client, kept in tied.worker.client_states.items():
        assert same_bits(kept, once.worker.client_states[client])
    for record, other in zip(records, expected, strict=True):
        cost = {"seconds": 0.0, "peak_memory_mb": None, "evaluations": {}}
        assert replace(record, **cost) == replace(other, **cost)
        assert record.evaluations["natural"].accuracy == other.evaluations["natural"].accuracy


@pytest.mark.parametrize("aggregator", names_of(entries.AggregatorEntry))
def test_every_aggregator(aggregator: str) -> None:
    options = {"f": 0} if aggregator in ("krum", "multi_krum", "bulyan", "trimmed_mean") else {}
    check_same(aggregator={"name": aggregator, **options})


def test_scaffold_with_a_step_of_the_server() -> None:
    check_same(aggregator={"name": "scaffold", "server_lr": 0.5})
    check_same(
        aggregator={"name": "scaffold", "variant": "I", "pairing": "gradient"}, train_args={"weight_decay": 0.01}
    )


@pytest.mark.parametrize("attacker", names_of(entries.AttackerEntry))
def test_every_attacker(attacker: str) -> None:
    check_same(aggregator="norm_clipping", clients=[{"ids": [1], "attacker": attacker}])


@pytest.mark.parametrize("trainer", names_of(entries.TrainerEntry))
def test_every_method(trainer: str) -> None:
    options = {"clean_rounds": 1} if trainer == "fedlat" else {}
    check_same(trainer={"name": trainer, **options})


def test_what_is_added_to_a_method_and_what_clients_keep() -> None:
    check_same(trainer={"name": "fedpgd", "awp": {"gamma": 0.05, "warmup": 0}}, ema={"decay": 0.5})
    check_same(trainer={"name": "fedrbn", "roles": "at st st", "pnc_warmup": 1})
    check_same(trainer={"name": "fedtrades", "loss": "robal"}, train_args={"client_optimizer": "adamw"})
    check_same(trainer="fedpgd", runtime={"precision": "bf16"})


def test_a_run_that_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"aggregator": "scaffold", "ema": {"decay": 0.5}}
    whole = federation("Tied", **sections)
    whole.play()
    save_checkpoint(tmp_path / "last.safetensors", whole.snapshot(), {})
    stored, _ = load_checkpoint(tmp_path / "last.safetensors")
    resumed = federation("Tied", stored, **sections)
    whole.play()
    resumed.play()
    assert same_bits(whole.server.state, resumed.server.state)
    assert not set(stored.global_state) & set(SHARED)


def test_a_message_has_a_tensor_once() -> None:
    tied = federation("Tied")
    model = Tied(1, (4, 4), 4)
    assert tied.worker.model_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert list(tied.server.downlink()) == list(federation("Once").server.downlink())


def test_tied_buffers_stay_tied_where_a_party_computes(tmp_path: Path) -> None:
    """Torch copies a buffer to another device once for each of its names."""
    experiment = tiny_experiment(REGISTRY, model_args={"model": "tests.methods.tied_models:TiedBuffers"})
    torch.save(TiedBuffers(1, (4, 4), 4).state_dict(), tmp_path / "weights.pt")
    there = torch.device("meta")
    models: list[Any] = [
        Server(experiment, tiny_dataset(), there, RunObserver())._model,
        Worker(experiment, tiny_dataset(), {}, there, RunObserver())._model,
        LoadedRun(experiment, tmp_path / "weights.pt", None, there).model(tiny_dataset()),
    ]
    for model in models:
        assert model.norm.running_mean.device == there
        assert model.again_norm.running_mean is model.norm.running_mean


def test_tied_buffers_go_through_rounds() -> None:
    tied, _ = played("TiedBuffers")
    assert "again_norm.running_mean" not in tied.server.state
    assert float(tied.server.state["norm.running_mean"].abs().max()) > 0


def loaded(path: Path) -> nn.Module:
    model = {"model": "tests.methods.tied_models:Tied"}
    return LoadedRun(tiny_experiment(REGISTRY, model_args=model), path, None, CPU).model(tiny_dataset())


def test_weights_of_ones_own_may_have_all_names_of_a_tensor_or_one(tmp_path: Path) -> None:
    model = Tied(1, (4, 4), 4)
    torch.save(model.state_dict(), tmp_path / "all.pt")
    save_model(model, str(tmp_path / "one.safetensors"))
    for name in ("all.pt", "one.safetensors"):
        found = loaded(tmp_path / name)
        assert same_bits(state_of(found), state_of(model))
        assert isinstance(found, Tied)
        assert found.b.weight is found.a.weight


def test_weights_with_two_values_for_one_tensor_are_refused(tmp_path: Path) -> None:
    model = Tied(1, (4, 4), 4)
    torch.save({**model.state_dict(), "b.weight": model.a.weight.detach() + 1}, tmp_path / "two.pt")
    with pytest.raises(ModelError, match=r"the file: 'a\.weight' and 'b\.weight' are one tensor of the model"):
        loaded(tmp_path / "two.pt")


def test_a_model_whose_tensors_overlap_is_refused_at_its_place_in_the_recipe() -> None:
    with pytest.raises(ModelError, match="share memory, but are not one") as raised:
        federation("Overlapping")
    assert str(raised.value).startswith("the check's recipe: model_args.model: model tests.methods.tied_models:")


class TorchsState(FedPGD):
    """A method that gives torch's own state dict, as one with a loop of its own does."""

    def fit(self, task):
        update = super().fit(task)
        return replace(update, state={name: t.clone() for name, t in task.model.state_dict().items()})


class TwoValues(FedPGD):
    def fit(self, task):
        update = super().fit(task)
        return replace(update, state={**update.state, "b.weight": update.state["a.weight"] + 1})


def with_method(build: type) -> Any:
    entry = entries.TrainerEntry("mine", build=build, summary="for a test", citation=None, modifiers=("plain",))
    return {"registry": builtin_registry(offering(entry)), "trainer": "mine"}


def test_an_update_may_have_all_names_of_a_tensor() -> None:
    mine, _ = played("Tied", **with_method(TorchsState))
    usual, _ = played("Tied")
    assert same_bits(mine.server.state, usual.server.state)


def test_an_update_with_two_values_for_one_tensor_is_refused() -> None:
    with pytest.raises(UpdateError, match="not one client delivered") as raised:
        federation("Tied", **with_method(TwoValues)).play()
    assert "client 0: 'a.weight' and 'b.weight' are one tensor of the model" in str(raised.value)


class Personal(FedPGD):
    """Keeps a layer at home that it calls by its second name."""

    def personal_names(self, model):
        return frozenset({"b.weight", "classifier.bias"})

    def evaluated_personal(self, updates, names):
        return {name: updates[0].state[name] for name in names}


def test_a_personal_tensor_is_personal_under_its_other_name_too() -> None:
    tied, _ = played("Tied", **with_method(Personal))
    assert set(tied.worker.client_states[0]) == {"personal/a.weight", "personal/classifier.bias"}
    assert not torch.equal(*(tied.worker.client_states[client]["personal/a.weight"] for client in (0, 1)))


def test_the_tensors_stay_tied_in_a_round() -> None:
    tied, _ = played("Tied", trainer={"name": "fedrbn"})
    for model in (tied.server._model, tied.worker._model):
        assert isinstance(model, nn.Module)
        assert model.again_norm is model.norm
        assert model.b.weight is model.a.weight
    assert not set(state_of(tied.server._model)) & set(SHARED)
