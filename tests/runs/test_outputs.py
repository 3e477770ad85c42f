"""What a run leaves behind: every file of the run directory, and the console."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from calfat_plugin.datasets.batches import batches
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.maths.intervals import wilson
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import commit_of
from tests.cli.runner import Ended
from tests.runs.processes import RECIPE, SABOTEUR, WarmServer, sabotage
from tests.runs.remains import read_rows
from tests.snapshot import TextSnapshot

ARGUMENTS = (
    *("run", "tiny.yaml", "--seed", "5", "--run-dir", "run"),
    *("--set", "train_args.comm_round=3"),
    *("--set", "train_args.client_num_per_round=4"),
    *("--set", "calfat.monitor={every: 2, evaluators: [natural, fgsm]}"),
)


@pytest.fixture(scope="module")
def finished(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run directory, and what the console showed. The run was stopped in round 2 and resumed."""
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "tiny.yaml").write_text(RECIPE)
    stopped = warm.run(*ARGUMENTS, cwd=folder, **sabotage("training", 2, "SIGTERM"))
    assert stopped.code == 130
    done = warm.run(*ARGUMENTS, "--resume", cwd=folder, WITHOUT_REPORT="")
    assert done.code == 0
    return folder / "run", done


@pytest.fixture
def run(finished: tuple[Path, Ended]) -> Path:
    return finished[0]


def strict_json(path: Path) -> Any:
    """Parse JSON as other languages do: without Python's NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{path} holds {word}")

    return json.loads(path.read_text(), parse_constant=refuse)


def experiment_of(run: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.syspath_prepend(str(SABOTEUR))
    return assemble(read_document(run / "recipe.yaml"), Registry.load(entry_points=False))


def test_rounds_csv(run: Path, snapshot: TextSnapshot) -> None:
    header, *_ = (run / "rounds.csv").read_text().splitlines()
    snapshot(header)
    rows = read_rows(run / "rounds.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    monitored = [
        [bool(row[column]) for column in ("natural", "natural_release", "fgsm", "fgsm_release")] for row in rows
    ]
    assert monitored == [[False] * 4, [True] * 4, [True] * 4]  # every second round, and always the last
    payload = 4 * (64 * 32 + 32 + 32 * 10 + 10)  # bytes of the model
    for row in rows:
        clients = row["clients"].split()
        absent = sorted(set("01234") - set(clients))
        assert len(clients) == 4
        assert clients == sorted(clients)
        assert row["refused"] == ""
        assert float(row["heterogeneity"]) > 0
        for client in clients:
            assert math.isfinite(float(row[f"loss_{client}"]))
            assert 0 < float(row[f"update_norm_{client}"]) < 100
        assert [row[f"loss_{client}"] + row[f"update_norm_{client}"] for client in absent] == [""]
        assert int(row["bytes_down"]) == 4 * payload
        assert int(row["bytes_up"]) == 4 * (payload + 3 * 8)  # with its loss, passes and alignment in float64
        images = sum(int(row[f"num_examples_{client}"]) for client in clients)
        assert float(row["passes"]) == images * (1 + 2 + 1)  # CalFAT's, with two steps of the attack
        assert float(row["seconds"]) > 0
        if Path("/proc/self/clear_refs").exists():
            assert 10 < float(row["peak_memory_mb"]) < 20_000
        assert (row["peak_gpu_memory_mb"], row["learning_rate"]) == ("", "0.05")
    assert len({row["clients"] for row in rows}) > 1


def test_results_json(run: Path) -> None:
    results = strict_json(run / "results.json")
    last = read_rows(run / "rounds.csv")[-1]
    assert [results[key] for key in ("recipe", "seed", "trainer", "aggregator", "rounds")] == [
        *("tiny", 5, "calfat", "fedavg", 3)
    ]
    assert results["seconds"] > 0
    assert results["model"] == "global model after the final round"
    assert set(results["conventions"]) == {"accuracy", "accuracy_release"}
    assert [evaluation["label"] for evaluation in results["evaluations"]] == ["natural", "fgsm"]
    for evaluation in results["evaluations"]:
        assert evaluation["num_examples"] == 359
        assert evaluation["interval"] == list(wilson(evaluation["accuracy"], 359))
        # The last round was monitored on the same test split, by attacks without randomness.
        assert evaluation["accuracy"] == float(last[evaluation["label"]])
        assert evaluation["accuracy_release"] == float(last[evaluation["label"] + "_release"])
        assert len(evaluation["per_class"]) == len(evaluation["per_class_release"]) == 10
        assert all(0 <= share <= 1 for share in evaluation["per_class"])
        assert evaluation["seconds"] > 0
        assert evaluation["implementation"].startswith("calfat-plugin ")
    natural, fgsm = results["evaluations"]
    assert natural["accuracy"] == natural["accuracy_release"]
    assert fgsm["accuracy"] <= min(natural["accuracy"], fgsm["accuracy_release"])
    assert (fgsm["settings"]["norm"], fgsm["settings"]["eps"], fgsm["settings"]["seed"]) == ("linf", "0.1", 5)
    assert any("CalFAT" in citation["text"] for citation in results["citations"])


def test_whom_the_model_fails(run: Path) -> None:
    """By hand, from the accuracy of each class and the labels of each client."""
    counts = strict_json(run / "partition.json")["class_counts"]
    last = read_rows(run / "rounds.csv")[-1]
    for evaluation in strict_json(run / "results.json")["evaluations"]:
        label, per_class = evaluation["label"], evaluation["per_class"]
        lowest = min(per_class)
        assert evaluation["worst_class"] == {"accuracy": lowest, "ids": [per_class.index(lowest)]}
        clients = [sum(n * a for n, a in zip(row, per_class, strict=True)) / sum(row) for row in counts]
        worst = clients.index(min(clients))  # 10 % of five clients are one
        assert evaluation["worst_clients"] == {"accuracy": pytest.approx(clients[worst]), "ids": [worst]}
        assert float(last[f"{label}_worst_class"]) == lowest
        assert float(last[f"{label}_worst_clients"]) == evaluation["worst_clients"]["accuracy"]


def test_the_last_checkpoint_is_the_model_of_the_results(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of(run, monkeypatch)
    dataset = experiment.load_dataset()
    model = experiment.build_model(dataset, experiment.build_trainer()).eval()
    tensors = load_file(run / "checkpoints" / "last.safetensors")
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if "/" not in name})
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y, _ in batches(dataset.test, 500, torch.device("cpu")))
    assert right / 359 == strict_json(run / "results.json")["evaluations"][0]["accuracy"]


def test_environment_json(run: Path) -> None:
    now = strict_json(run / "environment.json")
    assert now["command"] == ["calfat", *ARGUMENTS, "--resume"]
    assert now["python"] == sys.version.split()[0]
    assert (now["device"], now["gpu"], now["threads"], now["precision"]) == ("cpu", None, 1, "fp32")
    assert now["versions"]["fedml"] == "0.9.6"
    assert now["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", now["commit"] or "0" * 40)  # None outside a checkout
    assert "saboteur 1.0 (saboteur)" in now["plugins"]
    # The process that began the run is not forgotten.
    (before,) = now["earlier"]
    assert before["command"] == ["calfat", *ARGUMENTS]
    assert before["versions"] == now["versions"]
    assert "earlier" not in before


def test_the_commit_is_read_and_nothing_is_written_for_it(tmp_path: Path) -> None:
    """A look at somebody's source tree: a lock that a killed run left there would stop their next commit."""

    def git(*words: str) -> None:
        named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *named, *words], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    git("init")
    assert commit_of(tmp_path) is None  # there is none yet
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    os.utime(tmp_path / "file", (1, 1))  # git would note that the content is the same
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    clean = commit_of(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", str(clean))
    (tmp_path / "new").touch()
    assert commit_of(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{clean}-dirty"
    assert index.read_bytes() == before


def test_recipe_yaml_is_the_recipe_in_full(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (run / "recipe.yaml").read_text()
    first = text.splitlines()[0]
    assert first == "# tiny.yaml as run: every default and derived value is written out, down to the last line."
    above, end = text.split("# End of the recipe as run.")
    assert end == f" SHA-256 of the lines above: {hashlib.sha256(above.encode()).hexdigest()}\n"
    written = yaml.safe_load(text)
    experiment = experiment_of(run, monkeypatch)
    assert written["calfat"].pop("name") == experiment.name == "tiny"  # not "recipe", as the file is called
    assert experiment.as_run() == written
    assert experiment.warnings == ()
    assert written["common_args"]["random_seed"] == 5
    assert written["train_args"]["client_num_per_round"] == 4
    assert written["calfat"]["trainer"]["scale"] == 10.0  # a default of the preset
    assert written["calfat"]["threat"]["eps"] == "0.1"


def test_the_hosts_chatter_goes_to_the_log_and_nothing_else_to_the_console(finished: tuple[Path, Ended]) -> None:
    run, console = finished
    log = (run / "log.txt").read_text()
    assert "################Communication round : 0" in log
    assert "continuing after round 1" in log
    assert console.err == ""
    lines = console.out.splitlines()
    assert lines[0] == "tiny: resuming at round 2 of 3 rounds in run"
    number = r"\d+\.\d"
    scores = rf"natural {number} %  fgsm {number} %  "
    assert re.fullmatch(rf"round 2/3  {scores}loss {number}+  {number} s  ETA 0:0\d", lines[1])
    assert re.fullmatch(rf"round 3/3  {scores}loss {number}+  {number} s  ETA 0:00", lines[2])
    assert lines[3].rstrip() == "model after the final round, test split"
    assert lines[-2] == "results: run"
    assert re.fullmatch("next, whether the robust accuracy may be believed: .*calfat.* trust run", lines[-1])
    tables = "\n".join(lines[3:-2])
    for label in ("natural", "fgsm"):  # in both tables: how many are right, and of whom the fewest
        assert re.search(rf"^{label} +│ +{number}\d │ +\[.*\] │", tables, re.MULTILINE)
        assert re.search(rf"^{label} +│ +{number}\d │ +{number}\d │ +\d │ +{number}\d │ +\d$", tables, re.MULTILINE)
    assert not re.search("fedml|Communication|INFO", console.out)


def test_the_run_directory_holds_nothing_else(run: Path) -> None:
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith("figures")} == {
        *("recipe.yaml", "environment.json", "partition.json", "rounds.jsonl", "rounds.csv", "results.json"),
        *("report.html", "log.txt", "evidence.safetensors"),
        *(f"checkpoints/{name}.safetensors" for name in ("last", "best-natural", "best-robust")),
    }
