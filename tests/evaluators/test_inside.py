"""Attacks from inside by hand, on models of one pixel: who makes the images, whom they are counted on, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import PluginError, UpdateError
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.evaluators.clients import Internal, Personalised, PersonalisedOptions
from calfat_plugin.evaluators.gradient import PGDOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.threat import ThreatModel
from tests.snapshot import TextSnapshot

MakeTask = Callable[..., EvaluationTask]
ONE_STEP = ThreatModel(eps=Fraction(1, 10), step_size="eps")  # type: ignore[arg-type]
#: Two images that the global model gets wrong: the first of class 0, the last of class 1.
IMAGES = ImageData(
    torch.tensor([0.45, 0.55, 0.65, 0.75, 0.35, 0.92]).reshape(6, 1, 1, 1), torch.tensor([0, 0, 0, 0, 1, 1])
)


class Pixel(nn.Module):
    """Class 0 where sign * (pixel - edge) > 0, else class 1."""

    def __init__(self, sign: float, edge: float) -> None:
        super().__init__()
        self.sign, self.edge = nn.Parameter(torch.tensor(float(sign))), nn.Parameter(torch.tensor(edge))

    def forward(self, x: Tensor) -> Tensor:
        logit = self.sign * (x.flatten(1) - self.edge)
        return torch.cat([logit, -logit], dim=1)


class NoGradient(Pixel):
    """Finite answers on clean images, and no number of a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.nan if x.requires_grad else 1.0)


@dataclasses.dataclass
class Clients:
    """Those with these models; fine-tuning gives the second of each pair."""

    models: Mapping[int, tuple[nn.Module, nn.Module]]
    attackers: tuple[int, ...] = ()
    counts: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    epochs: list[int] = dataclasses.field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.models)

    @property
    def honest(self) -> tuple[int, ...]:
        return tuple(client for client in self.models if client not in self.attackers)

    def class_counts(self, client: int) -> tuple[int, ...]:
        return self.counts[client]

    def model(self, client: int) -> nn.Module:
        return self.models[client][0].eval()

    def fine_tuned(self, client: int, epochs: int) -> nn.Module:
        self.epochs.append(epochs)
        if client == 9:
            raise UpdateError("client 9 diverged")
        return self.models[client][1].eval()


GLOBAL = Pixel(1, 0.5)  # right clean: images 1 to 4
FIRST, SECOND = Pixel(1, 0.4), Pixel(-1, 0.8)  # right clean: 0 to 4; 0 to 3 and 5
FROM_FIRST = [0.35, 0.45, 0.55, 0.65, 0.45, 1.0]  # class 0 goes down, class 1 up, by eps
FROM_SECOND = [0.55, 0.65, 0.75, 0.85, 0.25, 0.82]


def attacked(make_task: MakeTask, clients: Clients, **changes: Any) -> tuple[Any, Tensor]:
    """(the result of ``internal`` of one step from the clean image, the images that it hands out)."""
    handed = torch.zeros(len(IMAGES), 1, 1, 1)

    def keep(where: Tensor, x_adv: Tensor) -> None:
        handed[where] = x_adv

    task = make_task(GLOBAL.eval(), IMAGES, threat=ONE_STEP, num_classes=2, clients=lambda: clients, on_examples=keep)
    task = dataclasses.replace(task, **changes)
    return Internal(PGDOptions(steps=1, start="x")).evaluate(task, "internal"), handed.flatten()


def test_the_matrix_by_hand(make_task: MakeTask) -> None:
    """Rows: who makes the images. Columns: the global model, then each client's; right clean and at the image."""
    found, handed = attacked(make_task, Clients({3: (FIRST, FIRST), 7: (SECOND, SECOND)}))
    assert found.details["clients"] == [3, 7]
    assert found.details["natural"] == [4 / 6, 5 / 6, 5 / 6]
    assert found.details["matrix"] == [[3 / 6, 3 / 6, 5 / 6], [4 / 6, 5 / 6, 4 / 6]]
    assert found.metrics == {"worst": 3 / 6, "mean": pytest.approx((3 + 5 + 4 + 5) / 24)}
    assert (found.accuracy, found.accuracy_release) == (3 / 6, 3 / 6)  # images 2, 3 and 4 withstand both
    assert found.per_class == (2 / 4, 1 / 2)
    assert (found.settings["attack"], found.settings["eps"]) == ("internal", "0.1")
    assert "unusable" not in found.details
    # The first client breaks 0, 1 and 5; the second 5 alone, and image 0, which it makes right, is handed out broken.
    assert handed.tolist() == pytest.approx([*FROM_FIRST[:5], FROM_SECOND[5]])


def test_progress_is_that_of_all_clients_models_together(make_task: MakeTask) -> None:
    calls: list[tuple[int, int, int]] = []
    clients = Clients({3: (FIRST, FIRST), 7: (SECOND, SECOND)})
    attacked(make_task, clients, on_progress=lambda *numbers: calls.append(numbers))
    assert calls == [(6, 12, 6), (12, 12, 6)]  # three of six images withstand the first


def test_an_image_counts_if_the_global_model_withstands_every_client(make_task: MakeTask) -> None:
    """Alone, the second client leaves more: the headline is that of all of them, image by image."""
    found, handed = attacked(make_task, Clients({7: (SECOND, SECOND)}))
    assert (found.accuracy, found.accuracy_release) == (4 / 6, 5 / 6)
    assert found.metrics == {"worst": 4 / 6, "mean": 4 / 6}  # its own images do not count
    assert handed.tolist() == pytest.approx(FROM_SECOND)


def test_zero_gradients_are_those_of_the_client_that_has_most(make_task: MakeTask) -> None:
    flat = Pixel(0, 0.5)
    found, _ = attacked(make_task, Clients({3: (FIRST, FIRST), 5: (flat, flat), 7: (SECOND, SECOND)}))
    assert found.details["zero_gradients"] == len(IMAGES)


def test_a_client_of_nan_is_left_out_and_named(make_task: MakeTask) -> None:
    broken = Pixel(float("nan"), 0.5)
    found, _ = attacked(make_task, Clients({0: (broken, broken), 7: (SECOND, SECOND)}))
    assert (found.details["clients"], found.details["matrix"]) == ([7], [[4 / 6, 4 / 6]])
    assert list(found.details["unusable"]) == [0]
    assert "1 of 1 values of its tensor 'sign' are not finite" in found.details["unusable"][0]
    assert "warnings" not in found.details


def test_where_no_client_has_a_usable_model_there_is_no_number(make_task: MakeTask) -> None:
    broken = Pixel(float("nan"), 0.5)
    found, _ = attacked(make_task, Clients({0: (broken, broken), 7: (broken, broken)}), on_examples=lambda *_: None)
    assert (found.accuracy, found.metrics) == (None, {})
    assert found.not_run == "no client's model gave finite answers on clean images, so there was nothing to attack with"
    assert list(found.details["unusable"]) == [0, 7]
    assert [alarm.code for alarm in find_alarms([found])] == ["not-run"]


def test_where_no_client_gives_a_finite_point_there_is_no_number(make_task: MakeTask) -> None:
    blind = NoGradient(1, 0.4)
    threat = dataclasses.replace(ONE_STEP, norm="l2")
    found, _ = attacked(make_task, Clients({0: (blind, blind)}), threat=threat)
    assert found.accuracy is None
    assert found.not_run == "no client's model gave a finite point for any image, so there was nothing to attack with"


@pytest.mark.parametrize("norm", ["linf", "l2"])  # the sign of nan is 0, its unit vector nan
def test_a_client_cannot_end_the_evaluation_of_the_others(make_task: MakeTask, norm: Any) -> None:
    """Points that are not finite become clean ones, answers that are not finite are wrong."""

    class Exploding(Pixel):
        def forward(self, x: Tensor) -> Tensor:
            moved = bool((x.flatten()[0] - 0.45).abs() > 0.01)
            return super().forward(x) * (torch.inf if x.requires_grad or moved else 1.0)

    exploding = Exploding(1, 0.4)
    clients, threat = (
        Clients({0: (exploding, exploding), 7: (SECOND, SECOND)}),
        dataclasses.replace(ONE_STEP, norm=norm),
    )
    found, _ = attacked(make_task, clients, threat=threat)
    assert found.details["matrix"][0][0] == 4 / 6  # its images are the clean ones
    assert found.details["matrix"][1] == [4 / 6, 0.0, 4 / 6]
    assert found.accuracy == 4 / 6


# --- personalised -----------------------------------------------------------------------------------------------------


def personalised(make_task: MakeTask, clients: Clients, **changes: Any) -> Any:
    task = make_task(GLOBAL.eval(), IMAGES, threat=ONE_STEP, num_classes=2, clients=lambda: clients)
    task = dataclasses.replace(task, **changes)
    return Personalised(PersonalisedOptions(steps=1, start="x", epochs=3)).evaluate(task, "personalised")


def test_each_client_on_its_own_label_mix_by_hand(make_task: MakeTask) -> None:
    """FIRST: clean 4/4 and 1/2, attacked 3/4 and 0/2. SECOND: clean 4/4 and 1/2, attacked 3/4 and 1/2."""
    clients = Clients(
        {3: (FIRST, SECOND), 5: (FIRST, FIRST), 7: (SECOND, FIRST)}, attackers=(5,), counts={3: (1, 0), 7: (1, 3)}
    )
    found = personalised(make_task, clients)
    assert found.details["clients"] == {
        3: {"own_natural": 1.0, "own_robust": 3 / 4, "tuned_natural": 1.0, "tuned_robust": 3 / 4},
        7: {
            "own_natural": (1 + 3 / 2) / 4,
            "own_robust": (3 / 4 + 3 / 2) / 4,
            "tuned_natural": (1 + 3 / 2) / 4,
            "tuned_robust": (3 / 4 + 0) / 4,
        },
    }
    assert clients.epochs == [3, 3]
    assert found.metrics == {
        "own_natural": (1 + 5 / 8) / 2,
        "own_natural_worst": 5 / 8,
        "own_robust": (3 / 4 + 9 / 16) / 2,
        "own_robust_worst": 9 / 16,
        "tuned_natural": (1 + 5 / 8) / 2,
        "tuned_natural_worst": 5 / 8,
        "tuned_robust": (3 / 4 + 3 / 16) / 2,
        "tuned_robust_worst": 3 / 16,
    }
    assert found.accuracy == 3 / 6  # of the global model, as pgd finds: images 2, 3 and 4
    assert (found.settings["attack"], found.settings["epochs"]) == ("personalised", 3)


def test_what_diverged_counts_nothing_and_is_named(make_task: MakeTask) -> None:
    broken = Pixel(float("nan"), 0.5)
    found = personalised(make_task, Clients({9: (broken, broken)}, counts={9: (1, 1)}))
    row = found.details["clients"][9]
    assert [row[name] for name in ("own_natural", "own_robust", "tuned_natural", "tuned_robust")] == [0.0] * 4
    assert row["tuned_failed"] == "client 9 diverged"
    assert row["own_failed"].startswith("the model returned nan or inf for clean images: ")
    assert found.metrics["own_robust_worst"] == 0.0


def test_a_client_without_test_images_of_its_classes_is_in_no_mean(make_task: MakeTask) -> None:
    clients = Clients({3: (FIRST, FIRST), 7: (SECOND, SECOND)}, counts={3: (0, 1), 7: (1, 0)})
    only = ImageData(IMAGES.x[:4], IMAGES.y[:4])
    task = make_task(GLOBAL.eval(), only, threat=ONE_STEP, num_classes=2, clients=lambda: clients)
    found = Personalised(PersonalisedOptions(steps=1, start="x")).evaluate(task, "personalised")
    assert found.details["clients"][3] == dict.fromkeys(found.details["clients"][3])  # None everywhere
    assert found.metrics["own_natural"] == found.metrics["own_natural_worst"] == 1.0


def test_without_honest_clients_only_the_global_model_is_measured(make_task: MakeTask, snapshot: TextSnapshot) -> None:
    found = personalised(make_task, Clients({3: (FIRST, FIRST)}, attackers=(3,)))
    assert (found.accuracy, found.metrics, found.details["clients"]) == (3 / 6, {}, {})
    with snapshot.raises(PluginError):  # and without an entry that says that it looks at clients there are none
        make_task(GLOBAL.eval(), IMAGES, threat=ONE_STEP, num_classes=2).clients()
