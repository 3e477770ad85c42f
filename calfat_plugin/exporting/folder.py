"""``calfat export``: a model in a folder that other programs read, with a card, checked against its evidence."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack import AttackPlan, loaded, planned
from calfat_plugin.analyses.exported import config_of, remember
from calfat_plugin.analyses.replay import replay
from calfat_plugin.disk import TRY_AGAIN, read_whole, reporting_disk_errors, scratch_folder
from calfat_plugin.errors import DataError, ModelError, RunError
from calfat_plugin.exporting.card import CARD, Replayed, card_text
from calfat_plugin.exporting.provenance import write_provenance
from calfat_plugin.exporting.sources import Checkpoint
from calfat_plugin.observer import Observer
from calfat_plugin.runs.compute import computing_as
from calfat_plugin.runs.loaded_run import LoadedRun, Trust, distrust
from calfat_plugin.stored_run import Run

if TYPE_CHECKING:
    from torch import nn

_MAX_NOTES = 1_000_000  # bytes of --card


@dataclass(frozen=True)
class Export:
    """What ``calfat export`` wrote.

    Attributes:
        folder: where it is.
        files: the names of its files, in it.
        left_out: name of a file to why it is not there.
        replayed: name of a model file to what the evidence shows of it, with images as they were kept (``exact``) and
            with 8 bits a value (``eight_bit``).
        not_replayed: why the evidence was not shown to the model files; empty where it was.
    """

    folder: Path
    files: tuple[str, ...]
    left_out: Mapping[str, str]
    replayed: Mapping[str, Replayed]
    not_replayed: str = ""

    @property
    def stands(self) -> bool:
        """Whether all numbers stand on every model file that was asked, with the images as they were kept."""
        return all(replayed.exact.stands for replayed in self.replayed.values())

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        replays = {}
        for name, replayed in self.replayed.items():
            replays[name] = {"exact": replayed.exact.as_json(), "eight_bit": replayed.eight_bit.as_json()}
        return {
            "folder": str(self.folder),
            "files": list(self.files),
            "left_out": dict(self.left_out),
            "stands": self.stands,
            "replayed": replays,
            "not_replayed": self.not_replayed,
        }


def write_export(
    target: Path,
    folder: Path | None = None,
    *,
    notes: Path | None = None,
    command: Sequence[str] = (),
    observer: Observer,
    trust: Trust = distrust,
    **request: Any,
) -> Export:
    """Write the folder, show the evidence to its model files, and only then put it in its place.

    Args:
        target: a run directory, or one of its checkpoints.
        folder: where to write; None: ``export`` in the run directory, and ``export-<checkpoint>`` for another than the
            last checkpoint.
        notes: a Markdown file with the user's own text for the card.
        command: the command line, for the provenance.
        observer: is told what is done.
        trust: is asked about plugin files of the run that this user has not run before.
        request: further fields of an ``AttackRequest``: the checkpoint, plugins, where the data are.

    Raises:
        RunError: the folder exists, or there is no such run.
    """
    started = time.time()
    plan = planned(target, attacks=("natural",), device="cpu", trust=trust, **request)
    assert plan.run is not None  # the plan has a target
    stored = Run.load(plan.run)
    if folder is None:
        stem = plan.weights.stem
        folder = plan.run / ("export" if stem == "last" else f"export-{stem}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder}: exists already. Choose another place with --to, or remove it.")
    text = "" if notes is None else _read_notes(notes)
    with reporting_disk_errors(folder, TRY_AGAIN):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with computing_as(stored.experiment), scratch_folder(folder.parent, ".export-") as scratch:
        run, not_replayed = _with_images(plan, observer)
        model = run.model()
        checkpoint = Checkpoint(stored, run)
        config = config_of(run, model)
        left_out = _write_model(scratch, run, model, config)
        replayed = {}
        if checkpoint.evidence is None:
            not_replayed = not_replayed or "no adversarial images of this checkpoint are kept"
        elif not not_replayed:
            replayed = _replayed(scratch, run, checkpoint.evidence, observer)
        with reporting_disk_errors(folder, TRY_AGAIN):
            card = card_text(scratch, checkpoint, config, replayed, not_replayed, left_out, text)
            (scratch / CARD).write_text(card, encoding="utf-8")
            write_provenance(scratch, checkpoint, command, started)
            names = sorted(str(file.relative_to(scratch)) for file in scratch.rglob("*") if file.is_file())
            folder.mkdir(exist_ok=True)
            for part in scratch.iterdir():
                shutil.move(part, folder / part.name)
    return Export(folder, tuple(names), left_out, replayed, not_replayed)


def _read_notes(notes: Path) -> str:
    try:
        return read_whole(notes, _MAX_NOTES).decode()
    except OSError as error:
        raise RunError(f"--card {notes}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise RunError(f"--card {notes}: is no UTF-8 text.") from None


def _with_images(plan: AttackPlan, observer: Observer) -> tuple[LoadedRun, str]:
    """(the run, why its images are not here); a model can be exported without its data."""
    import torch

    try:
        return loaded(plan, observer), ""
    except DataError as error:
        observer.warn(f"{error} The model is exported, but the evidence cannot be shown to it.")
        device = torch.device("cpu")
        return LoadedRun(plan.experiments[0], plan.weights, plan.run, device), "its images are not here"


def _write_model(scratch: Path, run: LoadedRun, model: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
    """Write the model files; returns those that are left out, with why."""
    from safetensors.torch import save

    from calfat_plugin.maths.tied import state_of
    from calfat_plugin.model_files import CONFIG, ONNX, PT2, WEIGHTS, missing_for_onnx, traced, write_onnx, write_pt2
    from calfat_plugin.tensor_files import apart

    with reporting_disk_errors(scratch, TRY_AGAIN):
        (scratch / WEIGHTS).write_bytes(save(apart(state_of(model)), {"format": "pt"}))
        (scratch / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        program = traced(model, run.images)
    except ModelError as error:
        return {PT2: str(error), ONNX: str(error)}
    write_pt2(scratch / PT2, program, config)
    remember(scratch / PT2)
    missing = missing_for_onnx()
    if missing:
        return {ONNX: missing}
    try:
        write_onnx(scratch / ONNX, program, config)
    except ModelError as error:
        return {ONNX: str(error)}
    return {}


def _replayed(scratch: Path, run: LoadedRun, evidence: Path, observer: Observer) -> dict[str, Replayed]:
    """Show the evidence to each model file, in its own runtime."""
    from calfat_plugin.model_files import ONNX, PT2

    replayed = {}
    for name in (PT2, ONNX):
        path = scratch / name
        if path.is_file():
            observer.say(f"replaying {evidence.name} on {name}")
            exact = replay(run, evidence, model_file=path)
            replayed[name] = Replayed(exact, replay(run, evidence, model_file=path, eight_bit=True))
    return replayed
