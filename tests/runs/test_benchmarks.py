"""Benchmarks run, on sizes that measure nothing, and what they compute about their measurements is right."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import folding, gpu, gpu_results, hosts, local_epoch, loops, round_overhead, work
from calfat_plugin.builtin import calfat_local_trainers
from calfat_plugin.datasets import ImageData
from calfat_plugin.models.networks import CNN
from calfat_plugin.threat import ThreatModel
from tests.environment import bare
from tests.runs.processes import ROOT


def tables(markdown: str) -> dict[str, list[list[str]]]:
    """Heading (or first column) to rows, of Markdown that must be well-formed."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:\|.*\|\n)+", markdown):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}
        assert set(rows[1]) <= {"---", "---:"}
        found[rows[0][0]] = rows[2:]
    return found


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "resnet18", "vgg8"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    model = loops.network(name).eval()
    found = work.work_of(model, loops.CIFAR)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *loops.CIFAR))
    assert found.forward == counter.get_total_flops()
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    side = 28 if name == "cnn" else 32  # of the part that it sees
    assert found.first == 2 * side * side * first.weight.numel()


class Counting(nn.Module):
    """Counts the examples of its calls, and those whose gradient with respect to the image is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = loops.network("cnn_small", (1, 8, 8))
        self.seen = {"all": 0, "attacked": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["all"] += len(x)
        self.seen["attacked"] += len(x) * x.requires_grad
        logits: Tensor = self.inner(x)
        return logits


@pytest.mark.parametrize("name", list(work.METHODS))
def test_a_method_needs_the_passes_of_its_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the real loop: what a second epoch adds to the first."""
    models = [Counting(), Counting()]
    fresh = iter(models)
    monkeypatch.setattr(loops, "copy", SimpleNamespace(deepcopy=lambda base: next(fresh)))
    data, steps, passes = loops.images(8, (1, 8, 8)), 3, work.METHODS[name][1]
    for epochs in (1, 2):
        loops.fit(name, nn.Identity(), data, torch.device("cpu"), steps=steps, epochs=epochs)
    attacked, every = (models[1].seen[kind] - models[0].seen[kind] for kind in ("attacked", "all"))
    assert attacked == passes.attacked * steps * len(data)
    assert every - attacked == (passes.natural + passes.outer) * len(data)


def test_every_method_is_measured() -> None:
    assert set(work.METHODS) == {entry.name for entry in calfat_local_trainers()}


def test_the_plain_loop_is_calfat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the release's constants, one batch and almost no budget, both take the same step: only the noise differs."""
    data, base = loops.images(16, (1, 8, 8)), loops.network("cnn_small", (1, 8, 8))
    models = [copy.deepcopy(base), copy.deepcopy(base)]
    fresh = iter(models)
    monkeypatch.setattr(loops, "copy", SimpleNamespace(deepcopy=lambda base: next(fresh)))
    monkeypatch.setitem(work.METHODS, "calfat", ({"parameterisation": "release"}, work.METHODS["calfat"][1]))
    monkeypatch.setattr(loops, "EPS", 1e-6)
    monkeypatch.setattr(loops, "ThreatModel", lambda steps: ThreatModel(eps=1e-6, step_size=1e-6, steps=steps))
    assert loops.plain(base, data, torch.device("cpu"), steps=1)() > 0
    _, update = loops.fit("calfat", base, data, torch.device("cpu"), steps=1)
    for name, before in base.state_dict().items():
        plain, ours = models[0].state_dict()[name] - before, update.state[name] - before
        assert plain.any()
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2 * float(plain.abs().max()))


# --- benchmarks run ---------------------------------------------------------------------------------------------------


def test_local_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    sizes = ["--images", "2", "--model-images", "1", "--repeats", "1", "--json", str(path)]
    chosen = ["--methods", "fedpgd,standard", "--models", "vgg8", "--steps", "1"]
    local_epoch.main([*sizes, "--parts", "methods,models", *chosen])
    found = tables(capsys.readouterr().out)
    assert [row[0] for row in found["method"]] == ["calfat", "fedpgd", "standard"]
    assert (found["method"][0][2], found["method"][0][3]) == ("5.9", "1")
    assert [row[0] for row in found["network"]] == ["vgg8"]
    content = json.loads(path.read_text())
    assert content["numbers"].keys() == {"methods", "vgg8"}
    assert content["machine"]["used by torch"] == torch.backends.cpu.get_cpu_capability()
    local_epoch.main([*sizes, "--parts", "attacks", "--steps", "10"])
    passes = {row[0]: row[1:3] for row in tables(capsys.readouterr().out)["attack"]}  # of the last table, CalFAT's
    assert (passes["pgd"], passes["n-fgsm"]) == (["12", "1 x"], ["3", "4 x"])
    with pytest.raises(SystemExit, match="computes in fp32"):
        local_epoch.main([*sizes, "--parts", "calfat", "--precision", "fp8"])


def test_folding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The two networks that take turns are one function."""
    model = CNN(norm="batch").eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    x = torch.rand(2, 3, 32, 32)
    without_norms = folding.folded(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in without_norms.modules())
    torch.testing.assert_close(without_norms(x), model(x), rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(folding, "TURNS", 1)
    monkeypatch.setattr(folding, "CASES", [("cnn", model, 2)])
    folding.main()
    assert re.match(r"cnn, fp32: \d\.\d\d of the time ", capsys.readouterr().out)


@pytest.mark.slow
def test_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With FedML in the place of Flower, which has an environment of its own."""
    seeds = iter("0001")

    def run(folder: Path, recipe: str, *options: str, python: Path) -> Path:
        return round_overhead.run(folder, recipe, "--seed", next(seeds))

    monkeypatch.setattr(hosts, "run", run)
    monkeypatch.setattr(hosts, "CLIENTS", 2)
    monkeypatch.setattr(hosts, "PER_ROUND", 1)
    words = ["--fedml", "a", "--flower", "b", "--rounds", "2", "--repeats", "1", "--json", str(tmp_path / "found.json")]
    hosts.main(words)
    for host, first, later, whole, memory in tables(capsys.readouterr().out)["host"]:
        assert (host in ("Flower", "FedML"), 0 < float(first) < float(whole), float(memory) > 100) == (True,) * 3
        assert 0 < float(later) < float(whole)
    with pytest.raises(SystemExit, match=r": other bits than in the first run; is torch the same in both\?$"):
        hosts.main(words)


def only(monkeypatch: pytest.MonkeyPatch, *chosen: str) -> None:
    """Let the command do these parts, whose names begin so."""
    monkeypatch.setattr(gpu, "parts", lambda bench: (each for each in PARTS(bench) if each[0].startswith(chosen)))


PARTS = gpu.parts
QUICK = ("--device", "cpu", "--quick", "--limit", "3600", "--out")


def test_a_wrong_result_on_a_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def results(device: torch.device, base: nn.Module, data: ImageData, precision: str) -> dict[str, Tensor]:
        calls.append(precision)
        found = {name: torch.ones(2) for name in gpu_results.TOLERANCES}
        wrong = len(calls) % 2 == 0  # after the CPU's
        found["PGD-20 verdicts that differ, share"] = torch.tensor([True, not wrong])
        found["logits, relative"] *= {"fp32": 1.001, "tf32": 1.01}.get(precision, 1.0) if wrong else 1.0
        return found

    monkeypatch.setattr(gpu_results, "results_on", results)
    only(monkeypatch, "results")
    with pytest.raises(SystemExit) as raised:
        gpu.main([*QUICK, str(tmp_path)])
    assert calls == ["fp32", "fp32", "fp32", "tf32", "fp32", "bf16"]
    assert str(raised.value).splitlines() == [
        "logits, relative, fp32: 0.001 is more than 1e-05",
        "PGD-20 verdicts that differ, share, fp32: 0.5 is more than 0.005",
        "logits, relative, tf32: 0.01 is more than 0.005",
    ]
    assert "**Wrong:** logits, relative, tf32" in (tmp_path / "gpu.md").read_text()


ALONE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Present]
from benchmarks import gpu, gpu_results, loops
gpu_results.fit("calfat", loops.network("cnn"), loops.images(1), gpu_results.CPU, steps=1)
gpu_results.PGD(gpu_results.PGDOptions(steps=1))
gpu.main(["--device", "cpu", "--quick", "--limit", "-1", "--out", sys.argv[1]])
"""


def test_the_gpu_benchmark_needs_nothing_that_would_have_to_be_installed(tmp_path: Path) -> None:
    """The machine with the card has torch, torchvision and pytest, with what these need, and a checkout."""
    absent = {"yaml", "fedml", "sklearn", "scipy", "pandas", "matplotlib", "safetensors", "rich", "click", "pydantic"}
    program = [sys.executable, "-c", f"absent = {absent}\n{ALONE}", str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, env=bare(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    left_out = {line.partition(" was left out")[2] for line in done.stderr.splitlines()}
    assert left_out == {": 0 s had gone, the limit is -1 s"}
