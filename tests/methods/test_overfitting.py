"""Training that has overfitted an attack of one step is noticed: by the client on a few images, by the server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.federation.outliers import Alignments
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.recipe.training import ByClassOptions
from calfat_plugin.results import ALIGNMENT, RoundRecord
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.methods.helpers import SETTINGS, Federation, build_method, experiment, local_task, train
from tests.methods.test_inner_attacks import build_inner
from tests.report.made import record

EPS = 1 / 8


class Bent(nn.Module):
    """A margin with the gradient (-1, -slope) at grey images, on the first and the second half of the pixels.

    The loss climbs with both, and one eps brighter the first half's gradient has turned around.
    """

    def __init__(self, slope: float = 2.0) -> None:
        super().__init__()
        self.slope, self.weight = slope, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x.flatten(1) - 0.5).chunk(2, dim=1)
        margin = (first.square() / EPS - first).sum(dim=1) - self.slope * second.sum(dim=1) + self.weight
        return torch.stack([margin, torch.zeros_like(margin)], dim=1)


def alignment(
    model: nn.Module, images: int | Tensor = 12, method: Any = None, labels: Tensor | None = None, **task: Any
) -> float | None:
    """What a client says after a round of one batch; its labels are 0, unless they are given."""
    x = torch.full((images, 1, 4, 4), 0.5) if isinstance(images, int) else images
    images = len(x)
    data = ImageData(x, torch.zeros(images, dtype=torch.int64) if labels is None else labels)
    settings = dataclasses.replace(SETTINGS, epochs=1, batch_size=images, learning_rate=1e-9, weight_decay=0.0)
    usual = {
        "settings": settings,
        "round": 3,
        "threat": ThreatModel(eps=str(EPS), step_size="eps", steps=1),
        "class_counts": torch.tensor([images, 0]),
        "inner": build_inner("rs-fgsm"),
    }
    found: float | None = train(
        method or build_method("fedpgd"), local_task(model, data, **{**usual, **task})
    ).metrics.get(ALIGNMENT)
    return found


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0, 2.0])
def test_it_is_the_cosine_of_the_gradients_before_and_after_a_step_of_eps(slope: float) -> None:
    """Of (1, slope) and (-1, slope); the length of neither counts."""
    assert alignment(Bent(slope)) == pytest.approx((slope**2 - 1) / (slope**2 + 1), abs=1e-5)


def test_an_image_without_a_gradient_has_no_direction() -> None:
    """Three of twelve images are black, and nothing moves the margin there; nine of them leave too few."""

    class Blind(Bent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.where(x.flatten(1).mean(dim=1).view(-1, 1, 1, 1) > 0.2, x, 0.5))

    for black, expected in ((3, pytest.approx(0.6, abs=1e-5)), (9, None)):
        grey = torch.full((12, 1, 4, 4), 0.5)
        grey[:black] = 0
        assert alignment(Blind(), grey) == expected


@pytest.mark.parametrize(("wrong", "answers", "measured"), [(6, 1, True), (7, 1, False), (7, 2, True), (12, 1, False)])
def test_a_model_that_has_one_answer_wrong_for_most_has_overfitted_nothing(
    wrong: int, answers: int, measured: bool
) -> None:
    """Of twelve images; one that is a little brighter in the second half of its pixels gets the other answer."""
    grey = torch.full((12, 1, 4, 4), 0.5)
    if answers == 2:
        grey[0, :, 2:] += 0.01
    labels = (torch.arange(12) < wrong).long()
    found = alignment(Bent(), grey, labels=labels, class_counts=torch.tensor([12 - wrong, wrong]))
    assert (found is not None) == measured


@pytest.mark.parametrize(
    ("task", "measured"),
    [
        ({}, True),
        ({"round": 1}, True),
        ({"images": 8}, True),
        ({"images": 7}, False),
        ({"images": 17, "settings": dataclasses.replace(SETTINGS, epochs=1, batch_size=12)}, False),  # the last 5
        ({"threat": ThreatModel(eps="1/8", step_size="1/16", steps=2)}, True),
        ({"threat": ThreatModel(eps="1/8", step_size="1/16", steps=3)}, False),
        ({"inner": build_inner("free", replays=1)}, True),
        ({"method": build_method("standard")}, False),
    ],
)
def test_when_it_is_measured(task: dict[str, Any], measured: bool) -> None:
    assert (alignment(Bent(), **task) is not None) == measured


def test_the_step_is_as_long_as_that_of_training() -> None:
    """In the third of ten rounds, of two epochs each, with a warm-up of five, 0.4 eps: (1, 1) becomes (0.2, 1)."""
    settings = dataclasses.replace(SETTINGS, epochs=2, batch_size=12, learning_rate=1e-9, weight_decay=0.0)
    found = alignment(Bent(1.0), by_class=ByClassOptions(alpha=0, warmup=0.5), settings=settings)
    assert found == pytest.approx(1.2 / (2 * 1.04) ** 0.5, abs=1e-5)


def test_the_step_stays_among_the_pixels() -> None:
    """White images that the loss would have brighter: the first half of their pixels cannot move."""

    class Flipped(Bent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flip(1) + torch.tensor([5.0, 0.0])  # right, all the same

    assert alignment(Flipped(), torch.ones(12, 1, 4, 4)) == pytest.approx(1, abs=1e-6)


def test_a_look_draws_nothing_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that draws whenever it is asked trains on the same numbers, whether somebody looks or not."""
    trained_on: list[float] = []

    class Drawing(Bent):
        def forward(self, x: Tensor) -> Tensor:
            drawn = float(torch.rand(()))
            if self.training:
                trained_on.append(drawn)
            return super().forward(x)

    def numbers() -> list[float]:
        trained_on.clear()
        torch.manual_seed(0)
        alignment(Drawing())
        return list(trained_on)

    looked = numbers()
    monkeypatch.setattr("calfat_plugin.trainers.loop.alignment_of", lambda work, batch: None)
    assert looked == numbers() != []


def test_only_images_that_training_attacks_are_looked_at() -> None:
    class Mixed(FedPGD):
        def attacked_rows(self, index: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
            return index < 7

    plain = build_method("fedpgd")
    assert alignment(Bent(), method=Mixed(plain.options, plain.modifier)) is None


def test_logits_are_those_that_the_attack_sees() -> None:
    """The softmax is saturated, and no gradient is left, but with this prior there is one."""

    class Sure(Bent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor([25.0, 0.0])

    method, counts = build_method("fedpgd", "calibrated"), torch.tensor([12, 10**12])
    assert alignment(Sure()) is None
    assert alignment(Sure(), method=method, class_counts=counts) is not None


def test_the_server_names_the_clients() -> None:
    """By the mean of their last four rounds: less than 0.11."""
    server = Alignments()
    assert [server.add({0: 0.2, 3: alignment}) for alignment in (0.9, 0.0, 0.1, 0.1)] == [()] * 4
    assert server.add({0: 0.2}) == ()  # client 3 did not train
    assert server.add({0: 0.2, 3: 0.23}) == (
        "overfitted-attack: the loss of client 3 turns within one step of eps (cosine of its gradients before and "
        "after, mean of 4 rounds 0.11)",
    )
    assert server.add({0: 0.2, 3: 0.02}) == ()
    assert server.add({3: float("nan")}) == ()


def with_alignments(alignments: dict[int, float]) -> RoundRecord:
    return dataclasses.replace(record(1, {}), alignments=alignments)


def test_a_resumed_server_goes_on_from_the_record() -> None:
    behind = [with_alignments({3: 0.01}) for _ in range(3)]
    server = Alignments()
    server.read([*behind, with_alignments({0: 0.01}), with_alignments({})])
    assert server.add({0: 0.01}) == ()
    assert len(server.add({0: 0.01, 3: 0.01})) == 1


def test_a_resumed_run_goes_on_from_its_rounds() -> None:
    """Of four rounds three are in the record, with the lowest values that there are."""
    run = experiment("fedpgd", calfat__threat__inner="n-fgsm")
    first = Federation(run)
    first.play()
    for behind in ([], [with_alignments({0: -1.0, 1: -1.0})] * 3):
        resumed = Federation(run)
        resumed.server.begin(first.snapshot(), behind)
        resumed.worker.client_states.update(first.snapshot().client_states)
        alarms = resumed.play().alarms
        assert bool(behind) == any(alarm.startswith("overfitted-attack") for alarm in alarms)
