"""The fast epoch computes what a plain loop computes: bit for bit in the same layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.interfaces import AttackBatch, LocalTask, TrainBatch
from calfat_plugin.maths import passes
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.losses import kl_divergence
from calfat_plugin.maths.passes import fast_passes
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.base import AdversarialTrainer
from tests.methods.helpers import SETTINGS, TinyNet, build_method, build_modifier, local_task

ROWS = 4


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of at most four examples for :class:`TinyNet`, whose largest map is 3x2x2, with any threads."""
    monkeypatch.setattr(passes, "_CACHE_BYTES", ROWS * 3 * 2 * 2 * 4 // torch.get_num_threads())


class Seen(AdversarialTrainer):
    """A third party's method, with a line for each loss and none about micro-batches, that notes what it is handed."""

    counts_iterates = True

    def __init__(self) -> None:
        super().__init__(None, build_modifier("plain"))
        self.cuts: list[AttackBatch] = []
        self.batches: list[TrainBatch] = []

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        self.cuts.append(batch)
        return kl_divergence(batch.logits_nat, batch.logits_adv, "sum")

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.batches.append(batch)
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


def plain_steps(model: nn.Module, x: Tensor, start: Tensor, threat: ThreatModel) -> Tensor:
    """The attack of :class:`Seen` as a formula, all of x in one pass."""
    eps, step = float(threat.eps), float(threat.step_size)
    with torch.no_grad():
        clean = model(x).softmax(1)
    x_adv = start
    for _ in range(threat.steps):
        x_adv = x_adv.detach().requires_grad_()
        loss = nn.functional.kl_div(model(x_adv).log_softmax(1), clean, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x_adv)
        x_adv = (x_adv.detach() + step * gradient.sign()).clamp(x - eps, x + eps).clamp(0, 1)
    return x_adv


@pytest.mark.usefixtures("cut")
def test_a_micro_batch_takes_all_its_steps_with_its_own_clean_logits() -> None:
    method = Seen()
    method.fit(local_task(settings=dataclasses.replace(SETTINGS, batch_size=10)))
    assert [len(batch.y) for batch in method.cuts] == [3] * 3 + [3] * 3 + [4] * 3
    assert len({id(batch) for batch in method.cuts}) == 3
    (whole,) = method.batches
    assert torch.equal(torch.cat([batch.x_nat for batch in method.cuts[::3]]), whole.x_nat)
    assert torch.equal(torch.cat([batch.y for batch in method.cuts[::3]]), whole.y)
    assert [batch.logits_nat.shape for batch in method.cuts[::3]] == [(3, 4), (3, 4), (4, 4)]


@pytest.mark.usefixtures("cut")
def test_the_cut_batch_has_the_bits_of_a_plain_loop_in_its_layout() -> None:
    method, threat = Seen(), ThreatModel(eps="0.1", step_size="0.04", steps=3)
    starts: list[Tensor] = []

    class Noted(Seen):
        def start(self, x_nat: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
            starts.append(super().start(x_nat, task, generator))
            return starts[-1]

    method = Noted()
    task = local_task(settings=dataclasses.replace(SETTINGS, batch_size=10), threat=threat)
    method.fit(task)
    (batch,), (start,) = method.batches, starts  # one draw for the whole batch
    model = TinyNet()
    with fast_passes(model, batch.x_nat), attack_mode(model):
        parts = [slice(0, 3), slice(3, 6), slice(6, 10)]
        plain = [plain_steps(model, batch.x_nat[part], start[part], threat) for part in parts]
    assert torch.equal(batch.x_adv, torch.cat(plain))
    assert batch.kappa is not None
    assert 0 <= batch.kappa.min() <= batch.kappa.max() <= 3


def test_the_cut_changes_no_start_and_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cache in (1, 2**40):
        monkeypatch.setattr(passes, "_CACHE_BYTES", cache)
        method = Seen()
        method.fit(local_task())
        found.append(method)
    alone, together = found
    assert len(alone.cuts) == 10 * 3
    assert len(together.cuts) == 3 * 3
    torch.testing.assert_close(alone.batches[0].x_adv, together.batches[0].x_adv)
    assert torch.equal(alone.batches[0].kappa, together.batches[0].kappa)


@pytest.mark.usefixtures("cut")
def test_rows_that_are_chosen_are_cut_too() -> None:
    method = Seen()
    vars(method)["attacked_rows"] = lambda index, task, generator: index != 0
    method.fit(local_task(settings=dataclasses.replace(SETTINGS, batch_size=10)))
    assert [len(batch.y) for batch in method.cuts] == [3] * 9
    (batch,) = method.batches
    changed = (batch.x_adv != batch.x_nat).flatten(1).any(dim=1)
    assert torch.equal(changed, batch.attacked)


def test_the_model_is_laid_out_as_before_and_the_update_plainly() -> None:
    model = TinyNet()
    before = [tensor.stride() for tensor in model.state_dict().values()]
    update = build_method("fedpgd").fit(local_task(model))
    assert [tensor.stride() for tensor in model.state_dict().values()] == before
    assert [tensor.stride() for tensor in update.state.values()] == before
