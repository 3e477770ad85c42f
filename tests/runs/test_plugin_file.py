"""A run whose method is a file of the user's own: every process gets the same one, and a resumed run, too."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import calfat_plugin
from calfat_plugin.analyses.attack import planned
from calfat_plugin.host.tasks import fingerprint
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.request import checked_experiment
from tests.cli.runner import calfat
from tests.runs.processes import RECIPE, SABOTEUR, WarmServer, cold, environment, sabotage
from tests.runs.remains import rows
from tests.snapshot import TextSnapshot

METHOD = """\
from calfat_plugin import AdversarialTrainer, TrainerEntry, hookimpl

class MyFAT(AdversarialTrainer):
    def train_loss(self, batch):
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()

@hookimpl
def calfat_local_trainers():
    yield TrainerEntry("my-fat", build=MyFAT)
"""
MORE = """\
from calfat_plugin import BudgetedAttack, BudgetOptions, EvaluatorEntry, hookimpl

class Corner(BudgetedAttack):
    def settings(self, task):
        return {}

    def craft(self, task, x, y, noise):
        return (x + float(task.threat.eps)).clamp(0, 1)

@hookimpl
def calfat_evaluators():
    yield EvaluatorEntry("corner", build=Corner, config=BudgetOptions)
"""
FILE = Path("mine") / "my_fat.py"  # not in the current folder, which the processes of these tests can import from
SMALL = "train_args.comm_round=3"
CROSS_SILO = ("--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC")
RUN = ("run", "tiny.yaml", "--plugin", str(FILE), "--set", SMALL)


def write(folder: Path) -> Path:
    """A recipe of a method that only the file has."""
    recipe = yaml.safe_load(RECIPE)
    recipe["calfat"]["trainer"] = "my-fat"
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (folder / FILE).parent.mkdir()
    (folder / FILE).write_text(METHOD)
    return folder


@pytest.fixture(scope="module")
def finished(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, the file and a finished run."""
    folder = write(tmp_path_factory.mktemp("finished"))
    done = warm.run(*RUN, "--run-dir", "run", cwd=folder)
    assert (done.code, done.err) == (0, "")
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    recipe, end = copy / "run" / "recipe.yaml", "# End of the recipe as run."
    above = recipe.read_text().partition(end)[0].replace(str(finished), str(copy))
    digest = hashlib.sha256(above.encode()).hexdigest()
    recipe.write_text(f"{above}{end} SHA-256 of the lines above: {digest}\n")  # as if it had run there
    return copy


def test_the_run_directory_says_which_file_it_was(finished: Path) -> None:
    digest = hashlib.sha256(METHOD.encode()).hexdigest()
    recipe = yaml.safe_load((finished / "run" / "recipe.yaml").read_text())
    assert recipe["calfat"]["plugins"] == {"my_fat": {"file": str(finished / FILE), "sha256": digest}}
    environment = json.loads((finished / "run" / "environment.json").read_text())
    assert f"{finished / FILE} sha256:{digest[:12]} (my_fat)" in environment["plugins"]


def test_a_finished_run_is_analysed_with_more_files(warm: WarmServer, folder: Path) -> None:
    (folder / "mine" / "more.py").write_text(MORE)
    more = ("--plugin", "mine/more.py")
    done = warm.run("attack", "run", "--attacks", "corner", "--examples", "20", *more, cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert "corner" in done.out


def test_a_model_of_ones_own_is_attacked_with_a_file(tmp_path: Path, forgotten: None) -> None:
    (tmp_path / "more.py").write_text(MORE)
    weights = tmp_path / "weights.pt"
    weights.touch()
    plugins = (tmp_path / "more.py",)
    plan = planned(model="cnn_small", weights=weights, dataset="digits", attacks=("corner",), plugins=plugins)
    assert [plugin.name for plugin in plan.experiments[0].evaluators] == ["corner", "natural"]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What this process imports is forgotten after a test."""
    before = set(sys.modules)
    yield
    for module in {"more", "my_fat", "tiny_model"} - before:
        sys.modules.pop(module, None)


def test_a_run_in_python_takes_files(
    finished: Path, forgotten: None, no_page: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SABOTEUR))
    monkeypatch.chdir(finished)
    few = {"train_args.comm_round": 1}
    run = calfat_plugin.run("tiny.yaml", plugins=[FILE], set=few, run_dir="python", progress=False)
    assert rows(run.directory) == rows(finished / "run")[:1]
    model = calfat_plugin.load_model(finished / "run", trust_plugins=True)  # which needs no name of the file
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_the_recipe_that_other_processes_get_has_the_file(
    finished: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get the document; the parties of ``--local`` and the runs of a suite the flag."""
    monkeypatch.syspath_prepend(str(SABOTEUR))
    monkeypatch.chdir(finished)
    experiment = checked_experiment(read_document("tiny.yaml"), plugins=[FILE])
    again = checked_experiment(experiment.document)
    assert again.plugins == experiment.plugins
    assert type(again.build_trainer().plugin).__name__ == "MyFAT"


SUITE = "base: tiny.yaml\nmetrics: [natural]\nseeds: [0]\naxes: {size: {a: {}, b: {train_args.batch_size: 64}}}\n"


def test_parties_agree_on_the_content_of_the_file_and_not_on_its_place(
    finished: Path, tmp_path: Path, forgotten: None
) -> None:
    def of_party(name: str, content: str) -> str:
        sys.modules.pop("my_fat", None)  # each party is a process of its own
        path = tmp_path / name / "my_fat.py"
        path.parent.mkdir()
        path.write_text(content)
        return fingerprint(checked_experiment(read_document(finished / "tiny.yaml"), plugins=[path]))

    server = of_party("server", METHOD)
    assert of_party("client", METHOD) == server
    assert of_party("other", METHOD.replace("MyFAT", "OtherFAT")) != server


def test_a_suite_passes_the_file_on(finished: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SABOTEUR))
    monkeypatch.chdir(finished)
    Path("grid.yaml").write_text(SUITE)
    assert calfat("check", "grid.yaml", "--plugin", str(FILE)).code == 0
    shown = calfat("suite", "grid.yaml", "--plugin", str(FILE), "--dry-run")
    assert f"the first one: calfat run tiny.yaml --plugin {finished / FILE} --seed 0 --run-dir " in shown.out, shown.err


@pytest.mark.slow
@pytest.mark.parametrize("door", [["--workers", "2"], ["--local", *CROSS_SILO]])
def test_every_process_gets_the_file(warm: WarmServer, finished: Path, tmp_path: Path, door: list[str]) -> None:
    """Workers and the parties of a cross-silo run: each ends with the bits of one process."""
    where = ("--run-dir", str(tmp_path / "run"))
    done = cold(*RUN, *where, *door, cwd=finished, env=environment(tmp_path / "home", finished))
    assert done.code == 0, done.out + done.err
    one, other = (load_file(run / "checkpoints" / "last.safetensors") for run in (tmp_path / "run", finished / "run"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_run_is_resumed_with_the_file_wherever_it_is_now(warm: WarmServer, folder: Path) -> None:
    """The recipe as run names the place where it was; another place with the same content is as good."""
    (folder / "moved").mkdir()
    (folder / FILE).rename(folder / "moved" / "my_fat.py")
    (folder / "run" / "report.html").touch()
    longer = ("--set", "train_args.comm_round=4", "--resume", "--run-dir", "run")
    done = warm.run("run", "tiny.yaml", "--plugin", "moved/my_fat.py", *longer, cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert [row["round"] for row in rows(folder / "run")] == ["1", "2", "3", "4"]


def refusal(warm: WarmServer, folder: Path, *words: str) -> str:
    done = warm.run(*words, "--set", "train_args.comm_round=4", "--resume", "--run-dir", "run", cwd=folder)
    assert (done.code, done.out) == (2, "")
    return done.err.replace(str(folder), "HERE")


def test_a_changed_or_missing_file_is_not_resumed_with(warm: WarmServer, folder: Path, snapshot: TextSnapshot) -> None:
    then = hashlib.sha256(METHOD.encode()).hexdigest()
    (folder / FILE).write_text(METHOD + "\n")
    now = hashlib.sha256((METHOD + "\n").encode()).hexdigest()
    assert f"my_fat.sha256: '{then}' when started, '{now}' now. Rounds" in refusal(warm, folder, *RUN[:-2])
    changed = f"error: HERE/{FILE}: this plugin has changed: its SHA-256 was {then[:12]}…, it is {now[:12]}"
    assert refusal(warm, folder, "run", "run/recipe.yaml").startswith(changed)
    (folder / FILE).unlink()
    snapshot(refusal(warm, folder, "run", "run/recipe.yaml"))


def test_a_stopped_run_says_how_to_resume_it_with_the_file(warm: WarmServer, tmp_path: Path) -> None:
    folder = write(tmp_path)
    done = warm.run(*RUN, "--run-dir", "run", cwd=folder, **sabotage("training", 3, "SIGTERM"))
    assert done.code == 130
    assert done.err.endswith(
        "Resume with:\n  calfat run tiny.yaml --set train_args.comm_round=3 --plugin mine/my_fat.py --resume "
        "--run-dir run\n"
    )
