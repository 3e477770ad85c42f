"""Inner attacks that remember: free adversarial training from mini-batch to mini-batch, ATAS from round to round."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import Augmentation, ImageData
from calfat_plugin.datasets.batches import Examples, batches
from calfat_plugin.errors import CalfatError, ModelError
from calfat_plugin.interfaces import InnerAttack, InnerTask, LocalCorrection, LocalTask, TrainBatch
from calfat_plugin.recipe.training import ByClassOptions
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import same_bits, tiny_experiment, tiny_images, tiny_task
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers import attacking
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.methods.helpers import SETTINGS, Asking, TinyNet, build_method, experiment, local_task, registry
from tests.methods.test_inner_attacks import build_inner
from tests.methods.test_reference_training import NOISE, REFERENCE, X, Y, tiny_model
from tests.methods.test_reference_training import SETTINGS as REFERENCE_SETTINGS
from tests.snapshot import TextSnapshot

THREAT = ThreatModel(eps="1/8", step_size="eps/4", steps=1)
IMAGES = ImageData(X, Y)


class Watched(FedPGD):
    """FedPGD that keeps the images of each step."""

    def __init__(self) -> None:
        plain = build_method("fedpgd")
        super().__init__(plain.options, plain.modifier)
        self.steps: list[TrainBatch] = []

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.steps.append(batch)
        return super().train_loss(batch)

    @property
    def changes(self) -> list[Tensor]:
        return [(batch.x_adv - batch.x_nat).detach() for batch in self.steps]


class Mixed(Watched):
    """Attacks every second example alone."""

    def attacked_rows(self, index: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
        return index % 2 == 0


# --- free adversarial training ----------------------------------------------------------------------------------------


def test_three_replays_equal_the_published_code() -> None:
    """From a change of zero; the images after the third step are those that the next mini-batch would start from."""
    kept: list[Any] = []

    class FromNothing(type(build_inner("free"))):  # type: ignore[misc]  # the class under test
        def begin_round(self, task: LocalTask) -> list[Tensor]:
            kept.append([torch.zeros_like(X)])
            found: list[Tensor] = kept[-1]
            return found

    method = Watched()
    inner = FromNothing(build_inner("free", replays=3).options)
    task = local_task(tiny_model(), IMAGES, settings=REFERENCE_SETTINGS, threat=ThreatModel(), inner=inner)
    update = method.fit(task)
    first, (change,) = method.steps[0].x_nat, kept[0]
    order = torch.tensor([next(i for i in range(2) if torch.equal(X[i], x)) for x in first]).argsort()
    weights = torch.cat([tensor.flatten() for tensor in update.state.values()])
    reference = REFERENCE["free"]
    assert (first + change)[order].flatten().tolist() == pytest.approx(reference["x_adv"], abs=1e-6)
    assert update.metrics["loss"] == pytest.approx(reference["loss"], abs=1e-6)
    assert weights.tolist() == pytest.approx(reference["weights"], abs=1e-6)


def test_a_change_goes_on_from_mini_batch_to_mini_batch_and_starts_anew_in_a_round() -> None:
    """Nine images in mini-batches of three and of six: what the first ones leave is the start of as many others."""
    method, inner = Watched(), build_inner("free", replays=2)
    settings = dataclasses.replace(SETTINGS, batch_size=3, epochs=1)
    grey = ImageData(torch.full((9, 1, 4, 4), 0.5), torch.zeros(9, dtype=torch.int64))
    task = local_task(TinyNet(), grey, settings=settings, threat=THREAT, inner=inner)
    method.fit(task)
    changes = method.changes
    assert len(changes) == 6
    assert 0 < changes[0].abs().max() <= 1 / 8  # the method's start: uniform noise
    assert changes[0].unique().numel() > 3
    for before, after in itertools.pairwise(changes):  # each a step of eps further, or at the edge
        moved, edge = (after - before).abs(), after.abs()
        assert (moved.isclose(torch.tensor(1 / 8), atol=1e-6) | edge.isclose(torch.tensor(1 / 8), atol=1e-6)).all()
    memory = [torch.full((2, 1, 4, 4), -1 / 16)]
    later = TrainBatch(task.model, grey.x[:3], grey.x[:3] + 1 / 16, grey.y[:3], method.steps[0].loss, task)
    seen: list[Tensor] = []

    def step(replayed: TrainBatch) -> Tensor:
        seen.append(replayed.x_adv.detach().clone())
        replayed.x_adv.sum().backward()
        return torch.zeros(())

    inner.take_steps(later, step, memory)
    assert [float((x - 0.5).mean()) for x in seen[0]] == [-1 / 16, -1 / 16, 1 / 16]
    assert [round(float((x - 0.5).mean()), 4) for x in seen[1]] == [1 / 16, 1 / 16, 1 / 8]  # projected
    assert [tuple(change.shape) for change in memory] == [(3, 1, 4, 4)]


def test_rows_that_a_mixture_leaves_clean_stay_clean() -> None:
    method = Mixed()
    method.fit(local_task(threat=THREAT, inner=build_inner("free", replays=3)))
    for batch, change in zip(method.steps, method.changes, strict=True):
        moved = change.flatten(1).abs().amax(dim=1) > 0
        assert torch.equal(moved, batch.index % 2 == 0)


def test_a_loss_that_leaves_the_images_out_is_said(snapshot: TextSnapshot) -> None:
    class Natural(Watched):
        def train_loss(self, batch: TrainBatch) -> Tensor:
            return batch.loss.cross_entropy(batch.logits_nat, batch.y).mean()

    with snapshot.raises(ModelError):
        Natural().fit(local_task(threat=THREAT, inner=build_inner("free")))


@pytest.mark.parametrize(
    ("trainer", "own"), [("fedawp", "backward"), ("fedrbn", "backward"), ("fedgairat", "counts_iterates")]
)
def test_what_free_leaves_no_place_for_is_refused(trainer: str, own: str, snapshot: TextSnapshot) -> None:
    discrete = {"weighting": "discrete"} if trainer == "fedgairat" else {}
    with snapshot.raises(CalfatError, trainer, own):
        experiment({"name": trainer, **discrete}, calfat__threat__inner="free")


# --- ATAS -------------------------------------------------------------------------------------------------------------


def begun(inner: InnerAttack, **task: Any) -> Any:
    return inner.begin_round(local_task(tiny_model(), IMAGES, threat=ThreatModel(), **task))


def crafted(inner: InnerAttack, memory: Any) -> Tensor:
    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, Y, reduction="sum")

    parts = tiny_model(), X, X, loss, ThreatModel()
    return inner.craft(InnerTask(*parts, memory=memory, examples=Examples(torch.arange(2))))


STATE = {"change": NOISE / 1.5 * (8 / 255), "squares": torch.zeros(2)}


def test_two_steps_equal_the_published_code() -> None:
    """c is of one loss here, and of the mean of two there; the squares likewise."""
    inner, reference = build_inner("atas", c=1.0), REFERENCE["atas"]
    memory = begun(inner, client_state=STATE, round=6)
    for step in range(2):
        x_adv = crafted(inner, memory)
        assert x_adv.flatten().tolist() == pytest.approx(reference["x_adv"][step], abs=1e-6)
        squares = [4 * square for square in reference["squares"][step]]
        assert memory.squares.tolist() == pytest.approx(squares, rel=1e-5)
    kept = inner.end_round(memory)
    assert kept["change"].dtype == torch.float16
    assert kept["change"].flatten().tolist() == pytest.approx((x_adv - X).flatten().tolist(), abs=2e-5)
    assert torch.equal(kept["squares"], memory.squares)


def test_warm_up_takes_steps_of_eps_and_averages_nothing() -> None:
    inner = build_inner("atas", warmup=5)
    memory = begun(inner, client_state=STATE, round=5)
    assert crafted(inner, memory).flatten().tolist() == pytest.approx(REFERENCE["atas"]["constant"], abs=1e-6)
    assert memory.squares.tolist() == [0, 0]
    assert begun(inner, round=6).adaptive


def test_the_average_of_squares_keeps_the_share_of_its_decay() -> None:
    """Not at a decay of 0.5, at which the other share is as large."""
    inner, found = build_inner("atas", momentum=0.25), []
    for before in (0.0, 8.0):
        memory = begun(inner, client_state={**STATE, "squares": torch.full((2,), before)}, round=6)
        crafted(inner, memory)
        found.append(memory.squares)
    assert (found[1] - found[0]).tolist() == pytest.approx([2.0, 2.0], abs=1e-5)


def test_steps_of_no_length_between_the_bounds_are_refused() -> None:
    with pytest.raises(CalfatError, match=r"^shortest is 2; expected at most longest, 1\.75\.$"):
        build_inner("atas", shortest=2)


def test_when_perturbations_are_drawn_anew() -> None:
    """By seed, round and client; in each tenth round but the last, and in a client's first one."""
    inner, settings = build_inner("atas"), dataclasses.replace(SETTINGS, num_rounds=20)
    fresh = begun(inner, settings=settings, round=3).change
    assert 0.9 * 8 / 255 < fresh.abs().max() <= 8 / 255
    assert (fresh < 0).any()
    assert torch.equal(fresh, begun(inner, settings=settings, round=3).change)
    for other in ({"round": 4}, {"client": 1, "round": 3}, {"seed": 1, "round": 3}):
        assert not torch.equal(fresh, begun(inner, settings=settings, **other).change)
    for round, kept in ((9, True), (10, False), (11, True), (20, True)):
        memory = begun(inner, settings=settings, round=round, client_state={**STATE, "squares": torch.ones(2)})
        assert torch.equal(memory.change, STATE["change"]) == kept
        assert memory.squares.tolist() == [1, 1]


def test_what_is_kept_is_cut_and_put_back_as_its_image_was_augmented() -> None:
    data, augment = tiny_images(), Augmentation(crop_padding=2, flip=True)
    padded = nn.functional.pad(data.x, (2, 2, 2, 2))
    for x, _, examples in batches(data, 5, torch.device("cpu"), generator=torch.Generator(), augment=augment):
        assert torch.equal(examples.cut(padded, *x.shape[2:]), x)
        kept = torch.full_like(padded, -1)
        examples.put_back(kept, x)
        assert torch.equal(examples.cut(kept, *x.shape[2:]), x)
        assert (kept == -1).sum() == kept.numel() - x.numel()
        half = examples.rows(slice(2))
        assert torch.equal(half.cut(padded, *x.shape[2:]), x[:2])
    for x, _, examples in batches(data, 5, torch.device("cpu")):
        kept = torch.zeros_like(data.x)
        examples.put_back(kept, x)
        assert torch.equal(kept[examples.index], x)


def test_a_round_moves_every_examples_perturbation_where_its_image_was_cut_out() -> None:
    data, inner = tiny_images(), build_inner("atas")
    task = tiny_task(data=data, threat=THREAT, inner=inner, augment=Augmentation(crop_padding=1), round=6)
    update = Watched().fit(task)
    assert {name: tuple(kept.shape) for name, kept in update.client_state.items()} == {
        "inner/change": (len(data), 1, 6, 6),
        "inner/squares": (len(data),),
    }
    assert (update.client_state["inner/squares"] > 0).all()
    own = {name: tensor.clone() for name, tensor in update.client_state.items()}
    again = Watched()
    following = dataclasses.replace(task, round=7, client_state={**own, "method/a": X, "scaffold/c": X})
    later = again.fit(following)
    assert same_bits(following.client_state, {**own, "method/a": X, "scaffold/c": X})  # copied before it is written
    assert not same_bits(later.client_state, own)


def test_what_was_drawn_stays_where_the_ball_is_a_point() -> None:
    """As in the first round of a warm-up of eps: at the image itself a divergence has no gradient."""
    settings = dataclasses.replace(SETTINGS, num_rounds=10)
    work: dict[str, Any] = {"by_class": ByClassOptions(alpha=0, warmup=0.5), "settings": settings, "threat": THREAT}
    inner, method = build_inner("atas"), Watched()
    drawn = inner.begin_round(local_task(TinyNet(), **work)).change
    kept = method.fit(local_task(inner=inner, **work)).client_state["inner/change"]
    assert all(not change.any() for change in method.changes)
    assert torch.equal(kept, drawn.half())
    state, method = {"inner/change": kept, "inner/squares": torch.zeros(len(kept))}, Watched()
    later = method.fit(local_task(inner=inner, round=2, client_state=state, **work)).client_state["inner/change"]
    assert 0 < float(later.abs().max()) <= 0.2 / 8 + 1e-4  # a fifth of eps: they follow the ball from here on
    assert float(method.changes[0].abs().max()) > 0


def test_the_full_gradient_moves_no_memory() -> None:
    asking = Asking()
    for name in ("atas", "free"):
        plain, asked = (
            Watched().fit(local_task(threat=THREAT, inner=build_inner(name), round=6, correction=correction))
            for correction in (LocalCorrection(), asking)
        )
        assert same_bits(plain.state, asked.state)
        assert same_bits(plain.client_state, asked.client_state)
    assert not same_bits(*asking.gradients)  # each with the images of its attack


def test_parts_of_a_mini_batch_and_of_a_mixture_remember_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    task = local_task(threat=THREAT, inner=build_inner("atas"), round=6)
    squares = Mixed().fit(task).client_state["inner/squares"]
    assert torch.equal(squares > 0, torch.arange(len(squares)) % 2 == 0)
    whole = Watched().fit(local_task(threat=THREAT, inner=build_inner("atas"), round=6)).client_state
    monkeypatch.setattr(attacking, "micro_batches", lambda count, rows: [slice(0, 1), slice(1, count)])
    parts = Watched().fit(local_task(threat=THREAT, inner=build_inner("atas"), round=6)).client_state
    for name, kept in whole.items():
        assert torch.allclose(parts[name].float(), kept.float(), atol=1e-5)


# --- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["atas", "free", "sora"])
@pytest.mark.parametrize(
    ("trainer", "aggregator"),
    [("calfat", "scaffold"), ("fedtrades", "sfat"), ("fedmart", "median"), ("mixfat", "scaffold")],
)
def test_with_methods_and_aggregators(inner: str, trainer: str, aggregator: str) -> None:
    """Two rounds, and the same bits when they are resumed."""
    threat = {"eps": "0.1", "inner": inner}
    check_federation(tiny_experiment(registry(), trainer=trainer, aggregator=aggregator, threat=threat))
