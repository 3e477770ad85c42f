"""Fed-LAT: adversarial training of a network that is linearised where clean training has led it (Luo 2026)."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.options import option
from calfat_plugin.trainers.fedpgd import FedPGD

if TYPE_CHECKING:
    from torch import nn

    from calfat_plugin.recipe.schema import Recipe
    from calfat_plugin.results import LocalUpdate


@dataclass(frozen=True)
class FedLATOptions:
    """When the network is linearised."""

    clean_rounds: int = option(
        100,
        low=0,
        help="rounds of standard training, whose outcome is w0; the others train adversarially",
        unit="rounds",
    )


class FedLAT(FedPGD):
    """Standard training for ``clean_rounds``; then FedPGD of the model linearised at their outcome."""

    options: FedLATOptions

    def adapt_model(self, model: nn.Module) -> nn.Module:
        from calfat_plugin.models.linearised import Linearised

        return Linearised(super().adapt_model(model))

    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train for one round, of whose phase the model is before the loop chooses its layout in memory."""
        from calfat_plugin.models.linearised import Linearised

        of_round = copy(self)
        of_round.attacks = task.round > self.options.clean_rounds
        assert isinstance(task.model, Linearised)
        if of_round.attacks and not task.model.linear:  # the outcome of clean training; later models come linearised
            task.model.linearise()
        return super(FedLAT, of_round).fit(task)


def _check(options: FedLATOptions, recipe: Recipe) -> None:
    clean, rounds = options.clean_rounds, recipe.train.comm_round
    picked = (recipe.trainer.options, *(group.recipe.trainer.options for group in recipe.clients))
    others = {other.clean_rounds for other in picked if isinstance(other, FedLATOptions)} - {clean}
    if others:
        raise OptionError(
            f"clean_rounds: got {clean} beside {min(others)} for other clients; expected the same for all, who train "
            "one model."
        )
    if clean >= rounds:
        raise OptionError(
            f"clean_rounds: got {clean} of {rounds} rounds (train_args.comm_round), which leaves none to train "
            f"adversarially; expected at most {rounds - 1}, or more rounds."
        )
    if clean and recipe.ema is not None:
        raise OptionError(
            f"clean_rounds: got {clean} beside calfat.ema, which would average the networks of clean rounds with the "
            "linear models that follow; expected clean_rounds: 0, or a recipe without that section."
        )
    start = getattr(recipe.aggregator.options, "start_round", clean + 1)
    if recipe.aggregator.name == "sfat" and start <= clean:
        raise OptionError(
            f"clean_rounds: got {clean}, and SFAT would rank clients from round {start} on "
            "(calfat.aggregator.start_round) by an adversarial loss, which clean rounds do not have; expected a "
            f"start_round of at least {clean + 1}."
        )


ENTRY = TrainerEntry(
    "fedlat",
    build=FedLAT,
    config=FedLATOptions,
    reshapes=True,
    check=_check,
    summary="standard training, then adversarial training of the model that is linear in its weights there",
    formula="w0 = argmin CE(f(x; w), y); min_w CE(g(x~; w), y), g(x; w) = f(x; w0) + J_w f(x; w0) (w - w0), "
    "x~ = argmax CE(g(x'; w), y)",
    modifiers=("plain", "calibrated"),
    citation=paper("luo2026fedlat"),
)
