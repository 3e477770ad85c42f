"""``calfat attack``: what it writes, what it refuses, and going on after a kill."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pickle
import re
import shutil
from functools import partial
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from calfat_plugin.analyses.attack import loaded, planned
from calfat_plugin.cli import attack as attack_command
from calfat_plugin.evaluators.autoattack import AttackState
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.interfaces import SetUpTask
from calfat_plugin.observer import Observer
from calfat_plugin.report import write_run_report
from calfat_plugin.runs.checkpoints import save_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.loaded_run import _without_wrappers, model_loader
from calfat_plugin.runs.session import describe_data
from tests.cli.runner import Ended, calfat, python, refused
from tests.evaluators.stored import run_of
from tests.recipes import assembled

call = partial(calfat, "attack")

RECIPE = """\
common_args: {training_type: simulation, random_seed: 3}
data_args: {dataset: digits}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 7}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {norm: linf, eps: 0.1, step_size: eps/4, steps: 10}
  runtime: {threads: 1}
"""
QUICK = ("--set", "autoattack.iterations=2", "--set", "autoattack.queries=10")


@pytest.fixture
def run_dir(tmp_path: Path, cnn_small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with a trained checkpoint; the current directory is above it."""
    monkeypatch.chdir(tmp_path)
    run = run_of(cnn_small, RECIPE, Path("run"))
    save_checkpoint(run.checkpoint("best-robust"), Snapshot(5, cnn_small.state_dict()), {"selected_on": "test split"})
    run.results.write_text("the run's own\n")
    return Path("run")


def numbers(path: Path) -> list[tuple[object, ...]]:
    """What must not depend on when and how often a thing was run."""
    return [
        (row["label"], row["settings"], row["per_class"], row["per_class_release"])
        for row in json.loads(path.read_text())["evaluations"]
    ]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_directory_is_attacked_with_its_own_recipe(run_dir):
    code, out, err = call(run_dir, "--attacks", "fgsm,pgd5", "--examples", 60)
    assert (code, err) == (0, "")
    content = json.loads((run_dir / "attacks" / "last.json").read_text())
    labels = [row["label"] for row in content["evaluations"]]
    assert labels == ["natural", "fgsm", "pgd5", "worst-case"]
    assert {row["num_examples"] for row in content["evaluations"]} == {60}
    settings = content["evaluations"][2]["settings"]
    assert (settings["eps"], settings["step_size"], settings["seed"]) == ("0.1", "0.025", 3)
    where = {"run": "run", "checkpoint": "run/checkpoints/last.safetensors", "round": 7, "test_examples": 359}
    what = {"trainer": "calfat", "model": "cnn_small", "dataset": "digits", "alarms": []}
    assert {**where, **what}.items() <= content.items()
    assert content["environment"]["versions"]["torch"] == metadata.version("torch")
    assert (run_dir / "results.json").read_text() == "the run's own\n"
    assert sorted(path.name for path in (run_dir / "attacks").iterdir()) == ["last.evidence.safetensors", "last.json"]
    assert re.search(r"^natural  \d+\.\d %  \d+\.\d s$", out, re.MULTILINE)
    row = r"^pgd5 +│ +\d+\.\d\d │ +\[\d+\.\d, \d+\.\d\] │ +60 │ .*\nlinf, eps 0\.1 "
    assert re.search(row, out, re.MULTILINE)
    assert out.endswith("results: run/attacks/last.json\n")


def test_nothing_is_written_through_a_link_of_a_run_from_elsewhere(run_dir):
    elsewhere = run_dir.parent / "elsewhere"
    elsewhere.mkdir()
    (run_dir / "attacks").symlink_to(elsewhere)
    code, _, err = call(run_dir, "--attacks", "fgsm", "--examples", 5)
    assert code == 2
    assert err == "error: run/attacks: is a link, and results are written to no other place. Remove the link.\n"
    assert list(elsewhere.iterdir()) == []


def test_the_page_of_the_run_is_made_anew(run_dir):
    (run_dir / "results.json").unlink()
    page = write_run_report(run_dir)
    assert "Further attacks" not in page.read_text(encoding="utf-8")
    code, out, err = call(run_dir, "--attacks", "fgsm", "--examples", 20)
    assert (code, err) == (0, "")
    assert out.endswith("results: run/attacks/last.json\nreport: run/report.html\n")
    assert "Further attacks" in page.read_text(encoding="utf-8")
    (run_dir / "results.json").mkdir()  # a page that cannot be made is no failed attack, and brackets are no markup
    code, out, err = call(run_dir, "--attacks", "fgsm", "--output", "with[l2]:dog:.json", "--examples", 20)
    assert (code, out.endswith("\nresults: with[l2]:dog:.json\n")) == (0, True)
    assert err.startswith("warning: the report was not written (RunError: run/results.json: cannot be read (")


def test_results_are_kept_equal_calls_give_equal_numbers_and_a_checkpoint_is_found_by_name_and_path(run_dir):
    best = (run_dir, "--checkpoint", "best-robust"), (run_dir / "checkpoints" / "best-robust.safetensors",)
    for words in (*best, (run_dir,), (run_dir, "--seed", 4)):
        assert call(*words, "--attacks", "pgd3,cw3", "--examples", 30)[0] == 0
    first, second, last, seeded = (
        run_dir / "attacks" / f"{name}.json" for name in ("best-robust", "best-robust-2", "last", "last-2")
    )
    assert numbers(first) == numbers(second) == numbers(last)  # of the same weights
    assert numbers(seeded)[2][1]["seed"] == 4
    assert [json.loads(path.read_text())["round"] for path in (first, second, last)] == [5, 5, 7]
    assert json.loads(first.read_text())["selected_on"] == "test split"


def test_another_seed_of_an_attack_is_about_the_same_images(run_dir):
    recipe = run_dir / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_test_examples: null", "max_test_examples: 40"))
    own, other = (
        loaded(planned(run_dir, attacks=("natural",), seed=seed), Observer()).dataset.test.x for seed in (None, 4)
    )
    assert len(own) == 40
    assert torch.equal(own, other)


def test_data_that_are_no_longer_those_of_the_run_are_warned_of(run_dir):
    said = Mock()
    run = loaded(planned(run_dir, attacks=("natural",)), said)
    of_run = describe_data(run.dataset, {})
    for noted in (of_run, {"groups": {}}):  # between parties the server notes no digest
        (run_dir / "partition.json").write_text(json.dumps(noted))
        loaded(planned(run_dir, attacks=("natural",)), said)
    said.warn.assert_not_called()
    renamed = {"class_names": ["zero", *of_run["class_names"][1:]]}
    for key, changed in (("class_names", renamed), ("dataset_sha256", {"dataset_sha256": "0" * 64})):
        (run_dir / "partition.json").write_text(json.dumps({**of_run, **changed}))
        loaded(planned(run_dir, attacks=("natural",)), said)
        assert (
            f"run: the data set digits is not what it was when this run was made ({key} " in said.warn.call_args[0][0]
        )


def test_options_labels_and_budget_of_the_command_line(run_dir):
    code, _, err = call(
        run_dir, "--attacks", "pgd4,scaled=pgd4", "--set", "scaled.logit_scale=10", "--set", "pgd4.restarts=2",
        "--eps", "0.5", "--norm", "l2", "--step-size", "1/8", "--examples", 8, "--batch-size", 3,
    )  # fmt: skip
    assert (code, err) == (0, "")
    plain, scaled, _ = (
        row["settings"] for row in json.loads((run_dir / "attacks/last.json").read_text())["evaluations"][1:]
    )
    wanted = {"norm": "l2", "eps": "0.5", "step_size": "0.125", "restarts": 2, "batch_size": 3}
    assert wanted.items() <= plain.items()
    assert (plain["logit_scale"], scaled["logit_scale"]) == (1.0, 10.0)


def test_a_sweep_draws_a_curve_and_keeps_the_steps_in_proportion(run_dir):
    code, out, err = call(run_dir, "--attacks", "fgsm,pgd4", "--eps", "0.2,0.05,0", "--examples", 20)
    assert (code, err) == (0, "")
    rows = json.loads((run_dir / "attacks/last.json").read_text())["evaluations"]
    assert [(row["label"], row["settings"].get("eps")) for row in rows] == [
        ("natural", None),
        *((label, eps) for eps in ("0", "0.05", "0.2") for label in ("fgsm", "pgd4", "worst-case")),
    ]
    assert [row["settings"]["step_size"] for row in rows if row["label"] == "pgd4"] == ["0", "0.0125", "0.05"]
    assert rows[1]["per_class"] == rows[2]["per_class"] == rows[0]["per_class"]
    drawn = (run_dir / "attacks/last.svg").read_text()
    for text in ("fgsm", "pgd4", "0.05", "0.2", "linf", "accuracy"):
        assert text in drawn
    assert (run_dir / "attacks/last.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "attacks/last.pdf").read_bytes().startswith(b"%PDF-")
    curves = ("curve: run/attacks/last.svg", "curve: run/attacks/last.pdf", "curve: run/attacks/last.png")
    assert out.endswith("\n".join(("", *curves, "")))


@pytest.mark.parametrize(
    ("arguments", "steps", "warning"),
    [
        (("--eps", "0.05,0.3"), ["0.02", "0.02"], "steps x step_size, 6 x 0.02 = 0.12, is less than eps 0.3, so no "),
        (("--eps", "0.01"), ["0.02"], "step_size 0.02 is more than eps 0.01. Take one that follows eps, such as eps/4"),
        (("--eps", "0.3", "--step-size", "eps/5"), ["0.06"], ""),
        (("--eps", "2", "--norm", "l2"), ["0.5"], ""),
        (("--eps", "0.3", "--norm", "linf"), ["0.02"], "steps x step_size, 6 x 0.02 = 0.12, is less than eps 0.3, so "),
        (("--eps", "2", "--norm", "l2", "--step-size", "0.4"), ["0.4"], ""),
    ],
)  # fmt: skip
def test_an_absolute_step_stays_in_its_norm_and_is_reported(run_dir, arguments, steps, warning):
    recipe = run_dir / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("step_size: eps/4", "step_size: 0.02"))
    code, out, err = call(run_dir, "--attacks", "pgd6", *arguments, "--examples", 4)
    content = json.loads((run_dir / "attacks/last.json").read_text())
    assert [row["settings"]["step_size"] for row in content["evaluations"] if row["label"] == "pgd6"] == steps
    place = f"warning: --attacks pgd6: calfat.evaluators[0]: pgd6: {warning}"
    assert (code, err.startswith(place) if warning else err == "", err.count("warning: ")) == (0, True, bool(warning))
    found = [alarm["text"] for alarm in content["alarms"] if alarm["code"] == "step-size"]
    assert [text.startswith(f"pgd6: {warning}") for text in found] == [True] * bool(warning)
    assert out.count("  step-size: pgd6: ") == bool(warning)


def test_autoattack_leaves_no_state_behind_and_findings_are_reported(run_dir):
    code, out, _ = call(run_dir, "--attacks", "autoattack", *QUICK, "--examples", 12)
    assert code == 0
    text = "2 iterations instead of 100, 10 queries instead of 5000: this is not the published attack."
    assert f"1 finding about these numbers:\n  not-published: autoattack: {text}\n" in out
    content = json.loads((run_dir / "attacks/last.json").read_text())
    assert content["alarms"] == [{"code": "not-published", "text": f"autoattack: {text}", "labels": ["autoattack"]}]
    assert sorted(path.name for path in (run_dir / "attacks").iterdir()) == ["last.evidence.safetensors", "last.json"]


# --- a model of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, cnn_small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with factories, and the digits model's weights as ``weights.safetensors``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"  # as scripts do: the weights are those of the file
        "from calfat_plugin.models.networks import CNNSmall\n"
        "def plain(**shapes):\n    return CNNSmall(**shapes)\n"
        "class Soft(CNNSmall):\n    def forward(self, x):\n        return super().forward(x).softmax(1)\n"
    )
    save_file(dict(cnn_small.state_dict()), tmp_path / "weights.safetensors")
    return Path(f"{name}")


def own_model(own: Path, factory: str = "plain", weights: str = "weights.safetensors") -> tuple[str, ...]:
    return "--model", f"{own}:{factory}", "--weights", weights, "--dataset", "digits"


def test_any_module_is_attacked(own, cnn_small, tmp_path):
    code, out, err = call(*own_model(own), "--attacks", "pgd4", "--eps", "0.1", "--examples", 40)
    assert (code, err) == (0, "")
    content = json.loads((tmp_path / "weights-attacks.json").read_text())
    assert content["model"] == f"{own}:plain"
    assert content["weights"] == "weights.safetensors"
    assert content["evaluations"][1]["settings"]["step_size"] == "0.025"
    assert content["evaluations"][0]["accuracy"] > 0.9
    assert [citation["text"].split()[0] for citation in content["citations"]] == ["Madry"]
    assert out.endswith("results: weights-attacks.json\n")


def test_state_dicts_of_torch_save_are_read_however_they_are_packed(own, cnn_small, tmp_path):
    state = cnn_small.state_dict()
    torch.save(state, "plain.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, "nested.pth")
    found = []
    for weights in ("weights.safetensors", "plain.pt", "nested.pth"):
        code, _, err = call(*own_model(own, weights=weights), "--attacks", "fgsm", "--output", f"{weights}.json")
        assert (code, err) == (0, "")
        found.append(numbers(tmp_path / f"{weights}.json"))
    assert found[0] == found[1] == found[2]


def of_network(file: str) -> dict[str, torch.Tensor]:
    """The state dict of the network that these weights make."""
    images = SetUpTask(10, 1, (8, 8), torch.device("cpu"))
    return dict(model_loader(None, images, torch.device("cpu"))(file, "cnn_small").state_dict())


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "net.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.model."]
)
def test_names_that_wrappers_give_to_weights_are_those_of_the_network(prefix, cnn_small, tmp_path):
    state = cnn_small.state_dict()
    wrapped = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    for key in (None, "state_dict", "model_state_dict", "model_state", "model", "net"):
        torch.save(wrapped if key is None else {"epoch": 3, "acc": 0.9, key: wrapped}, tmp_path / "w.pt")
        found = of_network(str(tmp_path / "w.pt"))
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_the_weights_of_torchs_own_wrappers_are_read(cnn_small, tmp_path):
    file, state = str(tmp_path / "w.pt"), cnn_small.state_dict()
    for wrapper in (nn.DataParallel, torch.optim.swa_utils.AveragedModel, partial(torch.compile, backend="eager")):
        torch.save(wrapper(cnn_small).state_dict(), file)
        found = of_network(file)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_names_of_a_network_that_look_like_a_wrappers_stay(cnn_small):
    """A user's class that holds its network as ``model``, in a file with one more wrapper and in one without."""
    state = {f"model.{name}": tensor for name, tensor in cnn_small.state_dict().items()}
    assert _without_wrappers(state, state) == state
    assert _without_wrappers({f"model.{name}": tensor for name, tensor in state.items()}, state).keys() == state.keys()


def test_a_model_that_returns_probabilities_raises_an_alarm(own):
    code, out, _ = call(*own_model(own, "Soft"), "--attacks", "pgd2,autoattack", *QUICK, "--examples", 10)
    assert code == 0
    assert "  probabilities: natural, pgd2, autoattack: the model returns probabilities, not logits: " in out


# --- several runs in one call -----------------------------------------------------------------------------------------

FEW = ("--attacks", "fgsm", "--examples", 20)


@pytest.fixture
def other_run(run_dir: Path) -> Path:
    """A second run directory beside ``run``, after another number of rounds."""
    other = Path(shutil.copytree(run_dir, "other"))
    shutil.copy(other / "checkpoints" / "best-robust.safetensors", other / "checkpoints" / "last.safetensors")
    return other


def rows_of(out: str, run: Path) -> list[list[str]]:
    """The rows of the last table that begin with the name of a run, as (evaluator, accuracy)."""
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    return [row[1:3] for row in cells if row[0] == str(run)]


def in_percent(path: Path) -> list[list[str]]:
    """The same of a file of results."""
    evaluations = json.loads(path.read_text())["evaluations"]
    return [[row["label"], f"{100 * row['accuracy']:.2f}"] for row in evaluations]


def test_several_runs_have_a_file_each_and_one_table(run_dir, other_run):
    code, out, err = call(run_dir, other_run, *FEW)
    assert (code, err) == (0, "")
    files = [run / "attacks" / "last.json" for run in (run_dir, other_run)]
    assert [json.loads(file.read_text())["round"] for file in files] == [7, 5]  # each of its own checkpoint
    for number, run in enumerate((run_dir, other_run), start=1):
        assert f"[{number}/2] {run}\n" in out
        assert f"results: {run}/attacks/last.json\n" in out
    end = out.rpartition("results: ")[2]  # after all that was said of each
    for run, file in zip((run_dir, other_run), files, strict=True):
        rows = rows_of(end, run)
        assert [label for label, _ in rows] == ["natural", "fgsm"]
        assert rows == in_percent(file) == rows_of(out, run)


def test_options_are_those_of_every_run(run_dir, other_run):
    options = ("--attacks", "pgd3", "--set", "pgd3.restarts=2", "--eps", "0.05", "--examples", 9, "--seed", 4)
    assert call(run_dir, other_run, *options, "--checkpoint", "best-robust").code == 0
    for run in (run_dir, other_run):
        content = json.loads((run / "attacks" / "best-robust.json").read_text())
        settings = content["evaluations"][1]["settings"]
        assert (settings["restarts"], settings["eps"], settings["seed"]) == (2, "0.05", 4)
        assert {row["num_examples"] for row in content["evaluations"]} == {9}


def test_a_run_that_cannot_be_measured_does_not_stop_the_others(run_dir, other_run):
    """One without a recipe, and one whose results would go through a link, each before one that is measured."""
    Path("nothing").mkdir()
    linked, elsewhere = Path(shutil.copytree(run_dir, "linked")), Path("elsewhere")
    elsewhere.mkdir()
    (linked / "attacks").symlink_to(elsewhere.resolve())
    code, out, err = call("nothing", run_dir, linked, other_run, *FEW)
    assert code == 2
    link = "linked/attacks: is a link, and results are written to no other place. Remove the link."
    assert err.startswith("warning: nothing is not measured: nothing: ")
    assert f"warning: linked is not measured: {link}\n" in err
    assert err.endswith("error: not measured: nothing, linked. The others are done; what is wrong is said above.\n")
    assert list(elsewhere.iterdir()) == []
    for run in (run_dir, other_run):
        assert rows_of(out, run) == in_percent(run / "attacks" / "last.json")
    assert rows_of(out, linked) == []


def test_where_no_run_can_be_measured_there_is_no_table(run_dir):
    code, out, err = call("one", "two", *FEW)
    assert (code, "evaluator" in out) == (2, False)
    assert err.endswith("error: not measured: one, two. What is wrong is said above.\n")


def test_a_run_that_is_named_twice_is_refused_before_any_is_measured(run_dir, other_run):
    for again in ("run", "./run", run_dir.resolve(), "other/../run"):
        assert call(run_dir, other_run, again, *FEW) == refused(f"{Path(again)}: is named twice; name it once.")
    Path("link").symlink_to("run")
    assert call("run", "link", *FEW) == refused("link: is named twice; name it once.")
    assert not (run_dir / "attacks").exists()
    assert not (other_run / "attacks").exists()


def test_one_file_cannot_have_the_results_of_several_runs(run_dir, other_run):
    assert call(run_dir, other_run, *FEW, "--output", "mine.json") == refused(
        "--output mine.json: one file cannot have the results of 2 runs. Leave it out: each run gets a file in its "
        "attacks/."
    )
    assert not Path("mine.json").exists()


def test_several_runs_as_json(run_dir, other_run):
    code, out, _ = call(run_dir, "nothing", other_run, *FEW, "--json")
    assert code == 2
    content = json.loads(out)
    assert list(content) == ["runs", "not_measured"]
    for row, run in zip(content["runs"], (run_dir, other_run), strict=True):
        assert (row["run"], row["file"]) == (str(run), f"{run}/attacks/last.json")
        assert row["results"] == json.loads((run / "attacks" / "last.json").read_text())
    (missing,) = content["not_measured"]
    assert missing["run"] == "nothing"
    assert missing["error"].startswith("nothing: ")


def test_pages_of_several_runs_are_made_anew(run_dir, other_run):
    pages = []
    for run in (run_dir, other_run):
        (run / "results.json").unlink()
        pages.append(write_run_report(run))
    assert call(run_dir, other_run, *FEW).code == 0
    assert ["Further attacks" in page.read_text(encoding="utf-8") for page in pages] == [True, True]


def test_ctrl_c_names_the_runs_that_are_left(run_dir, other_run, monkeypatch):
    """The first is measured, the second has no recipe, the third is stopped, the fourth was not begun."""
    third, fourth = (Path(shutil.copytree(run_dir, name)) for name in ("third", "the fourth"))
    measure = attack_command.measure

    def stopped(plan, *arguments):
        if plan.run == third:
            raise KeyboardInterrupt
        return measure(plan, *arguments)

    monkeypatch.setattr(attack_command, "measure", stopped)
    code, _, err = call(run_dir, "nothing", third, fourth, *FEW)
    assert code == 130
    assert err.endswith(
        "Name those alone that are left, for the others would be measured again: nothing third 'the fourth'\n"
    )
    assert (run_dir / "attacks" / "last.json").exists()
    assert not (fourth / "attacks").exists()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--eps", "8"),
        ("run", "--eps", "8/0"),
        ("run", "--eps", "0.1,,0.2"),
        ("run", "--eps", "0.1", "--step-size", "fast"),
        ("run", "--step-size", "eps*4"),
        ("run", "--norm", "l2"),
        ("run", "--attacks", "fgsm,pdg20"),
        ("run", "--attacks", "fgsm,fgsm"),
        ("run", "--attacks", "a b=fgsm"),
        ("run", "--set", "pgd20"),
        ("run", "--attacks", "pgd20", "--set", "pgd2.restarts=5"),
        ("run", "--attacks", "pgd20", "--set", "pgd20.restart=5"),
        ("run", "--device", "gpu"),
        ("run", "--device", "cuda:99"),
        ("run", "--checkpoint", "best-robst"),
        ("run/checkpoints/lst.safetensors",),
        ("run/checkpoints/last.safetensors", "--checkpoint", "last"),
        (".",),
        ("empty",),
        ("lost.safetensors",),
        ("run", "--model", "cnn"),
        ("--model", "cnn"),
        ("--model", "cnn", "--weights", "lots.safetensors", "--dataset", "digits"),
        ("--model", "cnn_small", "--weights", "lost.safetensors", "--dataset", "digit"),
        ("run", "--output", "run/results.json"),
        ("--model", "cnn_mcmahan", "--weights", "lost.safetensors", "--dataset", "digits"),
        ("--model", "torch.nn:Identity", "--weights", "lost.safetensors", "--dataset", "digits"),
        ("--model", "cnn", "--weights", "lost.safetensors", "--dataset", "digits", "--checkpoint", "last"),
        ("run", "--attacks", "pgd20", "--set", "pgd20.restarts=010"),
    ],
)
def test_bad_input_is_reported_with_its_place_and_exit_code_2(arguments, snapshot, run_dir):
    RunDirectory.create(assembled(RECIPE), Path("empty"))
    RunDirectory(Path("empty")).recipe.write_text(RECIPE)
    Path("lost.safetensors").write_bytes((run_dir / "checkpoints/last.safetensors").read_bytes())
    code, _, err = call(*arguments)
    assert code == 2
    snapshot(err.partition("Known: ")[0], gpus=f"torch sees {torch.cuda.device_count()} GPUs")


@pytest.mark.parametrize("writer", ["disk", "evaluators.evidence"])
def test_a_full_disk_is_told_with_what_to_do_about_an_attack(writer, run_dir, monkeypatch):
    """It has no --run-dir."""

    def full(*paths, **also):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"calfat_plugin.{writer}.put_in_place", full)
    code, _, err = call("run", "--attacks", "fgsm")
    assert code == 2
    assert err.endswith("(No space left on device). Make room, and try again with the same command.\n")


def test_a_checkpoint_of_another_model_is_refused_by_tensor(run_dir):
    (run_dir / "recipe.yaml").write_text(RECIPE.replace("cnn_small", "vgg8"))
    code, _, err = call(run_dir, "--attacks", "fgsm")
    assert code == 2
    where = r"error: run/checkpoints/last\.safetensors: these are not weights of the model 'vgg8': the file: tensor "
    assert re.match(where + r"'[\w.]+' (is missing|has shape )", err)


class Payload:
    """A pickle that would run code."""

    def __reduce__(self):
        return os.system, ("touch hacked",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_is_no_state_dict_is_refused_and_code_in_a_pickle_is_not_run(own, tmp_path, snapshot):
    Path("evil.pt").write_bytes(pickle.dumps({"a": Payload()}))
    torch.save({"a": Payload()}, "evil2.pt")
    torch.save([torch.zeros(3)], "list.pt")
    torch.save({"best": {"w": torch.zeros(3)}, "epoch": 7}, "inside.pt")
    torch.save({"module.w": torch.zeros(3), "module.v": torch.zeros(3)}, "other.pt")
    torch.save({"model": {"w": torch.zeros(3)}, "args": argparse.Namespace(lr=0.1)}, "args.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "script.pt")
    torch.save(nn.Linear(2, 2), "whole.pt")
    for weights in ("evil.pt", "evil2.pt", "list.pt", "inside.pt", "other.pt", "args.pt", "script.pt", "whole.pt"):
        code, _, err = call(*own_model(own, weights=weights), "--attacks", "fgsm")
        assert (code, err.startswith(f"error: {weights}: ")) == (2, True)
        snapshot(err)
    assert not (tmp_path / "hacked").exists()


def test_torch_is_not_imported_before_the_arguments_are_known_to_be_good(run_dir):
    program = (
        "import sys\n"
        "from calfat_plugin.cli.main import main\n"
        "from click.testing import CliRunner\n"
        "assert CliRunner().invoke(main, ['attack', '--help']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['attack', 'run', '--eps', '8']).exit_code == 2\n"
        "from calfat_plugin.analyses.attack import planned\n"
        "from pathlib import Path\n"
        "planned(Path('run'), attacks=('fgsm', 'cw20', 'autoattack'))\n"
        "print(sorted({'torch', 'sklearn', 'matplotlib', 'fedml', 'pyautoattack'} & set(sys.modules)))\n"
    )
    assert python(program) == Ended(0, "[]\n", "")


# --- stopping and going on --------------------------------------------------------------------------------------------


def test_ctrl_c_says_how_to_resume(run_dir, monkeypatch):
    monkeypatch.setattr("calfat_plugin.analyses.attack._measure", Mock(side_effect=KeyboardInterrupt))
    code, out, err = call(run_dir)
    assert (code, out) == (130, "")
    assert err.startswith("error: stopped.\nThe same command again continues inside AutoAttack where it stopped; ")


def test_a_stopped_autoattack_continues_and_another_attack_meanwhile_leaves_what_it_needs(run_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(run_dir.resolve()))
    slow = (run_dir, "--attacks", "autoattack", *QUICK, "--examples", 20, "--batch-size", 8, "--eps", 0.15)
    save, attacks = AttackState.save, run_dir / "attacks"

    def save_and_stop(state: AttackState, *arguments: object) -> None:
        save(state, *arguments)
        if state.position == 1 and state.batch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AttackState, "save", save_and_stop)
        assert call(*slow)[0] == 130
    (state,) = attacks.glob(".last-????????????????-unfinished/autoattack-*.json")
    kept = state.read_bytes()
    assert call(run_dir, "--attacks", "pgd2", "--examples", 12)[0] == 0
    assert state.read_bytes() == kept

    for _ in ("resumed", "whole"):
        assert call(*slow)[0] == 0
    resumed, whole = attacks / "last-2.json", attacks / "last-3.json"
    assert numbers(resumed) == numbers(whole)
    first, again = (
        json.loads(path.read_text())["evaluations"][1]["details"]["sub_attacks"] for path in (resumed, whole)
    )
    assert [row["accuracy"] for row in first] == [row["accuracy"] for row in again]
    # Rows of the stopped process are taken over to the last digit: what they speak of was not done again.
    assert first[:1] == json.loads(kept)["finished"]
    assert sorted(path.name for path in attacks.glob("*.json")) == ["last-2.json", "last-3.json", "last.json"]
    assert not [path for path in attacks.iterdir() if path.is_dir()]
    assert sorted(path.name for path in run_dir.iterdir()) == ["attacks", "checkpoints", "recipe.yaml", "results.json"]
