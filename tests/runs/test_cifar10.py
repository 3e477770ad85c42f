"""The paper's default setting runs end to end on files in CIFAR-10's true on-disk format."""

from __future__ import annotations

import json
from pathlib import Path

from calfat_plugin.runs.rounds import read_rounds
from tests.inputs.on_disk import write_cifar10
from tests.runs.processes import ROOT, WarmServer


def test_two_rounds_of_the_shipped_cifar10_recipe(warm: WarmServer, tmp_path: Path) -> None:
    """Its model, attack and evaluators as they stand; a few images and two clients, for time."""
    write_cifar10(tmp_path / "data", n_train=40, n_test=10)
    done = warm.run(
        *("run", str(ROOT / "recipes" / "calfat_cifar10.yaml"), "--run-dir", "run"),
        *("--set", f"data_args.data_cache_dir={tmp_path / 'data'}", "--set", "calfat.dataset.verify=false"),
        *("--set", "train_args.comm_round=2"),
        *("--set", "train_args.client_num_in_total=2", "--set", "train_args.client_num_per_round=2"),
        cwd=tmp_path,
    )
    assert done.code == 0
    assert done.err == "warning: device_args.using_gpu is true, but torch sees no GPU here; computing on the CPU.\n"
    rows = read_rounds(tmp_path / "run" / "rounds.csv")
    assert [row["round"] for row in rows] == ["1", "2"]
    assert all(row["natural"] and row["pgd20"] and row["loss_0"] and row["loss_1"] for row in rows)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    labels = [evaluation["label"] for evaluation in results["evaluations"]]
    assert labels[:2] == ["natural", "fgsm"]
    assert "pgd20" in labels
    assert {evaluation["num_examples"] for evaluation in results["evaluations"]} == {10}
    pgd = results["evaluations"][labels.index("pgd20")]["settings"]
    assert (pgd["eps"], pgd["step_size"], pgd["steps"]) == ("8/255", "2/255", 20)
