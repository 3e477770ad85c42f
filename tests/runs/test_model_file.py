"""A network that is a file of the user's own (``--model-file``): found, recorded, and the same in every process."""

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
from calfat_plugin.analyses.attack_plan import AttackRequest, plan_model
from calfat_plugin.errors import OptionError, PluginError, RunError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.plugin_files import model_overrides
from calfat_plugin.runs.request import checked_experiment
from tests.cli.runner import calfat
from tests.runs.processes import RECIPE, WarmServer
from tests.snapshot import TextSnapshot

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
TWO = NET + "\nclass Wide(MyNet):\n    def __init__(self, num_classes):\n        super().__init__(num_classes, 32)\n"
FUNCTIONS = """\
def _layer(size):
    from torch import nn
    return nn.Linear(64, size)

def build(**images):
    from torch import nn
    return nn.Sequential(nn.Flatten(), _layer(images["num_classes"]))
"""
FILE = Path("mine") / "my_net.py"
RUN = ("run", "tiny.yaml", "--model-file", str(FILE), "--run-dir", "run", "--set")


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


def with_file(text: str = str(FILE), *more: str) -> Experiment:
    return checked_experiment(read_document("tiny.yaml"), (*model_overrides(text), *more))


@pytest.mark.parametrize(
    ("content", "name", "network"),
    [
        (NET, "", "MyNet"),
        (NET, ":helper", "helper"),
        (TWO, ":Wide", "Wide"),
        (FUNCTIONS, "", "build"),
        (NET.replace("MyNet", "_MyNet") + "\nMyNet = _MyNet\n", ":MyNet", "MyNet"),
    ],
)
def test_the_network_is_the_one_that_is_named_or_the_only_one(
    folder: Path, content: str, name: str, network: str
) -> None:
    FILE.write_text(content)
    experiment = with_file(f"{FILE}{name}")
    assert experiment.model.name == experiment.as_run()["model_args"]["model"] == f"my_net:{network}"


@pytest.mark.parametrize(
    ("content", "name"),
    [(TWO, ""), ("x = 1\n", ""), ("from torch.nn import Linear\n", ""), (NET, ":MyNte"), (NET, ":torch")],
    ids=["two", "none", "imported", "misspelt", "a module"],
)
def test_which_network_is_meant_must_be_clear(folder: Path, content: str, name: str, snapshot: TextSnapshot) -> None:
    FILE.write_text(content)
    with snapshot.raises(PluginError):
        with_file(f"{FILE}{name}")


@pytest.mark.parametrize("text", ["mine/my_ne.py", "mine", "mine/my-net.py:MyNet"])
def test_a_file_that_is_none_is_refused(folder: Path, text: str, snapshot: TextSnapshot) -> None:
    with snapshot.raises(PluginError):
        model_overrides(text)


@pytest.mark.parametrize("content", [NET, FUNCTIONS])
def test_a_network_gets_what_it_asks_for(folder: Path, content: str) -> None:
    FILE.write_text(content)
    experiment = with_file(str(FILE), "data_args.max_train_examples=100")
    model = experiment.build_model(experiment.load_dataset(), experiment.build_trainer())
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_file_may_have_a_network_and_hooks(folder: Path) -> None:
    done = calfat("check", "tiny.yaml", "--plugin", str(FILE), "--set", "model_args.model=my_net:MyNet")
    assert (done.code, "my_net.py: it implements no hook; is @hookimpl missing" in done.err) == (2, True)
    hooks = "from calfat_plugin import TrainerEntry, hookimpl\nfrom calfat_plugin.trainers.standard import Standard\n"
    hook = "@hookimpl\ndef calfat_local_trainers():\n    yield TrainerEntry('plain-fl', build=Standard)\n"
    FILE.write_text(f"{hooks}{NET}\n{hook}")
    sets = ("--set", "calfat.trainer=plain-fl", "--set", "calfat.monitor.evaluators=[natural]")
    done = calfat("check", "tiny.yaml", "--model-file", str(FILE), "--plugin", str(FILE), *sets, "--show")
    assert done.code == 0, done.err
    as_run = yaml.safe_load(done.out)
    assert (as_run["model_args"]["model"], as_run["calfat"]["trainer"]["name"]) == ("my_net:MyNet", "plain-fl")


def test_who_only_looks_at_a_run_does_not_execute_it(folder: Path) -> None:
    """The recipe as run has the network's name, so that a page needs nothing of the file."""
    Path("as_run.yaml").write_text(yaml.safe_dump(with_file().as_run()))
    FILE.write_text("raise SystemExit('executed')\n")
    del sys.modules["my_net"]
    seen = assemble(read_document("as_run.yaml"), Registry.load(), finished=True)
    assert seen.model.name == "my_net:MyNet"
    assert "my_net" not in sys.modules


@pytest.mark.parametrize("name", ["", ":MyNet"])
def test_a_model_from_elsewhere_is_attacked(folder: Path, name: str) -> None:
    weights = folder / "weights.pt"
    weights.touch()
    asked = AttackRequest(attacks=("fgsm",), eps=())
    plan = plan_model(None, weights, "digits", asked, model_overrides(f"{FILE}{name}"))
    assert [each.model.name for each in plan.experiments] == ["my_net:MyNet"]


def test_python_takes_it_too(folder: Path) -> None:
    with pytest.raises(RunError, match=r"--weights w\.pt: no such file"):
        calfat_plugin.trust(model_file=f"{FILE}:MyNet", weights="w.pt", dataset="digits")
    with pytest.raises(PluginError, match=r"--model-file mine/none\.py: no such file"):
        calfat_plugin.trust(model_file="mine/none.py", weights="w.pt", dataset="digits")
    with pytest.raises(OptionError, match="leave one out"):
        calfat_plugin.trust(model_file=FILE, model="cnn_small", weights="w.pt", dataset="digits")


@pytest.mark.parametrize("command", ["attack", "trust"])
def test_attack_and_trust_take_a_file_with_weights(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []

    def plan(*arguments: object) -> None:
        planned.extend(arguments)
        raise OptionError("that is enough.")

    monkeypatch.setattr("calfat_plugin.analyses.attack_plan.plan_model", plan)
    of_file = ("--model-file", str(FILE))
    own = ("--weights", "w.pt", "--dataset", "digits")
    assert calfat(command, *of_file, *own).err == "error: that is enough.\n"
    assert (planned[0], planned[-1]) == (None, model_overrides(str(FILE)))
    assert "each name a model; leave one out" in calfat(command, *of_file, "--model", "cnn", *own).err
    assert "(missing: --dataset)" in calfat(command, *of_file, *own[:2]).err
    assert "error: --model-file: the recipe of a run says" in calfat(command, "run", *of_file).err


def test_a_suite_passes_it_on_to_every_run(folder: Path) -> None:
    grid = "base: tiny.yaml\nmetrics: [natural]\nseeds: [0]\naxes: "
    Path("grid.yaml").write_text(f"{grid}{{size: {{a: {{}}, b: {{train_args.batch_size: 64}}}}}}\n")
    file, model = model_overrides(str(FILE))
    done = calfat("suite", "grid.yaml", "--model-file", str(FILE), "--dry-run")
    assert done.code == 0, done.err
    assert f"--set '{file}'" in done.out
    assert f"--set {model} " in done.out
    assert "--plugin" not in done.out
    # Also where the base recipe names the file, and cells the networks.
    recipe = yaml.safe_load(RECIPE)
    recipe["calfat"]["plugins"] = {"my_net": {"file": str(folder / FILE), "model": True}}
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe))
    FILE.write_text(TWO)
    nets = "{net: {a: {model_args.model: 'my_net:MyNet'}, b: {model_args.model: 'my_net:Wide'}}}\n"
    Path("grid.yaml").write_text(grid + nets)
    done = calfat("suite", "grid.yaml", "--dry-run")
    assert done.code == 0, done.err
    assert "calfat.plugins.my_net={" in done.out
    assert "--plugin" not in done.out


def test_every_process_of_a_run_gets_it_and_a_resumed_run_too(warm: WarmServer, folder: Path) -> None:
    done = warm.run(*RUN, "train_args.comm_round=1", cwd=folder)
    assert (done.code, done.err) == (0, "")
    recipe = yaml.safe_load((folder / "run" / "recipe.yaml").read_text())
    digest = hashlib.sha256(NET.encode()).hexdigest()
    file = {"file": str(folder / FILE), "sha256": digest, "model": True}
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
