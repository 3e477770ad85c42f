"""A network in a plugin file without hooks: found, recorded, and the same in every process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import calfat_plugin
from calfat_plugin import Registry
from calfat_plugin.analyses.attack import planned
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.request import checked_experiment
from tests.cli.runner import calfat
from tests.runs.processes import RECIPE, WarmServer

NET = """\
import torch
from torch.nn import Flatten, Linear, Module

class MyNet(Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.body = torch.nn.Sequential(Flatten(), Linear(64, width), Linear(width, num_classes))

    def forward(self, x):
        return self.body(x)

def helper():
    return 7
"""
FUNCTIONS = """\
def _layer(size):
    from torch import nn
    return nn.Linear(64, size)

def build(**images):
    from torch import nn
    return nn.Sequential(nn.Flatten(), _layer(images["num_classes"]))
"""
FILE = Path("mine") / "my_net.py"
OWN = "model_args.model=my_net:MyNet"
RUN = ("run", "tiny.yaml", "--plugin", str(FILE), "--set", OWN, "--run-dir", "run", "--set")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What this process imports is forgotten after a test."""
    yield
    sys.modules.pop("my_net", None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and the file, which is where this process is."""
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(NET)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_file(name: str, *more: str) -> Experiment:
    return checked_experiment(read_document("tiny.yaml"), (f"model_args.model=my_net:{name}", *more), plugins=[FILE])


@pytest.mark.parametrize(("content", "name"), [(NET, "MyNet"), (FUNCTIONS, "build")])
def test_a_network_gets_what_it_asks_for(folder: Path, content: str, name: str) -> None:
    FILE.write_text(content)
    experiment = with_file(name, "data_args.max_train_examples=100")
    assert experiment.as_run()["model_args"]["model"] == f"my_net:{name}"
    model = experiment.build_model(experiment.load_dataset(), experiment.build_trainer())
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_file_may_have_a_network_and_hooks(folder: Path) -> None:
    hooks = "from calfat_plugin import TrainerEntry, hookimpl\nfrom calfat_plugin.trainers.standard import Standard\n"
    hook = "@hookimpl\ndef calfat_local_trainers():\n    yield TrainerEntry('plain-fl', build=Standard)\n"
    FILE.write_text(f"{hooks}{NET}\n{hook}")
    sets = ("--set", "calfat.trainer=plain-fl", "--set", "calfat.monitor.evaluators=[natural]")
    done = calfat("check", "tiny.yaml", "--plugin", str(FILE), "--set", OWN, *sets, "--show")
    assert done.code == 0, done.err
    as_run = yaml.safe_load(done.out)
    assert (as_run["model_args"]["model"], as_run["calfat"]["trainer"]["name"]) == ("my_net:MyNet", "plain-fl")


def test_who_only_looks_at_a_run_does_not_execute_it(folder: Path) -> None:
    """The recipe as run has the network's name, so that a page needs nothing of the file."""
    Path("as_run.yaml").write_text(yaml.safe_dump(with_file("MyNet").as_run()))
    FILE.write_text("raise SystemExit('executed')\n")
    del sys.modules["my_net"]
    seen = assemble(read_document("as_run.yaml"), Registry.load(), finished=True)
    assert seen.model.name == "my_net:MyNet"
    assert "my_net" not in sys.modules


def test_every_process_of_a_run_gets_it_and_a_resumed_run_too(warm: WarmServer, folder: Path) -> None:
    done = warm.run(*RUN, "train_args.comm_round=1", cwd=folder)
    assert (done.code, done.err) == (0, "")
    recipe = yaml.safe_load((folder / "run" / "recipe.yaml").read_text())
    digest = hashlib.sha256(NET.encode()).hexdigest()
    file = {"file": str(folder / FILE), "sha256": digest}
    assert recipe["calfat"]["plugins"] == {"my_net": file}
    more = (*RUN, "train_args.comm_round=2", "--resume")
    done = warm.run(*more, "--workers", "2", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert calfat_plugin.load_model("run")(torch.zeros(2, 1, 8, 8)).shape == (2, 10)

    FILE.write_text(NET + "\n")
    done = warm.run(*more, cwd=folder)
    assert "calfat.plugins.my_net.sha256:" in done.err
    (folder / "moved").mkdir()
    (folder / "moved" / "my_net.py").write_text(NET)
    FILE.unlink()
    moved = ("--plugin", "moved/my_net.py")
    done = warm.run("attack", "run", "--attacks", "fgsm", "--examples", "20", *moved, cwd=folder)
    assert (done.code, done.err) == (0, "")


def test_a_model_from_elsewhere_is_attacked(folder: Path) -> None:
    weights = folder / "weights.pt"
    weights.touch()
    plan = planned(model="my_net:MyNet", weights=weights, dataset="digits", attacks=("fgsm",), plugins=(FILE,))
    assert [each.model.name for each in plan.experiments] == ["my_net:MyNet"]


def test_a_suite_passes_it_on_to_every_run(folder: Path) -> None:
    Path("grid.yaml").write_text("base: tiny.yaml\nmetrics: [natural]\nseeds: [0]\naxes: {size: {a: {}, b: {}}}\n")
    Path("grid.yaml").write_text(Path("grid.yaml").read_text().replace("b: {}", "b: {train_args.batch_size: 64}"))
    done = calfat("suite", "grid.yaml", "--plugin", str(FILE), "--set", OWN, "--dry-run")
    assert done.code == 0, done.err
    assert f"--set {OWN} " in done.out
    assert f"--plugin {folder / FILE} " in done.out
