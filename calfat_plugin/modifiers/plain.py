"""No modification: the method's own losses on raw logits."""

from __future__ import annotations

from functools import partial

from calfat_plugin.entries import ModifierEntry
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.modifiers.priors import LossOfClient

ENTRY = ModifierEntry(
    "plain",
    build=partial(LossOfClient, lambda options, class_counts: ClientLoss()),
    summary="the method's own losses, unchanged",
    formula="CE(z, y)",
)
