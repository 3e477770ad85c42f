"""Weights & Biases: one W&B run for a run of ours, offline by default, so that nothing leaves the machine unasked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from calfat_plugin.entries import LoggerEntry
from calfat_plugin.errors import PluginError
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers.base import final_scalars, public_recipe, round_scalars
from calfat_plugin.options import option

if TYPE_CHECKING:
    from calfat_plugin.results import RoundRecord, RunInfo, RunResult


@dataclass(frozen=True)
class WandbOptions:
    """The options of the W&B logger."""

    project: str = option("calfat", help="project of the W&B run")
    entity: str | None = option(None, help="user or team; null: the account's default")
    mode: str = option(
        "offline",
        choices=("offline", "online"),
        help="offline: files in the run directory, sent later by `wandb sync`; online: sent while the run lasts",
    )


class Wandb:
    """Logs scalars and the parts of the recipe that hold no secret."""

    def __init__(self, options: WandbOptions) -> None:
        try:
            import wandb
        except ImportError as error:
            raise PluginError(f"wandb cannot be imported ({error}): pip install 'calfat-plugin[wandb]'.") from error
        # Without a key W&B asks for one on the terminal, and the run would wait for an answer to a question in its log.
        if options.mode == "online" and not wandb.api.api_key:
            raise PluginError("mode: online needs an API key: run `wandb login` once, or set WANDB_API_KEY.")
        self._options = options
        self._run: Any = None

    @hookimpl
    def calfat_run_started(self, run: RunInfo) -> None:
        import wandb

        # An id that is the same each time this run directory is continued.
        identity = hashlib.sha256(os.fspath(run.directory.resolve()).encode()).hexdigest()[:16]
        # The same directory is the same W&B run, also after --resume; offline, `wandb sync` puts them together.
        resume = None
        if self._options.mode == "online":
            resume = "allow"
        with _at_home_in(run.directory):
            self._run = wandb.init(
                project=self._options.project,
                entity=self._options.entity,
                mode=self._options.mode,
                name=f"{run.name}/{run.directory.name}",
                id=identity,
                resume=resume,
                reinit=True,  # a suite runs several in one process
                dir=os.fspath(run.directory),
                config=public_recipe(run.recipe),
                save_code=False,
                settings=wandb.Settings(
                    start_method="thread",
                    console="off",  # the run's log has it
                    _disable_meta=True,  # the command line may hold a secret
                    disable_git=True,
                    disable_code=True,
                ),
            )

    @hookimpl
    def calfat_round_finished(self, record: RoundRecord) -> None:
        self._run.log(round_scalars(record), step=record.round)

    @hookimpl
    def calfat_run_finished(self, result: RunResult) -> None:
        for evaluation in result.evaluations:
            self._run.summary.update(final_scalars(evaluation))
        self._run.finish(exit_code=0)

    @hookimpl
    def calfat_run_stopped(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)


@contextmanager
def _at_home_in(directory: Path) -> Iterator[None]:
    """Let W&B write from a thread of this process, and into the run directory only.

    Its service, a process that answers on a socket, refuses connections while a busy machine is still starting it, and
    then lives on with our standard output in hand: whoever reads that through a pipe waits for ever. Where the user has
    no W&B settings, it would create a folder for them in the home directory.
    """
    with mock.patch.dict(os.environ, WANDB_DISABLE_SERVICE="true"):
        os.environ.pop("WANDB_REQUIRE_SERVICE", None)  # set when wandb is imported
        if not (Path.home() / ".config" / "wandb").exists():
            os.environ.setdefault("WANDB_CONFIG_DIR", os.fspath(directory / "wandb"))
        yield


ENTRY = LoggerEntry("wandb", build=Wandb, config=WandbOptions, summary="Weights & Biases, offline by default")
