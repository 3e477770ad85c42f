"""Golden numbers of every random stream: under another name, or in another order, published numbers would move.

The numbers were written down once. If one has to change, CHANGELOG.md lists the published numbers that move with it.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from calfat_plugin import seeds
from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.data import Augmentation, prepared
from calfat_plugin.evaluators.base import fixed_subset
from calfat_plugin.evaluators.subattacks import SubAttacks
from calfat_plugin.federation.server import sample_clients
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.models.building import seeded
from calfat_plugin.models.networks import CNNSmall
from calfat_plugin.partitions.split import dirichlet, dirichlet_plain, iid, label_shards
from calfat_plugin.seeds import derive_seed, generator
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.base import random_share
from tests.reference.client import Setting
from tests.reference.test_federation import digits, runs

PAGE = Path(__file__).parents[2] / "docs" / "determinism.md"
SEEDS = {  # of round 3, client 4 and extra 5 of the run with seed 2021
    "weights": 6446446386477922300,
    "sample clients": 129362912328358603,
    "batches": 2486479467842064,
    "attack": 7271395725116242964,
    "adversarial split": 690812710412556151,
    "full gradient batches": 2654349661551915955,
    "full gradient attack": 8032431428515850768,
    "attacker": 806828071496121681,
    "inner attack": 1972350759582543640,
    "clients of a group": 6336666603128600213,
    "fine-tune": 7637793842047142021,
    "ambient": 6792431728365265000,
    "aggregator": 8578652689210247090,
    "ambient aggregation": 1517004274714031063,
    "ambient evaluation": 2041863676708084932,
    "evaluate/pgd20": 4211501034519974291,
    "monitor subset": 7327731280917444722,
    "train examples": 4026108395715900571,
    "test examples": 4395757872313115755,
    "validation": 1768337720876688361,
    "trust/pgd20": 2195172321704476937,
    "trust/clean": 1198469754649323814,
    "trust/answers": 1223165112840356200,
    "trust/nearest": 3786458461243447887,
    "trust/dead units": 6267338679598811459,
    "trust/slopes": 7517516967473820027,
    "trust/surrogate": 4705611907695858808,
    "trust/surrogate/order": 2644833467900309753,
    "trust/surrogate/start": 5484186179072123245,
}
LABELLED = {"evaluate/pgd20": "evaluate/<label>", "trust/pgd20": "trust/<attack>"}


@pytest.mark.parametrize(("purpose", "seed"), SEEDS.items())
def test_seeds_of_all_purposes(purpose: str, seed: int) -> None:
    assert derive_seed(2021, purpose, round=3, client=4, extra=5) == seed


def test_the_documentation_lists_all_purposes() -> None:
    table = PAGE.read_text().partition("| purpose | round |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall("`([^`]+)`", row.split("|")[1])}
    assert listed == {LABELLED.get(purpose, purpose) for purpose in SEEDS}


def test_a_run_draws_from_these_streams_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """MixFAT with a fixed split and SCAFFOLD I draw from every stream of training."""
    drawn: list[tuple[Any, ...]] = []

    def noted(key: list[Any]) -> str:
        drawn.append(tuple(key[1:]))
        return json.dumps(key)

    autoattack: list[int] = []
    perturb = SubAttacks.perturb

    def watched(self: SubAttacks, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        points = perturb(self, x, y)
        autoattack.append(self._current.seed)
        return points

    monkeypatch.setattr(seeds, "json", SimpleNamespace(dumps=noted))
    monkeypatch.setattr(SubAttacks, "perturb", watched)
    setting = Setting("mixfat", "scaffold", {"sampling": "fixed"}, {"variant": "I", "pairing": "gradient"}, seed=7)
    changes = {
        "train_args.comm_round": 2,
        "calfat.monitor": {"every": 2, "max_examples": 20, "evaluators": ["natural", "fgsm"]},
        "calfat.evaluators": ["natural", "pgd2", {"name": "apgd-ce", "iterations": 1, "max_examples": 20}],
    }
    runs(setting, changes)
    prepared(digits(), max_train=40, max_test=20, validation_share=0.1, validate_on_test=False, seed=2021)

    clients = {1: (1, 2, 3), 2: (2, 3, 4)}
    each = [(round, client) for round in clients for client in clients[round]]
    assert set(drawn) == {
        (7, "weights", 0, 0, 0),
        *((7, "sample clients", round, 0, 0) for round in clients),
        *((7, purpose, *one, epoch) for purpose, one, epoch in product(("batches", "attack"), each, (0, 1))),
        *((7, f"full gradient {what}", *one, 0) for what, one in product(("batches", "attack"), each)),
        *((7, "adversarial split", 0, client, 0) for client in {client for _, client in each}),
        *((7, "ambient", *one, 0) for one in each),
        *((7, "aggregator", round, 0, 0) for round in clients),
        *((7, "ambient aggregation", round, 0, 0) for round in clients),
        *((7, "ambient evaluation", round, 0, 0) for round in (2, 0)),
        *((7, f"evaluate/{label}", round, 0, 0) for label, round in (("natural", 2), ("fgsm", 2))),
        *((7, f"evaluate/{label}", 0, 0, 0) for label in ("natural", "pgd2", "fgsm")),  # the monitor's: in the trial
        (0, "monitor subset", 0, 0, 0),
        *((2021, purpose, 0, 0, 0) for purpose in ("train examples", "test examples", "validation")),
    }
    # Above; in an analysis of a finished run; of what this run has not: groups, attackers, ATAS, personalised accuracy.
    elsewhere = ("evaluate/", "trust/", "attacker", "inner attack", "clients of a group", "fine-tune")
    assert {purpose for _, purpose, *_ in drawn if not purpose.startswith(elsewhere)} == {
        purpose for purpose in SEEDS if not purpose.startswith(elsewhere)
    }
    assert autoattack == [7]  # the run's seed, anew for every batch


LABELS = np.arange(24) % 4


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            lambda: iid(LABELS, 3, seed=2021),
            [[4, 9, 15, 8, 18, 10, 3, 22], [2, 23, 11, 14, 7, 5, 1, 16], [17, 6, 19, 12, 13, 0, 21, 20]],
        ),
        (
            lambda: label_shards(LABELS, 3, k=2, seed=2021),
            [[9, 13, 17, 21, 2, 6, 10, 14], [11, 15, 19, 23, 0, 4, 8, 12], [16, 20, 1, 5, 18, 22, 3, 7]],
        ),
        (
            lambda: dirichlet(LABELS, 3, alpha=0.5, seed=2021, min_size=2),
            [[10, 7, 18, 3, 19], [15, 6, 11, 13, 14, 23, 22, 2], [12, 8, 20, 9, 1, 16, 0, 4, 5, 17, 21]],
        ),
        (
            lambda: dirichlet_plain(LABELS, 3, alpha=0.5, seed=2021),
            [[10, 3, 18, 19], [6, 15, 14, 13, 7], [22, 8, 16, 1, 9, 12, 20, 5, 0, 4, 2, 11, 23, 17, 21]],
        ),
    ],
    ids=["iid", "label2", "dirichlet", "dirichlet_plain"],
)
def test_partitions(parts: Any, expected: list[list[int]]) -> None:
    assert [part.tolist() for part in parts()] == expected


def test_clients_of_a_round() -> None:
    assert [sample_clients(0, round, 10, 3) for round in range(1, 5)] == [(0, 5, 9), (2, 8, 9), (0, 3, 8), (1, 7, 8)]


def test_batches_and_augmentation() -> None:
    x = torch.arange(6 * 9).view(6, 1, 3, 3).to(torch.uint8)
    draws = generator(0, "batches", round=1, client=2, extra=1)
    augment = Augmentation(crop_padding=1, flip=True)
    found = list(batches(ImageData(x, torch.arange(6)), 4, "cpu", generator=draws, augment=augment))
    assert [examples.index.tolist() for _, _, examples in found] == [[1, 3, 5, 2], [4, 0]]
    assert [[round(255 * float(v)) for v in image.flatten()] for batch, _, _ in found for image in batch] == [
        [0, 9, 10, 0, 12, 13, 0, 15, 16],
        [0, 0, 0, 27, 28, 29, 30, 31, 32],
        [0, 0, 0, 47, 46, 45, 50, 49, 48],
        [0, 0, 0, 20, 19, 18, 23, 22, 21],
        [0, 0, 0, 38, 37, 36, 41, 40, 39],
        [4, 3, 0, 7, 6, 0, 0, 0, 0],
    ]


def test_starts_of_attacks() -> None:
    threat, x = ThreatModel(eps="0.1"), torch.full((1, 1, 1, 4), 0.5)
    noise = generator(0, "attack", round=1, client=2, extra=1)
    assert threat.random_start(x, noise).flatten().tolist() == pytest.approx(
        [0.5134857, 0.4068691, 0.591462, 0.4137285], abs=1e-6
    )
    assert (threat.gaussian_start(x, noise, 1.0) - x).flatten().tolist() == pytest.approx(
        [2.0227141, -0.9259882, 0.518023, 3.1464801], abs=1e-6
    )
    noise = generator(0, "attack", round=1, client=2, extra=1)
    l2 = ThreatModel(norm="l2", eps="0.1")
    assert l2.random_start(x, noise).flatten().tolist() == pytest.approx(
        [0.4781791, 0.4944806, 0.5310588, 0.4857814], abs=1e-6
    )


def test_examples_of_a_mixture() -> None:
    share = random_share(12, 0.5, generator(0, "adversarial split", client=2))
    assert torch.nonzero(share).flatten().tolist() == [1, 4, 5, 6, 8, 10]


def test_examples_of_the_monitor() -> None:
    assert fixed_subset(359, 8).tolist() == [42, 102, 113, 144, 217, 239, 300, 355]


def test_initial_weights() -> None:
    model = seeded(CNNSmall, derive_seed(0, "weights"))
    first, *_, last = (tensor.flatten()[:3].tolist() for tensor in model.state_dict().values())
    assert [*first, *last] == pytest.approx(
        [0.027208, -0.2683824, 0.0016527, -0.0518475, 0.0371697, 0.0233336], abs=1e-6
    )


def test_global_generators_during_training() -> None:
    with seeded_global_rng(derive_seed(0, "ambient", round=1, client=2)):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    assert drawn == pytest.approx([0.3793568, 0.2142046, 0.8363721], abs=1e-6)


def test_global_generators_go_on_where_they_were() -> None:
    """Whatever was drawn inside, and however that ended."""

    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seeded_anew() -> list[float]:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        return draws()

    first, second = seeded_anew(), draws()
    assert seeded_anew() == first
    inside: list[float] = []
    with suppress(ZeroDivisionError), seeded_global_rng(5):
        inside = draws()
        raise ZeroDivisionError
    assert not set(inside) & set(second)
    assert draws() == second
