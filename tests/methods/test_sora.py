"""SORA by hand: its step, the alignment that sets its length, and what a client keeps of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.entries import TrainerEntry
from calfat_plugin.errors import RecipeError
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.inner_attacks.sora import SORA
from calfat_plugin.interfaces import ClientLoss, InnerAttack, InnerTask, LocalTask, TrainBatch
from calfat_plugin.recipe.training import AWPOptions
from calfat_plugin.testing import builtin_registry, check_inner_attack
from calfat_plugin.testing.tiny import same_bits, tiny_experiment, tiny_images
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers import attacking
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.methods.helpers import SETTINGS, Asking, Federation, TinyNet, build_method, experiment, local_task, train
from tests.methods.test_inner_attacks import build_inner

THREAT = ThreatModel(eps="1/8", step_size="eps/4", steps=1)
GREY = torch.full((2, 1, 1, 2), 0.5)
DRAWN = torch.tensor([[1.0, 0.5], [0.25, 0.0]]).view(2, 1, 1, 2)
BEFORE = torch.tensor([[2.0, -1.0], [4.0, 3.0]]).view(2, 1, 1, 2)  # the gradient of the attack's loss


def begun(inner: InnerAttack, **task: Any) -> Any:
    return inner.begin_round(local_task(TinyNet(), threat=THREAT, **task))


def crafted(inner: InnerAttack, memory: Any, threat: ThreatModel = THREAT, start: Tensor = GREY) -> Tensor:
    def loss(logits: Tensor) -> Tensor:
        return (BEFORE.flatten(1) * logits).sum()

    return inner.craft(InnerTask(nn.Flatten(), GREY, start, loss, threat, memory=memory, drawn=DRAWN))


def seen(
    after: list[list[float]], attacked: Tensor | None = None, threat: ThreatModel = THREAT
) -> tuple[TrainBatch, Tensor]:
    """A mini-batch and the gradient of its mean loss."""
    task = local_task(TinyNet(), threat=threat)
    gradient = torch.tensor(after).view(-1, 1, 1, 2)
    x = torch.zeros_like(gradient)
    loss = build_method("fedpgd").bind_loss(task.class_counts)
    return TrainBatch(task.model, x, x, x[:, 0, 0, 0].long(), loss, task, attacked), gradient


@pytest.mark.parametrize(
    ("alignment", "length"),
    [(0.99, 1 / 4), (1.0, 1 / 4), (0.98, 1 / 4), (0.96, 1 / 8), (0.8, 1 / 40), (0.0, 1 / 200), (-1.0, 1 / 400)],
)
def test_a_step_has_a_random_length_up_to_that_of_the_alignment(alignment: float, length: float) -> None:
    """2 eps min(1, 0.02 / (1 - alignment)), along the sign, from the start, beyond the ball."""
    inner = build_inner("sora")
    memory = begun(inner, client_state={"alignment": torch.tensor(alignment)})
    start = GREY + 1 / 16
    expected = start + length * torch.tensor([[1.0, -0.5], [0.25, 0.0]]).view(2, 1, 1, 2)
    assert torch.allclose(crafted(inner, memory, start=start), expected, atol=1e-6)


def test_its_options_set_the_length_of_the_first_step() -> None:
    """eps min(1, 0.1 / (1 - 0.5)), a fifth of 1/8."""
    inner = build_inner("sora", first=0.5, slack=0.1, longest=1)
    expected = GREY + 1 / 40 * torch.tensor([[1.0, -0.5], [0.25, 0.0]]).view(2, 1, 1, 2)
    assert torch.allclose(crafted(inner, begun(inner)), expected, atol=1e-6)


def test_its_gradient_is_that_at_the_start() -> None:
    """The loss is flat at the clean images, and climbs away from them."""
    inner, start = build_inner("sora"), GREY + torch.tensor([1 / 16, -1 / 16]).view(1, 1, 1, 2)

    def loss(logits: Tensor) -> Tensor:
        return (logits - 0.5).square().sum()

    x_adv = inner.craft(InnerTask(nn.Flatten(), GREY, start, loss, THREAT, memory=begun(inner), drawn=DRAWN))
    expected = start + 1 / 4 * torch.tensor([[1.0, -0.5], [0.25, 0.0]]).view(2, 1, 1, 2)
    assert torch.allclose(x_adv, expected.clamp(0, 1), atol=1e-6)


def test_images_are_clipped_to_the_pixels_and_reach_three_budgets() -> None:
    inner, wide = build_inner("sora"), dataclasses.replace(THREAT, eps="0.4")
    assert crafted(inner, begun(inner), wide).flatten().tolist() == pytest.approx([1.0, 0.1, 0.7, 0.5])
    assert float(inner.reach(THREAT).eps) == 3 / 8
    assert float(build_inner("sora", longest=1).reach(THREAT).eps) == 2 / 8


def test_start_and_lengths_are_uniform_and_drawn_from_the_stream_alone() -> None:
    inner, x = build_inner("sora"), torch.full((64, 1, 8, 8), 0.5)
    stream = torch.Generator().manual_seed(1)
    start, drawn = inner.start(x, THREAT, stream), inner.draw(x, THREAT, stream)
    assert start is not None
    assert drawn is not None
    assert 0.12 < (start - x).abs().max() <= 1 / 8
    assert (0 <= drawn.min() < 0.01, 0.99 < drawn.max() < 1) == (True, True)
    assert float(torch.corrcoef(torch.stack([(start - x).flatten(), drawn.flatten()]))[0, 1]) < 0.1
    assert not torch.equal(drawn, inner.draw(x, THREAT, stream))  # type: ignore[arg-type]  # it is a tensor


@pytest.mark.parametrize(
    ("options", "after", "found"),
    [
        # <sign g, g'> / ||g||_1 of (2, -1): (1 + 0.5) / 3; of (4, 3): (2 - 1) / 7; g' is twice the mean's
        ({}, [[0.5, -0.25], [1.0, -0.5]], (1 / 2 + 1 / 7) / 2),
        ({}, [[10.0, -10.0], [10.0, 10.0]], 1.0),  # clamped, the mean of the batch
        ({}, [[-10.0, 10.0], [-10.0, -10.0]], -1.0),
        ({}, [[1.5, -1.5], [-1.75, -1.75]], 1 / 2),  # of 2 and -1: it is the mean that is clamped
        # cosines: of (2, -1) with (1, -0.5), and of (4, 3) with (2, -1)
        ({"alignment": "cosine"}, [[0.5, -0.25], [1.0, -0.5]], (1 + 5 / (5 * 5**0.5)) / 2),
        ({"alignment": "cosine"}, [[0.0, 0.0], [4.0, 3.0]], 1 / 2),
    ],
)
def test_the_alignment_averages_what_the_step_leaves_in_the_images(
    options: dict[str, Any], after: list[list[float]], found: float
) -> None:
    """0.95 of it stays, from 0.99 at first, and the next mini-batch sees it."""
    inner = build_inner("sora", **options)
    memory = begun(inner)
    crafted(inner, memory)
    inner.after_step(*seen(after), memory)
    assert float(memory.alignment) == pytest.approx(0.95 * 0.99 + 0.05 * found, abs=1e-6)
    before = float(memory.alignment)
    inner.after_step(*seen(after), memory)  # no attack came before this step
    assert float(memory.alignment) == before
    crafted(inner, memory)
    batch, _ = seen(after)
    inner.after_step(batch, None, memory)  # nor did this one's loss depend on the images
    crafted(inner, memory)
    inner.after_step(*seen(after), memory)
    assert float(memory.alignment) == pytest.approx(0.95 * before + 0.05 * found, abs=1e-6)


@pytest.mark.parametrize(("norm", "found"), [("l2", (1 / 2 + 1 / 5) / 2), ("l1", (1 / 2 + 1 / 2) / 2)])
def test_the_slope_is_along_the_step_of_the_norm(norm: Any, found: float) -> None:
    """l2: g . g' / ||g||^2 of (2, -1) with (1, -1/2), and of (4, 3) with (2, -1); l1: of the first values alone."""
    inner, threat = build_inner("sora"), ThreatModel(norm, eps="1/8")
    memory = begun(inner)
    crafted(inner, memory, threat)
    inner.after_step(*seen([[0.5, -0.25], [1.0, -0.5]], threat=threat), memory)
    assert float(memory.alignment) == pytest.approx(0.95 * 0.99 + 0.05 * found, abs=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_slope_of_the_loss_that_the_attack_climbed_is_one(norm: Any) -> None:
    """Also of images of more than a hundred values, of which a step in l1 moves several."""
    inner, threat = build_inner("sora", decay=0, first=0.5), ThreatModel(norm, eps="1/8")
    gradient = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    task, memory = local_task(TinyNet(), threat=threat), begun(inner)
    batch = TrainBatch(task.model, gradient, gradient, torch.zeros(4), ClientLoss(), task)
    for turned, found in ((1.0, 1.0), (0.25, 0.25), (-0.5, -0.5)):
        memory.gradients = [gradient[:1], gradient[1:]]
        inner.after_step(batch, turned * gradient / 4, memory)  # a step's loss is the mean
        assert float(memory.alignment) == pytest.approx(found, abs=1e-5)


def test_rows_that_a_mixture_leaves_clean_do_not_count() -> None:
    """Four images, of whose mean loss the second and the fourth have a gradient that is four times theirs."""
    inner = build_inner("sora")
    memory = begun(inner)
    crafted(inner, memory)
    after = [[9.0, 9.0], [0.25, -0.125], [9.0, 9.0], [0.5, -0.25]]
    inner.after_step(*seen(after, torch.tensor([False, True, False, True])), memory)
    assert float(memory.alignment) == pytest.approx(0.95 * 0.99 + 0.05 * (1 / 2 + 1 / 7) / 2, abs=1e-6)


def fitted(method: str = "fedpgd", **task: Any) -> Any:
    """Smoothed labels keep the training loss from being the attack's, whose slope would be clamped to 1."""
    work = {"threat": THREAT, "inner": build_inner("sora"), "round": 3, "label_smoothing": 0.5}
    return train(build_method(method), local_task(**{**work, **task}))


def test_lengths_are_drawn_after_the_start_batch_by_batch() -> None:
    """The order is part of what a seed means."""
    drawn: list[str] = []

    class Noted(SORA):
        def start(self, *given: Any) -> Any:
            drawn.append("start")
            return super().start(*given)

        def draw(self, *given: Any) -> Any:
            drawn.append("length")
            return super().draw(*given)

    fitted(inner=Noted(build_inner("sora").options))
    assert drawn == ["start", "length"] * (len(drawn) // 2) != []


def test_a_linear_loss_is_aligned() -> None:
    """Both gradients are those of the logits, but the softmax turns none of them with two classes: the cosine is 1."""
    images = tiny_images()
    data = ImageData(images.x, images.y.clamp(max=1))
    model = nn.Sequential(nn.Flatten(), nn.Linear(images.x[0].numel(), 2))
    settings = dataclasses.replace(SETTINGS, learning_rate=1e-9, weight_decay=0.0)
    inner = build_inner("sora", alignment="cosine", first=0.5, decay=0)
    task = local_task(model, data, settings=settings, threat=THREAT, inner=inner, class_counts=torch.tensor([1, 1]))
    assert float(build_method("fedpgd").fit(task).client_state["inner/alignment"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_smoothed_labels_shorten_the_slope_which_is_why_they_draw_a_warning(share: float) -> None:
    """Also where the loss is linear as far as the step goes."""
    inner, near = build_inner("sora", first=0.5, decay=0), ThreatModel(eps="0.0001", steps=1)
    settings = dataclasses.replace(SETTINGS, epochs=1, batch_size=32)
    task = {"threat": near, "inner": inner, "settings": settings}
    plain, smoothed = (
        float(train(build_method("fedpgd"), local_task(label_smoothing=s, **task)).client_state["inner/alignment"])
        for s in (0.0, share)
    )
    assert plain == pytest.approx(1, abs=0.01)
    assert smoothed == pytest.approx(1 - share, abs=0.05)


def test_a_client_keeps_its_alignment_from_round_to_round() -> None:
    first = fitted()
    kept = {name: tensor.clone() for name, tensor in first.client_state.items()}
    assert {name: tensor.shape for name, tensor in kept.items()} == {"inner/alignment": ()}
    assert abs(float(kept["inner/alignment"]) - 0.99) > 1e-4
    half = {"inner/alignment": torch.tensor(0.5)}
    later, anew = fitted(round=4, client_state=half), fitted(round=4)
    assert not same_bits(later.client_state, anew.client_state)
    assert not same_bits(later.state, anew.state)
    assert same_bits(first.client_state, kept)


def test_each_client_of_a_federation_gets_back_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[int, float]] = []
    own = type(build_inner("sora")).begin_round

    def noted(self: Any, task: LocalTask) -> Any:
        memory = own(self, task)
        given[-1][task.client] = float(memory.alignment)
        return memory

    monkeypatch.setattr(type(build_inner("sora")), "begin_round", noted)
    federation = Federation(experiment("fedpgd", calfat__threat__inner="sora"))
    kept = []
    for _ in range(2):
        given.append({})
        federation.play()
        kept.append({c: float(state["inner/alignment"]) for c, state in federation.worker.client_states.items()})
    assert given[1] == kept[0]
    assert len({*kept[0].values()}) == 3


def test_the_full_gradient_moves_no_memory_and_parts_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fitted()
    asked = fitted(correction=Asking())
    assert same_bits(whole.state, asked.state)
    assert same_bits(whole.client_state, asked.client_state)
    monkeypatch.setattr(attacking, "micro_batches", lambda count, rows: [slice(0, 1), slice(1, count)])
    parts = fitted().client_state
    assert torch.allclose(parts["inner/alignment"], whole.client_state["inner/alignment"], atol=1e-5)


def test_the_full_gradient_looks_back_as_training_does() -> None:
    """Each pass from the client's alignment on, mini-batch by mini-batch."""
    alignments: list[float] = []

    class Noted(SORA):
        def after_step(self, batch: TrainBatch, gradient: Tensor | None, memory: Any) -> None:
            alignments.append(float(memory.alignment))
            super().after_step(batch, gradient, memory)

    fitted(inner=Noted(build_inner("sora").options))
    once = len(alignments)
    fitted(inner=Noted(build_inner("sora").options), correction=Asking())
    assert len(alignments) == 3 * once
    assert alignments[once] == alignments[2 * once] == alignments[0]
    assert len({*alignments[once : 2 * once]}) == once > 1


def test_images_of_a_step_have_no_gradient_unless_an_attack_looks_at_it() -> None:
    asked: list[bool] = []

    class Watched(FedPGD):
        def train_loss(self, batch: TrainBatch) -> Tensor:
            asked.append(batch.x_adv.requires_grad)
            return super().train_loss(batch)

    plain = build_method("fedpgd")
    for name in ("sora", "n-fgsm"):
        Watched(plain.options, plain.modifier).fit(local_task(threat=THREAT, inner=build_inner(name)))
    assert {*asked[: len(asked) // 2]} == {True}
    assert {*asked[len(asked) // 2 :]} == {False}


def test_perturbed_weights_leave_the_gradient_of_the_second_pass_alone() -> None:
    """Perturbations of length 0 change nothing: the gradient is not that of both passes together."""
    plain, perturbed = fitted(), fitted(awp=AWPOptions(gamma=0.0, warmup=0))
    values = [float(update.client_state["inner/alignment"]) for update in (plain, perturbed)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_rounds_without_an_attack_leave_the_alignment_as_it_was() -> None:
    assert "inner/alignment" not in fitted("standard").client_state

    class Clean(FedPGD):
        def attacked_rows(self, index: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
            return index < 0

    plain = build_method("fedpgd")
    task = local_task(threat=THREAT, inner=build_inner("sora"), client_state={"inner/alignment": torch.tensor(0.7)})
    kept = Clean(plain.options, plain.modifier).fit(task).client_state["inner/alignment"]
    assert float(kept) == pytest.approx(0.7)


def test_a_method_with_steps_of_its_own_is_refused() -> None:
    """Its images would have the gradients of all steps together."""

    class Twice(FedPGD):
        def take_steps(self, batch: Any, step: Any) -> Tensor:
            step(batch)
            return super().take_steps(batch.again(), step)

    plugin = type("Plugin", (), {"calfat_local_trainers": hookimpl(lambda self: [TrainerEntry("twice", build=Twice)])})
    threat = {"eps": "0.1", "inner": "sora"}
    with pytest.raises(
        RecipeError, match=r"inner: local trainer 'twice' has its own `take_steps`, which 'sora' leaves"
    ):
        tiny_experiment(builtin_registry(plugin()), trainer="twice", threat=threat)


def test_it_keeps_the_contract() -> None:
    check_inner_attack("sora", alignment="cosine")
