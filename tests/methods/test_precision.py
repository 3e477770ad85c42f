"""The arithmetic of training: what ``auto`` takes, what computes in it, and what is recorded and compared."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import AttackBatch, TrainBatch
from calfat_plugin.judging.battery import Slopes
from calfat_plugin.maths.losses import kl_divergence
from calfat_plugin.maths.passes import chosen_precision, float32_as, has_bf16_units
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import LocalUpdate
from calfat_plugin.runs.request import Request, with_resolved_precision
from calfat_plugin.trainers.base import AdversarialTrainer
from tests.evaluators.tasks import task_of, trial_of
from tests.methods.helpers import (
    CPU,
    SETTINGS,
    TinyNet,
    build_method,
    build_modifier,
    experiment,
    local_task,
    same_bits,
    small_digits,
    tiny_data,
)


def processor(monkeypatch: pytest.MonkeyPatch, *units: str) -> None:
    """Let torch see a processor with these units."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, **dict.fromkeys(units, True)})


@pytest.mark.parametrize(
    ("units", "expected"),
    [(["avx512_bf16"], "bf16"), (["amx_bf16"], "bf16"), ([], "fp32"), (["amx_int8", "avx512_fp16"], "fp32")],
)
def test_auto_takes_bf16_only_where_there_are_units(
    units: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(monkeypatch, *units)
    assert chosen_precision("auto", CPU) == expected
    assert [chosen_precision(name, CPU) for name in ("fp32", "tf32", "bf16")] == ["fp32", "tf32", "bf16"]
    assert not has_bf16_units(torch.device("meta"))


def test_auto_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert chosen_precision("auto", torch.device("cuda", 0)) == expected


def test_auto_is_settled_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = experiment("fedpgd", calfat__runtime={"precision": "auto"})
    for units, expected in (([], "fp32"), (["avx512_bf16"], "bf16")):
        processor(monkeypatch, *units)
        request = Request(asked, None, False, [])
        assert request.experiment.as_run()["calfat"]["runtime"]["precision"] == expected
    named = experiment("fedpgd", calfat__runtime={"precision": "bf16"})
    processor(monkeypatch)
    assert with_resolved_precision(named) is named


# --- what computes in it ----------------------------------------------------------------------------------------------


class Noting(AdversarialTrainer):
    """FedTRADES that notes types: of the attack's logits, step by step, and of the training's."""

    def __init__(self) -> None:
        super().__init__(None, build_modifier("plain"))
        self.attack: list[torch.dtype] = []
        self.clean: set[torch.dtype] = set()
        self.training: set[torch.dtype] = set()

    def start(self, x_nat: Tensor, task: Any, generator: torch.Generator) -> Tensor:
        return task.threat.gaussian_start(x_nat, generator, 1e-3)

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        self.attack.append(batch.logits_adv.dtype)
        self.clean.add(batch.logits_nat.dtype)
        return kl_divergence(batch.logits_nat, batch.logits_adv, "sum")

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.training |= {batch.logits_nat.dtype, batch.logits_adv.dtype}
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


def trained(precision: Any, method: Any) -> LocalUpdate:
    settings = dataclasses.replace(SETTINGS, batch_size=10)
    update: LocalUpdate = method.fit(local_task(settings=settings, precision=precision))
    return update


def test_all_but_the_first_step_of_an_attack_is_in_bf16() -> None:
    method = Noting()
    update = trained("bf16", method)
    assert method.attack == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert method.clean == {torch.float32}
    assert method.training == {torch.bfloat16}
    assert {tensor.dtype for tensor in update.state.values()} == {torch.float32}


def test_without_a_card_tf32_is_fp32() -> None:
    method = Noting()
    updates = [trained(precision, method) for precision in ("fp32", "tf32")]
    assert set(method.attack) | method.training == {torch.float32}
    assert same_bits(updates[0].state, updates[1].state)


@pytest.mark.parametrize("name", ["calfat", "fedpgd", "fedtrades", "fedmart", "fedgairat", "fedawp", "mixfat"])
def test_every_method_trains_in_bf16_to_about_the_same_weights(name: str) -> None:
    options = {"fedgairat": {"start_round": 1}, "fedawp": {"warmup": 0}}.get(name, {})
    start = TinyNet().state_dict()
    exact, lower = (trained(precision, build_method(name, **options)).state for precision in ("fp32", "bf16"))
    for key, tensor in exact.items():
        moved = float((tensor - start[key]).norm())
        assert 0 < float((tensor - lower[key]).norm()) < 0.1 * moved


def test_perturbed_weights_count_in_bf16_too() -> None:
    """Autocast keeps copies of weights, which would be those before the perturbation."""
    plain, exact = (trained("fp32", build_method("fedawp", warmup=0, gamma=gamma)).state for gamma in (1e-6, 0.5))
    lower = trained("bf16", build_method("fedawp", warmup=0, gamma=0.5)).state
    for key, tensor in exact.items():
        assert float((tensor - lower[key]).norm()) < 0.2 * float((tensor - plain[key]).norm())


@pytest.mark.parametrize("name", ["plain", "logitadj", "robal", "calibrated", "fedlc", "gear", "fedrs"])
def test_a_modifier_adds_no_rounding_to_logits_in_bf16(name: str) -> None:
    """A margin of 0.01 beside a logit of 4 is less than half a step of bfloat16."""
    loss = build_modifier(name, **({"calibrate_inner": True} if name == "robal" else {})).bind(torch.tensor([9, 5, 1]))
    logits, y = torch.tensor([[4.0, 0.3, -2.0], [0.5, 1.0, 0.1]], dtype=torch.bfloat16), torch.tensor([0, 2])
    assert torch.equal(loss.cross_entropy(logits, y), loss.cross_entropy(logits.float(), y))
    for seen in (loss.attack_logits, loss.kl_logits, loss.margin_logits):
        assert torch.equal(seen(logits).float(), seen(logits.float()))


def test_evaluation_is_in_fp32_whatever_training_is_in() -> None:
    types: set[torch.dtype] = set()
    model = TinyNet().eval()
    model.register_forward_hook(lambda module, inputs, output: types.add(output.dtype))
    attack = [("pgd", PGD(PGDOptions(steps=2)))]
    measure(task_of(model, tiny_data(), num_classes=4, batch_size=5), attack)
    assert types == {torch.float32}


def test_every_look_at_a_model_on_trial_is_in_full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean images and what trust asks by itself, too: a card would multiply in TensorFloat-32 by default."""
    inside = 0

    @contextmanager
    def watched(precision: str, device: torch.device) -> Iterator[None]:
        nonlocal inside
        assert precision == "fp32"
        inside += 1
        yield
        inside -= 1

    for module in ("evaluators.measure", "judging.trial", "judging.questions"):
        monkeypatch.setattr(f"calfat_plugin.{module}.float32_as", watched)
    outside: list[int] = []
    model = TinyNet().eval()
    model.register_forward_hook(lambda *arguments: None if inside else outside.append(1))
    trial = trial_of(model, tiny_data(), num_classes=4, batch_size=5)
    trial.asked_anew(tiny_data().x, "images")
    Slopes().run(trial)
    trial.nearest_to_an_error(1)
    assert not outside


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_cards_multiply_float32_as_asked_and_as_before_after(precision: Any, allowed: bool) -> None:
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    with float32_as(precision, torch.device("cuda")):
        assert [switch.allow_tf32 for switch in switches] == [allowed] * 2
    assert [switch.allow_tf32 for switch in switches] == before
    with float32_as(precision, CPU):
        assert [switch.allow_tf32 for switch in switches] == before


# --- what is said -----------------------------------------------------------------------------------------------------


def worker(asked: Experiment) -> Worker:
    dataset = small_digits()
    return Worker(asked, dataset, {0: dataset.train}, CPU, RunObserver())


def test_the_log_says_which_arithmetic_was_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "calfat_plugin")
    processor(monkeypatch)
    worker(experiment("fedpgd", calfat__runtime={"precision": "auto"}))
    assert caplog.messages == ["clients train in fp32 on cpu"]
    caplog.clear()
    worker(experiment("fedpgd", calfat__runtime={"precision": "bf16"}))
    assert caplog.messages == [
        "clients train in bf16 on cpu",
        "calfat.runtime.precision is bf16, but cpu has no units for it: fp32 would be faster",
    ]


def test_a_worker_trains_in_the_arithmetic_of_its_recipe() -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        here = worker(experiment("fedpgd", calfat__runtime={"precision": precision}))
        state = {name: tensor.clone() for name, tensor in here._model.state_dict().items()}
        found[precision] = {name: tensor for name, tensor in here.fit(0, 1, state).items() if "/" not in name}
    assert not same_bits(found["fp32"], found["bf16"])
