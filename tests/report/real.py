"""One small real run, from the command line, that the tests of this folder share."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.environment import bare

ROOT = Path(__file__).parents[2]
RECIPE = """\
data_args: {dataset: digits, partition_alpha: 0.5}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 2, batch_size: 64, learning_rate: 0.05}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural, fgsm]
  monitor: {evaluators: [natural, fgsm], max_examples: 100}
  loggers: [tensorboard, wandb]
  reported: {source: nobody, natural: 50}
"""


@dataclass(frozen=True)
class RealRun:
    """Where it ran, what it printed, and the home directory that it was given, empty."""

    directory: Path
    home: Path
    out: str
    err: str


def real_run(folder: Path) -> RealRun:
    """Run it."""
    recipe, home = folder / "tiny.yaml", folder / "home"
    recipe.write_text(RECIPE)
    home.mkdir()
    done = calfat(home, "run", str(recipe), "--plain", "--run-dir", str(folder / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    return RealRun(folder / "run", home, done.stdout, done.stderr)


PROGRAM = """
from calfat_plugin.cli.main import main
from calfat_plugin.report import charts
charts.FORMATS.clear()
main(prog_name="calfat")
"""


def calfat(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``calfat`` in a process of its own, with figures on the page and none beside it."""
    environment = bare(HOME=str(home), LANG="C.UTF-8", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, cwd=home.parent, capture_output=True, text=True
    )
