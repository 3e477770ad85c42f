"""``provenance.json``: which files an export was made from, by which commands, and what came of it.

The form is a statement of in-toto with SLSA's predicate for provenance, which tools that sign and verify artefacts
read: https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from calfat_plugin.analyses.exported import PROVENANCE
from calfat_plugin.disk import sha256_of
from calfat_plugin.exporting.sources import Checkpoint
from calfat_plugin.report.labels import command as command_of_run
from calfat_plugin.report.labels import command_text
from calfat_plugin.stored_run import Run
from calfat_plugin.version import __version__

_BUILD_TYPE = "tag:calfat-plugin,2026:export/1"  # what is built, and how externalParameters are to be read
_OF_TENSORS = "calfat-images-sha256"  # a digest of types, shapes and values, which is that of no file
_BUILDER = "tag:calfat-plugin,2026:calfat-export"


def write_provenance(folder: Path, checkpoint: Checkpoint, command: Sequence[str], started: float) -> None:
    """Write the statement about all files in ``folder``.

    Args:
        folder: what is exported, complete but for this file.
        checkpoint: what it was made from.
        command: of the export.
        started: when it began, in seconds since 1970.
    """
    import torch

    stored = checkpoint.stored
    exported = sorted(file for file in folder.rglob("*") if file.is_file())
    inputs = [checkpoint.run.weights]
    inputs += [stored.paths.recipe, stored.paths.environment, stored.paths.partition]
    inputs += [stored.directory / name for name in checkpoint.results]
    if checkpoint.evidence is not None:
        inputs.append(checkpoint.evidence)
    if checkpoint.trust is not None:
        inputs.append(stored.paths.trust)
    parameters = {
        "recipe": stored.name,
        "checkpoint": checkpoint.name,
        "round": checkpoint.round,
        "commands": _commands(checkpoint, command),
    }
    dependencies = [_descriptor(file, stored.directory) for file in inputs if file.is_file()]
    versions = {"calfat-plugin": __version__, "torch": torch.__version__, "python": platform.python_version()}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_descriptor(file, folder) for file in exported],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": parameters,
                "resolvedDependencies": [*dependencies, *_data(stored)],
            },
            "runDetails": {
                "builder": {"id": _BUILDER, "version": versions},
                "metadata": {"startedOn": _time(started), "finishedOn": _time(time.time())},
            },
        },
    }
    text = json.dumps(statement, indent=2, ensure_ascii=False)
    (folder / PROVENANCE).write_text(f"{text}\n", encoding="utf-8")


def _descriptor(file: Path, folder: Path) -> dict[str, Any]:
    return {"name": str(file.relative_to(folder)), "digest": {"sha256": sha256_of(file)}}


def _data(stored: Run) -> Iterator[dict[str, Any]]:
    """The data set and its split, whose digests the run noted; they are of images and labels, not of files."""
    partition, environment = stored.partition, stored.environment
    if partition.dataset_sha256:
        name = f"data set {stored.experiment.dataset.name}"
        yield {"name": name, "digest": {_OF_TENSORS: partition.dataset_sha256}}
    if partition.partition_sha256:
        yield {"name": "split", "digest": {_OF_TENSORS: partition.partition_sha256}}
    if environment is not None and environment.commit:
        commit = environment.commit
        digest = commit.removesuffix("-dirty")
        yield {"name": "source of the run", "digest": {"gitCommit": digest}, "annotations": {"described": commit}}


def _commands(checkpoint: Checkpoint, command: Sequence[str]) -> dict[str, str]:
    """What was called, with the place of secrets left empty."""
    commands = {"run": command_of_run(checkpoint.stored)}
    if checkpoint.trust is not None:
        commands["trust"] = command_text(checkpoint.trust.environment.command)
    return {**commands, "export": command_text(command)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
