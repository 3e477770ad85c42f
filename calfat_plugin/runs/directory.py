"""A run directory: created once, written as the run goes on, and found again by ``--resume``.

::

    runs/<recipe>/<seed>-<time>/
        recipe.yaml       as run, every default and derived value written out
        environment.json  versions, device, threads, commit
        rounds.csv        a row a round
        results.json      the final evaluation; its presence says that the run is finished
        checkpoints/      last, best-natural, best-robust
        log.txt           the log of the host and of ours
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from calfat_plugin.errors import RecipeError, RunError
from calfat_plugin.experiment import Experiment, assemble, same_but_rounds
from calfat_plugin.recipe.document import read_document

DEFAULT_ROOT = Path("runs")
_ATTEMPTS = 100


class RunDirectory:
    """Paths and files of one run. Use :meth:`create`, :meth:`open_for_resume` or :meth:`latest_unfinished`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    recipe = property(lambda self: self.path / "recipe.yaml", doc="The recipe as run.")
    environment = property(lambda self: self.path / "environment.json", doc="What it ran on.")
    rounds = property(lambda self: self.path / "rounds.csv", doc="A row a round.")
    results = property(lambda self: self.path / "results.json", doc="The final evaluation.")
    log = property(lambda self: self.path / "log.txt", doc="The log.")
    last_checkpoint = property(lambda self: self.checkpoint("last"), doc="The checkpoint to resume from.")

    def checkpoint(self, name: str) -> Path:
        """Path of a checkpoint: ``last``, ``best-natural`` or ``best-robust``."""
        return self.path / "checkpoints" / f"{name}.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the final evaluation is there."""
        return bool(self.results.exists())

    @classmethod
    def create(cls, experiment: Experiment, path: Path | None) -> RunDirectory:
        """Make the directory and write the recipe as run.

        Args:
            experiment: what will run.
            path: ``--run-dir``; None: ``runs/<recipe>/<seed>-<time>``.

        Raises:
            RunError: it holds a run already, or cannot be written.
        """
        chosen = cls(new_path(experiment) if path is None else path)
        if chosen.recipe.exists():
            raise RunError(
                f"{chosen.path}: there is a run in this directory already. "
                "Add --resume to go on with it, or choose another --run-dir."
            )
        try:
            chosen.checkpoint("last").parent.mkdir(parents=True, exist_ok=True)
            write_text(chosen.recipe, _recipe_text(experiment))
        except OSError as error:
            raise RunError(f"{chosen.path}: the run directory cannot be written ({error.strerror}).") from None
        return chosen

    @classmethod
    def latest_unfinished(cls, experiment: Experiment) -> RunDirectory:
        """The newest unfinished run of this recipe and seed.

        Raises:
            RunError: there is none.
        """
        parent = DEFAULT_ROOT / experiment.recipe.name
        runs = sorted(parent.glob(f"{experiment.seed}-*/recipe.yaml"), reverse=True)
        for recipe in runs:
            run = cls(recipe.parent)
            if not run.finished or _rounds_asked(recipe) < experiment.num_rounds:
                return run
        found = f"{len(runs)} finished" if runs else "none at all"
        raise RunError(
            f"{parent}: no unfinished run with seed {experiment.seed} to resume ({found}). "
            "Start one without --resume, or point to one with --run-dir."
        )

    def check_same(self, experiment: Experiment) -> None:
        """Refuse to go on with another recipe than the run was started with; more rounds are welcome.

        Raises:
            RunError: with the first keys that differ.
        """
        try:
            started = assemble(read_document(self.recipe), experiment.registry)
        except RecipeError as error:
            raise RunError(f"{self.path}: cannot be resumed: {error}") from None
        then, now = started.as_run(), experiment.as_run()
        different = same_but_rounds(then, now)
        if different:
            shown = "; ".join(f"{key}: {_at(then, key)!r} when started, {_at(now, key)!r} now" for key in different[:3])
            more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
            raise RunError(
                f"{self.path}: the recipe is not the one this run was started with. {shown}{more}. "
                f"Resume with the run's own recipe: calfat run {self.recipe} --resume --run-dir {self.path}"
            )
        write_text(self.recipe, _recipe_text(experiment))

    def discard(self) -> None:
        """Remove a run that has nothing worth keeping, and the recipe's folder if that leaves it empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in (self.path.parent, self.path.parent.parent):
            if parent.resolve().is_relative_to(DEFAULT_ROOT.resolve()):
                with suppress(OSError):  # it holds other runs
                    parent.rmdir()

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write JSON atomically; anything that JSON cannot hold is our bug and raises ``TypeError``."""
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically and durably."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _recipe_text(experiment: Experiment) -> str:
    header = f"# {experiment.recipe.document.file} as run: every default and derived value is written out.\n"
    return header + yaml.safe_dump(experiment.as_run(), sort_keys=False, width=120)


def new_path(experiment: Experiment) -> Path:
    """A path that no run has; two runs started within a second get different ones."""
    stem = f"{experiment.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent = DEFAULT_ROOT / experiment.recipe.name
    for attempt in range(_ATTEMPTS):
        path = parent / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path}: the run directory cannot be created ({error.strerror}).") from None
    raise RunError(f"{parent / stem}: {_ATTEMPTS} runs were started in this second; choose a --run-dir.")


def _rounds_asked(recipe: Path) -> int:
    rounds = read_document(recipe).get(("train_args", "comm_round"))
    return rounds if isinstance(rounds, int) else 0


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value
