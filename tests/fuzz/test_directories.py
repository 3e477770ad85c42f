"""Damaged run directories: reported, resumed, or refused in words."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.fuzz import directories
from tests.fuzz.bench import Bench, Case, bench
from tests.runs.processes import WarmServer

MODULES = (
    *(
        "sklearn.datasets",
        "matplotlib.figure",
        "calfat_plugin.report",
        "calfat_plugin.cli.run",
        "calfat_plugin.cli.report",
    ),
    *("calfat_plugin.cli.progress", "calfat_plugin.host.simulation", "calfat_plugin.runs.session"),
    *("calfat_plugin.trainers.loop", "calfat_plugin.analyses.attack", "calfat_plugin.analyses.per_class"),
)
RECIPE = """\
data_args: {dataset: digits, partition_alpha: 0.5}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 2, batch_size: 256, learning_rate: 0.05}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: eps, steps: 1}
  evaluators: [natural, fgsm]
  monitor: {evaluators: [natural, fgsm], max_examples: 50}
  runtime: {threads: 1}
  reported: {source: nobody, natural: 50}
"""


@pytest.fixture
def originals(tmp_path: Path) -> list[Path]:
    """A finished run that was attacked, and one that was killed after its first round."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "warm").mkdir()
    server = WarmServer(tmp_path / "warm")
    finished, unfinished = tmp_path / "finished", tmp_path / "unfinished"
    for words in (
        ("run", "recipe.yaml", "--run-dir", str(unfinished), "--plain", "--set", "train_args.comm_round=1"),
        ("run", "recipe.yaml", "--run-dir", str(finished), "--plain"),
        ("attack", str(finished), "--attacks", "fgsm"),
    ):
        done = server.run(*words, cwd=tmp_path)
        assert done.code == 0, done.err
    server.close()
    recipe = unfinished / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("comm_round: 1", "comm_round: 2"))
    (unfinished / "results.json").unlink()
    shutil.rmtree(finished / "figures", ignore_errors=True)
    return [finished, unfinished]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damaged_run_directories_are_used_or_refused(
    tmp_path: Path,
    originals: list[Path],
    seed: int,
    share: Callable[[int], int],
    expect_none: Callable[[Bench, Iterable[Case]], None],
) -> None:
    with bench(tmp_path / "bench", *MODULES) as runner:
        expect_none(runner, directories.cases(seed, share(200), originals, tmp_path / "damaged"))
