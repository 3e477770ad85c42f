"""The fast evaluators: the same verdicts from micro-batches in the fast layout, and pyautoattack's own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.evaluators.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.maths import passes
from calfat_plugin.threat import ThreatModel
from tests.evaluators.tasks import task_of

CPU = torch.device("cpu")
THREAT = ThreatModel(eps="0.1", step_size="0.025")


@pytest.fixture
def model(digits_model: nn.Module) -> nn.Module:
    """A copy that may get hooks."""
    return copy.deepcopy(digits_model)


def lengths(model: nn.Module) -> list[int]:
    """The number of examples of every pass from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    return seen


@pytest.mark.parametrize("restarts", [1, 2])
def test_pgd_in_micro_batches_ends_at_the_same_points(
    restarts: int, model: nn.Module, digits: ImageData, make_task: Any
) -> None:
    attack, x, y = PGD(PGDOptions(steps=3, restarts=restarts)), digits.x[:11], digits.y[:11]
    found, tallies, passed = [], [], []
    for rows in (4, 100):
        counted: list[int] = []
        task = dataclasses.replace(
            make_task(model, ImageData(x, y), threat=THREAT),
            rows_at_once=rows,
            tally=lambda name, count, counted=counted: counted.append(count),
        )
        seen = lengths(model)
        found.append(attack.craft(task, x.clone(), y.clone(), torch.Generator().manual_seed(0)))
        tallies.append(counted)
        passed.append(seen[: 3 * 3])  # of the first start
    torch.testing.assert_close(found[0], found[1])
    assert passed[0] == [3] * 3 + [4] * 6
    assert passed[1][:3] == [11] * 3
    assert tallies[0] == tallies[1]
    assert len(tallies[0]) == 1


def test_all_that_is_measured_is_measured_in_the_fast_layout(
    model: nn.Module, digits: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides: set[int] = set()
    rows: list[int] = []
    conv = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    conv.register_forward_hook(lambda module, inputs, output: strides.add(output.stride()[1]))
    largest = torch.get_num_threads() * passes._CACHE_BYTES // 7
    monkeypatch.setattr(passes, "_largest_map", lambda model, x: largest)

    class Asking(Evaluator):
        def evaluate(self, task: EvaluationTask, label: str) -> Any:
            rows.append(task.rows_at_once)
            return PGD(PGDOptions(steps=1)).evaluate(task, label)

    before = [tensor.stride() for tensor in model.state_dict().values()]
    measure(task_of(model, digits, batch_size=20, threat=THREAT), [("pgd", Asking())])
    assert strides == {1}
    assert rows == [7]
    assert [tensor.stride() for tensor in model.state_dict().values()] == before


@pytest.mark.parametrize("name", ["apgd-ce", "fab-t", "square"])
def test_autoattack_in_micro_batches_has_the_verdicts_of_whole_ones(
    name: str, model: nn.Module, digits: ImageData, make_task: Any
) -> None:
    attack = AutoAttack(AutoAttackOptions(version="custom", attacks=name, iterations=3, queries=10))
    task = make_task(model, ImageData(digits.x[:12], digits.y[:12]), threat=THREAT)
    assert bool(task.clean_correct.all())
    seen, found = lengths(model), []
    for rows in (5, 100):
        points: list[Tensor] = []
        cut = dataclasses.replace(
            task, rows_at_once=rows, on_examples=lambda where, x_adv, points=points: points.extend((where, x_adv))
        )
        seen.clear()
        result = attack.evaluate(cut, name)
        assert (seen.count(12) == 1) == (rows == 5)  # the verdict
        found.append([torch.tensor(result.accuracy), *points])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
