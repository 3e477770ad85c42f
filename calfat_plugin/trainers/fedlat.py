"""Fed-LAT: adversarial training of a network that is linearised where clean training has led it (Luo 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.options import NoOptions
from calfat_plugin.trainers.fedpgd import FedPGD

if TYPE_CHECKING:
    from torch import nn

    from calfat_plugin.recipe.schema import Recipe
    from calfat_plugin.results import LocalUpdate


class FedLAT(FedPGD):
    """Standard training for ``calfat.trainer.clean_rounds``; then FedPGD of the model linearised at their outcome."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from calfat_plugin.models.networks import Linearised

        return Linearised(super().adapt_model(model))

    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train for one round, of whose phase the model is before the loop chooses its layout in memory."""
        from calfat_plugin.models.networks import Linearised

        assert isinstance(task.model, Linearised)
        if task.round > task.clean_rounds and not task.model.linear:  # the outcome of clean training
            task.model.linearise()  # later models come linearised
        return super().fit(task)


def _check(options: NoOptions, recipe: Recipe) -> None:
    clean_rounds = recipe.additions.clean_rounds
    for group in recipe.clients:
        others = group.recipe.additions.clean_rounds
        if group.recipe.trainer.entry.name == "fedlat" and others != clean_rounds:
            raise OptionError(
                f"clean_rounds: got {clean_rounds} beside {others} for other clients; expected the same for all, who "
                "train one model."
            )
    if clean_rounds and recipe.ema is not None:
        raise OptionError(
            f"clean_rounds: got {clean_rounds} beside calfat.ema, which would average the networks of clean rounds "
            "with the linear models that follow; expected clean_rounds: 0, or a recipe without that section."
        )


def _warn(options: NoOptions, recipe: Recipe) -> str:
    if recipe.additions.clean_rounds or recipe.document.has((*recipe.trainer.path, "clean_rounds")):
        return ""
    return (
        "linearises the network at its initial weights, which know nothing. Its authors train 100 rounds on clean "
        "images first: add clean_rounds."
    )


ENTRY = TrainerEntry(
    "fedlat",
    build=FedLAT,
    reshapes=True,
    check=_check,
    warn=_warn,
    summary="standard training, then adversarial training of the model that is linear in its weights there",
    formula="w0 = argmin CE(f(x; w), y); min_w CE(g(x~; w), y), g(x; w) = f(x; w0) + J_w f(x; w0) (w - w0), "
    "x~ = argmax CE(g(x'; w), y)",
    modifiers=("plain", "calibrated"),
    citation=paper("luo2026fedlat"),
)
