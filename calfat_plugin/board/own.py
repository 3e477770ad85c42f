"""A model of an entry in a run directory of the verifier's own.

Nothing that an entrant wrote leads anywhere: places of data, devices, hosts, loggers and plugins are the verifier's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calfat_plugin.analyses.attack_plan import AttackPlan, planned
from calfat_plugin.board.entry import BEFORE, LAST, TRUST_EVIDENCE, Entry
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.judging.examine import FILE as TRUST
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.plugin_files import PLUGINS, with_plugins
from calfat_plugin.registry import Registry
from calfat_plugin.results import EVIDENCE
from calfat_plugin.runs.compute import with_resolved_precision
from calfat_plugin.runs.directory import CLIENTS, RunDirectory

_DOWNLOAD: KeyPath = ("calfat", "dataset", "download")


@dataclass(frozen=True)
class Means:
    """What the verifier computes with."""

    data_dir: str | None = None  # None: the default of recipes
    download: bool = False
    device: str | None = None  # None: the CPU
    trusted: tuple[str, ...] = ()  # modules of entries whose code may be executed


def own_recipe(entry: Entry, seed: int, means: Means) -> Document:
    """The recipe of a seed with nothing in it that leads out of the entry; no code was executed."""
    document = entry.recipe(seed)
    if document.get(("common_args", "training_type")) != "simulation":
        raise RunError(f"{document.file}: is no simulation; its rounds cannot be trained again elsewhere.")
    for at in (("calfat", "evaluators"), ("calfat", "monitor", "evaluators")):
        for each in document.get(at) or ():
            if isinstance(each, Mapping) and each.get("source") is not None:
                raise RunError(f"{document.file}: '{each.get('name')}' reads {each['source']}, which is not followed.")
    own = {key: dict(value) if isinstance(value, Mapping) else value for key, value in document.data.items()}
    own.pop("device_args", None)
    own.pop("comm_args", None)
    for key in ("flower", "silo", "loggers", "reported"):
        own["calfat"].pop(key, None)
    document = Document(document.file, own, document.places)
    gpu = means.device is not None and means.device.startswith("cuda")
    values: dict[tuple[str, ...], Any] = {
        ("common_args", "host"): "fedml",
        ("data_args", "data_cache_dir"): means.data_dir or "~/data",
        ("device_args", "using_gpu"): gpu,
        ("device_args", "gpu_id"): int(str(means.device).rpartition(":")[2]) if gpu and ":" in str(means.device) else 0,
        ("calfat", "runtime", "executor"): "processes",
        ("calfat", "runtime", "scheduler"): None,
    }
    for path, value in values.items():
        if value is not None or document.has(path):
            document = document.with_value(path, value, "calfat board")
    if document.has(_DOWNLOAD):  # as in every recipe as run whose data set can be fetched
        document = document.with_value(_DOWNLOAD, means.download, "calfat board")
    return _with_trusted(document, entry, means)


def _with_trusted(document: Document, entry: Entry, means: Means) -> Document:
    """With the plugins' code as it lies in the entry, if all of it is trusted by name."""
    for name in document.section(PLUGINS):
        file, said = entry.folder / "plugins" / f"{name}.py", document.get((*PLUGINS, name, "sha256"))
        if name not in means.trusted:
            raise RunError(
                f"{entry.folder}: needs the plugin {name} (plugins/{name}.py, SHA-256 {said}), which is code of its "
                f"entrant. Read it, and if you trust it, add --trust-plugins {name}."
            )
        document = with_plugins(document, [file])
        if (now := document.get((*PLUGINS, name, "sha256"))) != said:
            raise RunError(f"{file}: its SHA-256 is {now}; the recipe was run with {said}.")
    return document


def own_run(entry: Entry, seed: int, means: Means, temporary: Path) -> tuple[Path, Experiment, AttackPlan]:
    """(run directory with the final model, its results and its evidence; its recipe; the plan to attack the model)."""
    experiment = own_experiment(own_recipe(entry, seed, means))
    run = RunDirectory(temporary / f"seed-{seed}")
    run.last_checkpoint.parent.mkdir(parents=True)
    run.write_recipe(experiment, RunDirectory(entry.of(seed)).recipe_digest)
    for file in ("results.json", EVIDENCE, TRUST, TRUST_EVIDENCE, LAST):
        if (entry.of(seed) / file).is_file():
            shutil.copyfile(entry.of(seed) / file, run.path / file)
    return run.path, experiment, planned(run.path, attacks=(), device=means.device)


def again(entry: Entry, seed: int, means: Means, temporary: Path, *, from_start: bool) -> tuple[Experiment, Path]:
    """(recipe, run directory) from which the last two rounds are trained again, or all of them."""
    document = own_recipe(entry, seed, means)
    document = document.with_value(("calfat", "evaluators"), ["natural"], "calfat board")
    document = document.with_value(("calfat", "evaluation", "evidence_mb"), 0, "calfat board")
    experiment = own_experiment(document)
    run = RunDirectory(temporary / f"again-{seed}")
    run.last_checkpoint.parent.mkdir(parents=True)
    run.write_recipe(experiment, RunDirectory(entry.of(seed)).recipe_digest)
    shutil.copyfile(entry.of(seed) / "partition.json", run.partition)
    if not from_start:
        shutil.copyfile(entry.of(seed) / BEFORE, run.last_checkpoint)
        for name in ("rounds.csv", "clients.csv"):
            if (entry.of(seed) / name).is_file():
                shutil.copyfile(entry.of(seed) / name, run.path / name)
        if (states := entry.of(seed) / "checkpoints" / CLIENTS).is_dir():
            shutil.copytree(states, run.client_states)
        run.begin(experiment.num_rounds - 2, experiment)  # without the rows of the rounds that are trained again
    return experiment, run.path


def own_experiment(document: Document) -> Experiment:
    """Assembled, in the arithmetic that is meant here."""
    return with_resolved_precision(assemble(document, Registry.for_recipe(document)))
