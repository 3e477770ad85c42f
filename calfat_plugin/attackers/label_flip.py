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
        source = self.source or ()
        target = self.target or ()
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

        source = self.options.source
        target = self.options.target
        if not source or not target:
            return replace(data, y=num_classes - 1 - data.y)
        largest = max(*source, *target)
        if largest >= num_classes:
            raise PluginError(f"there is no label {largest}; the {num_classes} classes begin at 0.")
        new_label = torch.arange(num_classes, device=data.y.device)
        new_label[list(source)] = torch.tensor(target, device=data.y.device)
        return replace(data, y=new_label[data.y])


def _check(options: LabelFlipOptions, recipe: Recipe) -> None:
    """Refuse labels that the data set does not have. The attacker itself would only do so when it first trains."""
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
