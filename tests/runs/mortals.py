"""Runs of a small recipe, whose clients may meet a fate (``mortal_model.py``), in this process, and what came out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe import read_document
from calfat_plugin.runs.checkpoints import named_files
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request, checked_experiment
from calfat_plugin.runs.session import run
from calfat_plugin.stored_run import CLIENT_STATES
from tests.runs.remains import rows

MORTAL = Path(__file__).parent / "mortal"
RECIPE = """\
common_args: {training_type: simulation, random_seed: 0}
data_args: {dataset: digits, partition_method: dirichlet, partition_alpha: 0.3}
model_args: {model: 'mortal_model:build'}
train_args: {client_num_in_total: 7, client_num_per_round: 5, comm_round: 3, batch_size: 128, learning_rate: 0.05}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {eps: 0.1, step_size: eps, steps: 1}
  evaluators: [natural]
  monitor: {evaluators: [natural, fgsm], max_examples: 100}
  runtime: {threads: 1}
"""
METHODS = {
    "fedavg": [],
    "scaffold": ["calfat.trainer.preset=null", "calfat.aggregator.name=scaffold"],
    "fedrbn": ["calfat.trainer={name: fedrbn, at_fraction: 0.5}"],
    "fedlat": ["calfat.trainer={name: fedlat, clean_rounds: 1}"],
    "adamw": [
        *("train_args.client_optimizer=adamw", "train_args.lr_schedule=cosine", "train_args.warmup_rounds=1"),
        *("train_args.local_steps=3", "train_args.max_grad_norm=0.5"),
    ],
    "long tail": [
        *("data_args.partition_method=longtail", "calfat.trainer.preset=null", "calfat.aggregator.name=scaffold"),
        *("calfat.threat.by_class={warmup: 0.5}", "train_args.batch_size=32"),
        "calfat.clients=[{share: 0.6, threat: {inner: sora, by_class: null}}]",
    ],
    "groups": [
        "calfat.ema.decay=0.5",
        "calfat.aggregator={name: trimmed_mean, f: 1}",
        "calfat.clients=[{ids: 0, trainer: {name: fedpgd, loss: logitadj, awp: {warmup: 1}, label_smoothing: 0.1}, "
        "epochs: 2}, "
        "{smallest: 1, threat: {eps: 0.05}}, {share: 0.3, attacker: alie}, "
        "{largest: 1, attacker: label_flip, batch_size: 64}]",
    ],
}


def go(
    run_dir: str, workers: int, *sets: str, resume: bool = False, observer: RunObserver | None = None
) -> tuple[Path, list[str]]:
    """Run the recipe of the current folder in this process, with so many workers; returns (directory, warnings)."""
    warnings: list[str] = []
    experiment = checked_experiment(read_document("mortal.yaml"), sets)
    request = Request(experiment, Path(run_dir), resume, [], workers=workers)
    observer = observer or RunObserver()
    with mock.patch.object(observer, "warn", warnings.append):
        run(request, RunDirectory.open(request), observer)
    return Path(run_dir), warnings


def outcome(directory: Path) -> tuple[list[bytes], list[dict[str, str]]]:
    """All that a run is held to: its checkpoints, clients' states among them, and its rounds but for their costs."""
    folder = directory / "checkpoints"
    own = sorted(folder.glob("*.safetensors"))
    named = {(client, state.round) for path in own for client, state in named_files(path).items()}
    states = [
        folder / CLIENT_STATES / f"client-{client}-round-{number}.safetensors" for client, number in sorted(named)
    ]
    return [path.read_bytes() for path in (*own, *states)], rows(directory)


@functools.cache
def alone(*sets: str) -> tuple[list[bytes], list[dict[str, str]]]:
    """The outcome of the recipe in one process."""
    return outcome(go("alone", 0, *sets)[0])


class FailOnWarning(RunObserver):
    """Of a run that gives no cause for a warning."""

    def warn(self, message: str) -> None:
        pytest.fail(message)


class Fates(RunObserver):
    """Sends fates in the second round."""

    def __init__(self, *fates: str) -> None:
        self._fates = fates

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        if round == 2:
            for number, fate in enumerate(self._fates):
                Path("new").write_text(fate)
                Path("new").rename(f"fate-{number}")
