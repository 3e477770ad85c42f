"""An attacker that trains honestly on wrong labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calfat_plugin.entries import AttackerEntry, paper
from calfat_plugin.errors import OptionError, PluginError
from calfat_plugin.interfaces import Attacker
from calfat_plugin.options import option

if TYPE_CHECKING:
    from calfat_plugin.datasets import ImageData
    from calfat_plugin.recipe.schema import Recipe


@dataclass(frozen=True)
class LabelFlipOptions:
    """Options of the label flip."""

    source: tuple[int, ...] | None = option(None, low=0, help="labels that are changed; null: all, y to C - 1 - y")
    target: tuple[int, ...] | None = option(
        None, low=0, help="what each of them becomes, in the same order; null: as source is"
    )

    def __post_init__(self) -> None:
        source, target = self.source or (), self.target or ()
        if len(source) != len(target) or len(set(source)) < len(source):
            raise OptionError(
                f"source and target: got {list(source)} and {list(target)}, expected two lists of one length, no label "
                "twice in source."
            )


class LabelFlip(Attacker):
    """Trains on y <- C - 1 - y (Karimireddy et al. 2021, section 6), or on chosen labels in the place of others."""

    options: LabelFlipOptions

    def poisoned(self, data: ImageData, num_classes: int) -> ImageData:
        import torch

        source, target = self.options.source, self.options.target
        if not source or not target:
            return replace(data, y=num_classes - 1 - data.y)
        if max(*source, *target) >= num_classes:
            raise PluginError(f"there is no label {max(*source, *target)}; the {num_classes} classes begin at 0.")
        becomes = torch.arange(num_classes, device=data.y.device)
        becomes[list(source)] = torch.tensor(target, device=data.y.device)
        return replace(data, y=becomes[data.y])


def _check(options: LabelFlipOptions, recipe: Recipe) -> None:
    """Refuse labels that there are not: else they show when the attacker first trains, perhaps in a late round."""
    classes = recipe.dataset.entry.num_classes
    labels = (*(options.source or ()), *(options.target or ()))
    if classes is not None and max(labels, default=0) >= classes:
        raise OptionError(
            f"source and target: got {max(labels)}, expected labels from 0 to {classes - 1}, those of the data set "
            f"'{recipe.dataset.name}'."
        )


ENTRY = AttackerEntry(
    "label_flip",
    build=LabelFlip,
    config=LabelFlipOptions,
    check=_check,
    summary="trains on wrong labels",
    formula="y <- C - 1 - y, or target_k where y is source_k",
    citation=paper("tolpegin2020data"),
)
