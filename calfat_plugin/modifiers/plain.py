"""No modification: the method's own losses on raw logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import ModifierEntry
from calfat_plugin.interfaces import ClientLoss, LossModifier
from calfat_plugin.options import NoOptions

if TYPE_CHECKING:
    from torch import Tensor


class Plain(LossModifier):
    """Leaves every logit as it is."""

    def __init__(self, options: NoOptions) -> None:
        self.options = options

    def bind(self, class_counts: Tensor) -> ClientLoss:
        return ClientLoss()


ENTRY = ModifierEntry(
    "plain",
    build=Plain,
    summary="the method's own losses, unchanged",
    formula="CE(z, y)",
)
