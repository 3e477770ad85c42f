"""TensorBoard: scalars of each round in ``<run directory>/tensorboard``; look with ``tensorboard --logdir runs``."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.disk import expanded
from calfat_plugin.entries import LoggerEntry
from calfat_plugin.errors import PluginError
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers.base import final_scalars, public_recipe_text, round_scalars
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from calfat_plugin.results import RoundRecord, RunInfo, RunResult

FOLDER = "tensorboard"


@dataclass(frozen=True)
class TensorBoardOptions:
    """The options of the TensorBoard logger."""

    directory: str | None = option(None, help="where to write; null: the folder tensorboard of the run directory")


class TensorBoard:
    """Writes event files; each round is on disk when the next begins."""

    def __init__(self, options: TensorBoardOptions) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise PluginError("the package tensorboard is not installed: pip install 'calfat-plugin[tensorboard]'.")
        self._options = options
        self._writer: SummaryWriter | None = None

    @hookimpl
    def calfat_run_started(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        where = str(expanded(self._options.directory or run.directory / FOLDER))
        # After a crash there may be events of rounds that a resumed run does again: purge_step hides them.
        purge_step = None
        if run.start_round > 1:
            purge_step = run.start_round
        self._writer = SummaryWriter(where, purge_step=purge_step)
        if run.start_round == 1:
            self._writer.add_text("recipe", f"```yaml\n{public_recipe_text(run.recipe)}```")

    @hookimpl
    def calfat_round_finished(self, record: RoundRecord) -> None:
        self._write(round_scalars(record), record.round)

    @hookimpl
    def calfat_run_finished(self, result: RunResult) -> None:
        for evaluation in result.evaluations:
            self._write(final_scalars(evaluation), result.num_rounds)
        self._close()

    @hookimpl
    def calfat_run_stopped(self) -> None:
        self._close()

    def _write(self, numbers: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


ENTRY = LoggerEntry(
    "tensorboard",
    build=TensorBoard,
    config=TensorBoardOptions,
    summary="TensorBoard event files in the run directory; needs the extra tensorboard",
)
