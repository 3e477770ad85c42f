"""Adversarial images that another model made, counted on the one that is measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.disk import expanded, sha256_of
from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.base import check_budget
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.interfaces import EvaluationTask, SetUpTask
from calfat_plugin.maths.passes import fast_passes
from calfat_plugin.options import option
from calfat_plugin.results import EvaluationResult

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.threat import ThreatModel


_USABLE = "usable points"  # the tally of points that the source gave as finite numbers
_NO_POINT = "its source gave no finite point for any image, so there was nothing to attack with"


class FromModel(PGD):
    """PGD on a source, in evaluation mode on the device of what is measured; all else is as of PGD."""

    def __init__(self, options: PGDOptions, source: nn.Module | None = None) -> None:
        super().__init__(options)
        self.source = source

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """As PGD; without a number where the source gave no point to count."""
        result = super().evaluate(task, label)
        details = dict(result.details)
        if details.pop(_USABLE) > 0:
            return dataclasses.replace(result, details=details)
        return EvaluationResult.without_number(
            label, _NO_POINT, settings=result.settings, implementation=result.implementation, details=details
        )

    def _climb(
        self, task: EvaluationTask, threat: ThreatModel, x: Tensor, y: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As PGD on the source; where that gives no finite point (a diverged or hostile one), the clean image.

        The model that is measured decides which images are attacked from another start.
        """
        import torch

        assert self.source is not None
        with fast_passes(self.source, x) as rows:
            on_source = dataclasses.replace(task, model=self.source, rows_at_once=rows)
            points, vanished = super()._climb(on_source, threat, x, y, start)
        task.tally(_USABLE, int(points.isfinite().flatten(1).all(dim=1).sum()))
        return torch.where(points.isfinite(), points, x), vanished


@dataclass(frozen=True)
class TransferOptions(PGDOptions):
    """Options of transfer; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    source: str = option(help="what makes the images: a run directory (its last checkpoint), a checkpoint, or weights")
    model: str | None = option(
        None, help="how the model of weights is built: package.module:factory, or a model's name; null: as its run says"
    )
    sha256: str | None = option(None, help="of the source's file; null: as it is now. A recipe as run has it")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sha256 is None:  # so that a run goes on with the very source that it was started with
            object.__setattr__(self, "sha256", self.digest())

    def digest(self) -> str | None:
        """SHA-256 of the source's file as it is now, in hexadecimal digits; None: it cannot be read."""
        path = expanded(self.source)
        if path.is_dir():
            path = path / "checkpoints" / "last.safetensors"
        try:
            return _digest(path, path.stat().st_mtime_ns, path.stat().st_size)
        except OSError:  # a client of another machine need not have it; else loading it raises the error
            return None


@cache
def _digest(path: Path, changed: int, size: int) -> str:
    """Cached, because the recipe of a suite is read for each of its runs."""
    return sha256_of(path)


class Transfer(FromModel):
    """PGD on a fixed other model."""

    options: TransferOptions

    def set_up(self, task: SetUpTask) -> None:
        """Load the source."""
        options = self.options
        now = options.digest()
        if now not in (None, options.sha256):
            raise RunError(
                f"{options.source}: this source has changed: its SHA-256 was {str(options.sha256)[:12]}…, it is "
                f"{str(now)[:12]}… now. Restore it, or start a new run with it as it is."
            )
        self.source = task.load_model(options.source, options.model)

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        options = self.options
        settings = {**super().settings(task), "attack": "transfer", "source": options.source}
        if options.model is not None:
            settings["source_model"] = options.model
        if options.sha256 is not None:
            settings["source_sha256"] = options.sha256
        return settings


ENTRY = EvaluatorEntry(
    "transfer",
    build=Transfer,
    config=TransferOptions,
    summary="PGD on another model, whose images are counted on this one",
    formula="x' <- Proj(x' + step_size sign grad CE(g(x'), y)) with another model g, counted on f",
    citation=paper("papernot2016transferability"),
    number_option="steps",
    check=check_budget,
)
