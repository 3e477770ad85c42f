"""Every cell of the grid (method x modifier x aggregator) runs, and what keeps state resumes bit for bit."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from calfat_plugin import entries
from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import defined_modifiers
from calfat_plugin.options import describe_options
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import tiny_experiment
from tests.methods.helpers import Federation, experiment, registry, same_bits

METHODS = [method for method, _ in registry().offers(entries.TrainerEntry)]
AGGREGATORS = [aggregator for aggregator, _ in registry().offers(entries.AggregatorEntry)]
CELLS = [
    (method.name, loss, aggregator.name)
    for method in METHODS
    for loss in (defined_modifiers(registry(), method) or (None,))
    for aggregator in AGGREGATORS
    if aggregator.name not in method.conflicts and method.name not in aggregator.conflicts
]


def pairwise(cells):
    """Few of the cells: they have each pair of method, modifier and aggregator that all cells have."""
    pairs = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


QUICK = pairwise(CELLS)


@pytest.mark.parametrize(
    ("method", "loss", "aggregator"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in CELLS],
)
def test_every_cell_runs_two_rounds(method, loss, aggregator):
    trainer = {"name": method} if loss is None else {"name": method, "loss": loss}
    if method == "fedlat":
        trainer["clean_rounds"] = 1
    wanted = {"f": 0} if "f" in options_of(aggregator) else {}
    federation = Federation(experiment(trainer, {"name": aggregator, **wanted}))
    before = federation.server.state
    for _ in range(2):
        record = federation.play()
        assert record.refused == {}
        assert all(map(math.isfinite, record.losses.values()))
        assert record.heterogeneity > 0
    after = federation.server.state
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


INNER = [inner for inner, _ in registry().offers(entries.InnerAttackEntry)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "by_class"),
    [(inner.name, by_class) for inner in INNER for by_class in (False, True) if inner.by_class or not by_class],
)
@pytest.mark.parametrize(("method", "aggregator"), dict.fromkeys((method, mix) for method, _, mix in CELLS))
def test_every_attack_of_training_goes_with_every_method_and_aggregator(method, inner, by_class, aggregator):
    """Two rounds, and the same bits when they are resumed. By default, ``test_remembering_attacks.py`` has some."""
    early = {"fedlat": {"clean_rounds": 1}, "fedgairat": {"weighting": "discrete"}}.get(method, {})
    robust = {"f": 0} if "f" in options_of(aggregator) else {}
    threat = {"eps": "0.1", "inner": inner, **({"by_class": {"warmup": 0.5}} if by_class else {})}
    chosen = {"trainer": {"name": method, **early}, "aggregator": {"name": aggregator, **robust}, "threat": threat}
    own = {"fedawp": "backward", "fedgairat": "counts_iterates", "fedrbn": "backward"}.get(method)
    if own and inner == "free":
        with pytest.raises(RecipeError, match=f"has its own `{own}`, which 'free' leaves no place for"):
            tiny_experiment(registry(), **chosen)
    else:
        check_federation(tiny_experiment(registry(), **chosen))


def options_of(aggregator):
    return {info.name for info in describe_options(registry().find(entries.AggregatorEntry, aggregator)[0].config)}


@pytest.mark.parametrize("trainer", ["fedpgd", "fedrbn"])
def test_the_record_says_how_far_clients_moved_and_how_they_differ(trainer):
    federation = Federation(experiment(trainer))
    before = federation.server.state
    downlink = federation.server.downlink()
    wires = {client: federation.worker.fit(client, 1, downlink) for client in range(3)}
    record = federation.server.finish_round(1, {client: (30, wire) for client, wire in wires.items()})
    shared = [name for name, _ in federation.worker._model.named_parameters() if ".norm." not in name]
    flat = {c: torch.cat([wire[name].double().flatten() for name in shared]) for c, wire in wires.items()}
    start = torch.cat([before[name].double().flatten() for name in shared])
    mean = sum(flat.values()) / 3
    assert record.heterogeneity == pytest.approx(sum((f - mean).square().sum().item() for f in flat.values()) / 2)
    for client, vector in flat.items():
        assert record.update_norms[client] == pytest.approx((vector - start).norm().item())
        assert record.losses[client] == wires[client]["metric/loss"].item()


ALL_OF_IT = {
    "train_args__lr_schedule": "cosine",
    "train_args__warmup_rounds": 1,
    "train_args__client_optimizer": "adamw",
    "train_args__max_grad_norm": 1.0,
    "train_args__local_steps": 3,
}
ATTACKERS = [
    {"share": 0.34, "seed": 1, "attacker": "gaussian_noise"},
    {"share": 0.34, "seed": 2, "trainer": "standard"},
]


@pytest.mark.parametrize(
    ("trainer", "aggregator"),
    [
        ("fedpgd", "scaffold"),
        ("fedpgd", {"name": "scaffold", "variant": "I", "pairing": "gradient"}),
        ({"name": "fedrbn", "roles": "at st at", "pnc_warmup": 1}, "fedavg"),
        ({"name": "fedrbn", "roles": "st at st", "pnc_warmup": 1}, "scaffold"),
        ("calfat", "fedadam"),
        ("calfat", "fedyogi"),
        ("calfat", "fedadagrad"),
        ({"name": "mixfat", "sampling": "fixed"}, "sfat"),
        ({"name": "fedlat", "clean_rounds": 1}, "scaffold"),  # resumed when it is linear,
        ({"name": "fedlat", "clean_rounds": 2}, "fedadam"),  # as it is about to be,
        ({"name": "fedlat", "clean_rounds": 3}, "fedavg"),  # and before
        *((method, "optimiser") for method in ("fedmart", "fedgairat", "fedawp")),
        ("fedpgd", "attackers"),
    ],
)
def test_a_resumed_run_is_bit_identical(trainer, aggregator, tmp_path):
    more = {"optimiser": ALL_OF_IT, "attackers": {"calfat__clients": ATTACKERS}}.get(str(aggregator), {})
    settings = experiment(trainer, "fedavg" if more else aggregator, train_args__comm_round=4, **more)
    whole = Federation(settings)
    for _ in range(2):
        whole.play()
    save_checkpoint(tmp_path / "last.safetensors", whole.snapshot(), {})
    snapshot, _ = load_checkpoint(tmp_path / "last.safetensors")
    resumed = Federation(settings, snapshot)
    for _ in range(2):
        records = whole.play(), resumed.play()
        assert records[0].losses == records[1].losses
        assert records[0].learning_rate == settings.train.learning_rate_of(records[0].round)
    first, second = whole.snapshot(), resumed.snapshot()
    assert first.round == second.round == 4
    assert same_bits(first.global_state, second.global_state)
    assert same_bits(first.server_state, second.server_state)
    assert same_bits(first.broadcast, second.broadcast)
    assert all(same_bits(first.client_states[client], second.client_states[client]) for client in range(3))
