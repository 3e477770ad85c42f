"""The memory layout of convolutions: asked for by the recipe, or found by a trial whose crash is a child's."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from calfat_plugin import layouts
from calfat_plugin.experiment import same_but_rounds, why_not
from calfat_plugin.layouts import CHANNELS_LAST, CONTIGUOUS, layout_of, using_layout
from calfat_plugin.maths.passes import fast_passes
from calfat_plugin.runs.compute import computing_as
from calfat_plugin.runs.party import any_clients_worker
from calfat_plugin.testing.tiny import tiny_experiment

X = torch.rand(2, 3, 12, 10, generator=torch.Generator().manual_seed(0))
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(layouts, "_known", {})
    with using_layout("auto"):
        yield


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each child is asked to try."""
    asked: list[dict[str, Any]] = []
    run = subprocess.run

    def noted(*words: Any, **how: Any) -> Any:
        asked.append(json.loads(how["input"]))
        return run(*words, **how)

    monkeypatch.setattr(subprocess, "run", noted)
    return asked


class Shortcut(nn.Module):
    """A residual block: the strided 1x1 convolution beside it is a function here, no module."""

    def __init__(self, channels: int = 3, kernel: int = 1, stride: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))
        self.weight = nn.Parameter(torch.ones(8, channels, kernel, kernel))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        beside = conv2d(x, self.weight, stride=self.stride, padding=self.weight.shape[-1] // 2)
        return self.body(x).mean(dim=(2, 3)) + beside.mean(dim=(2, 3))


def is_last(model: nn.Module) -> bool:
    weight: Tensor = model.body[0].weight
    return weight.stride()[1] == 1


def test_what_kills_a_child_is_not_done_in_this_process(
    children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", DIES)
    model = Shortcut()
    with fast_passes(model, X):
        assert not is_last(model)
    assert children == [
        {
            "batch": 4,
            "threads": torch.get_num_threads(),
            "convolutions": [
                {
                    "weight": [8, 3, 1, 1],
                    "channels": 3,
                    "size": [12, 10],
                    "stride": [2, 2],
                    "padding": [0, 0],
                    "dilation": [1, 1],
                    "groups": 1,
                }
            ],
        }
    ]


def test_what_a_child_survives_is_fast_as_before(
    children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", "pass")
    model = Shortcut()
    with fast_passes(model, X):
        assert is_last(model)
    assert len(children) == 1


def test_a_trial_is_made_once_for_all_processes(
    children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", DIES)
    assert [layout_of(Shortcut(), X), layout_of(Shortcut(), X[:1])] == [CONTIGUOUS, CONTIGUOUS]
    layouts._known.clear()  # as in another process: a worker, or the next run of a suite
    assert layout_of(Shortcut(), X) == CONTIGUOUS
    assert len(children) == 1


@pytest.mark.parametrize("what", ["images", "threads", "processor"])
def test_another_shape_number_of_threads_or_processor_is_tried_anew(
    what: str, children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", "pass")
    layout_of(Shortcut(), X)
    images = X[..., :8] if what == "images" else X
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    if what == "processor":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    layout_of(Shortcut(), images)
    assert len(children) == 2


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.Conv2d(3, 8, 3, stride=2), id="3x3"),
        pytest.param(Shortcut(stride=1), id="no stride"),
        pytest.param(nn.Sequential(nn.Conv2d(3, 17, 3), nn.Conv2d(17, 34, 1, stride=2)), id="many channels"),
        pytest.param(nn.Sequential(nn.Flatten(), nn.Linear(360, 3)), id="no convolution"),
        pytest.param(Shortcut(channels=5), id="fails on these images"),
    ],
)
def test_other_networks_need_no_child(
    model: nn.Module, children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", DIES)
    assert layout_of(model, X) == CHANNELS_LAST
    assert children == []


@pytest.mark.parametrize(
    ("ended", "layout"),
    [
        (0, CHANNELS_LAST),
        (-signal.SIGSEGV, CONTIGUOUS),
        (-signal.SIGABRT, CONTIGUOUS),
        (-signal.SIGKILL, CHANNELS_LAST),  # want of memory says nothing about the layout
        (1, CHANNELS_LAST),
        (subprocess.TimeoutExpired("python", 1), CONTIGUOUS),  # a damaged heap may hang
        (OSError("no more processes"), CHANNELS_LAST),
    ],
)
def test_only_a_crash_of_its_own_speaks_against_a_layout(
    ended: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **how: Any) -> Any:
        if isinstance(ended, Exception):
            raise ended
        return subprocess.CompletedProcess(command, ended, "", "said")

    monkeypatch.setattr(subprocess, "run", run)
    assert layout_of(Shortcut(), X) == layout


@pytest.mark.parametrize("asked", [CONTIGUOUS, CHANNELS_LAST])
def test_a_layout_that_is_asked_for_is_taken_without_a_trial(
    asked: str, children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", DIES)
    model = Shortcut()
    with using_layout(asked), fast_passes(model, X):
        assert is_last(model) == (asked == CHANNELS_LAST)
    assert (children, layouts._asked) == ([], "auto")


def test_a_recipe_asks_in_this_process_and_in_a_worker_s() -> None:
    experiment = tiny_experiment(None, runtime={"layout": CONTIGUOUS}, trainer="fedpgd")
    with computing_as(experiment):
        assert layouts._asked == CONTIGUOUS
    assert layouts._asked == "auto"
    any_clients_worker(experiment.document, torch.get_num_threads(), Path(os.devnull))
    assert layouts._asked == CONTIGUOUS


def test_a_run_does_not_go_on_in_another_layout() -> None:
    recipes = [tiny_experiment(None, runtime={"layout": layout}).as_run() for layout in ("auto", CONTIGUOUS)]
    assert same_but_rounds(*recipes) == ["calfat.runtime.layout"]
    assert why_not(["calfat.runtime.layout"]) == (
        "Another memory layout changes the order of sums, so the last bits of the result would differ. "
    )


def test_a_layout_that_does_not_exist_is_refused_at_its_place() -> None:
    with pytest.raises(Exception, match=r"calfat\.runtime\.layout: .*'channel_last'.*channels_last") as error:
        tiny_experiment(None, runtime={"layout": "channel_last"})
    assert type(error.value).__name__ == "RecipeError"


def test_the_look_at_a_network_leaves_modes_statistics_and_streams_alone(
    children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "TRIAL", "pass")
    model = nn.Sequential(nn.Dropout(), Shortcut().train()).train()
    model[1].body[1].eval()
    modes, stream = [module.training for module in model.modules()], torch.get_rng_state()
    layout_of(model, X)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(model[1].body[1].running_mean, torch.zeros(8))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert len(children) == 1


def test_the_trial_goes_forward_and_backward_with_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with a convolution that harms none."""
    case = {"weight": [32, 20, 3, 3], "channels": 20, "size": [6, 5], "stride": [1, 1], "padding": [1, 1]}
    asked = {
        "batch": 2,
        "threads": torch.get_num_threads(),
        "convolutions": [{**case, "dilation": [1, 1], "groups": 1}],
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    grad, seen = torch.autograd.grad, []

    def noted(maps: Tensor, inputs: list[Tensor], given: Tensor) -> Any:
        seen.append([tensor.stride() for tensor in (*inputs, maps)])
        return grad(maps, inputs, given)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    exec(layouts.TRIAL, {})
    assert seen == [[(600, 1, 100, 20), (180, 1, 60, 20), (960, 1, 160, 32)]] * 20


def test_the_trial_is_a_program() -> None:
    case = {"weight": [4, 2, 1, 1], "channels": 2, "size": [4, 4], "stride": [1, 1], "padding": [0, 0]}
    trial = {"batch": 2, "threads": 1, "convolutions": [{**case, "dilation": [1, 1], "groups": 1}]}
    child = subprocess.run([sys.executable, "-c", layouts.TRIAL], input=json.dumps(trial), text=True, check=False)
    assert child.returncode == 0
