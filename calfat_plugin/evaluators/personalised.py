"""Personalised accuracy: each client's own model, and the global one after fine-tuning, on the client's label mix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import BudgetError, ModelError, OptionError, UpdateError
from calfat_plugin.evaluators.base import check_budget, counts_of
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.metrics import client_accuracy, worst_of
from calfat_plugin.options import option
from calfat_plugin.results import EvaluationResult

if TYPE_CHECKING:
    from torch import nn

    from calfat_plugin.recipe.schema import Recipe

_KINDS = {"own": "each client's own model", "tuned": "the global model fine-tuned by each client"}
_MEASURED = {"natural": "accuracy", "robust": "accuracy under the attack"}


def _metrics() -> dict[str, str]:
    """Name of each metric to what it says."""
    metrics = {}
    for kind, model in _KINDS.items():
        for measured, what in _MEASURED.items():
            text = f"{what} of {model} on its own label mix"
            metrics[f"{kind}_{measured}"] = f"{text}: mean over clients"
            metrics[f"{kind}_{measured}_worst"] = f"{text}: mean of the worst 10 %"
    return metrics


@dataclass(frozen=True)
class PersonalisedOptions(PGDOptions):
    """Options of personalised; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    epochs: int = option(1, low=1, help="local epochs of fine-tuning")


class Personalised(PGD):
    """PGD on the global model, whose accuracy it is, and on two models of each honest client of the round."""

    options: PersonalisedOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "attack": "personalised", "epochs": self.options.epochs}

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Attack the global model, then those of each client.

        A model of nan or inf, and a fine-tuning that diverges, count 0; ``details`` says so.
        """
        task = self.narrow(task)
        clients = task.clients()
        examples, models = len(task.data), 1 + len(_KINDS) * len(clients.honest)

        def progress(done: int, total: int, correct: int) -> None:
            task.on_progress(done, models * examples, correct)

        result = super().evaluate(replace(task, on_progress=progress), label)
        measured = 1
        rows: dict[int, dict[str, Any]] = {}
        for client in clients.honest:
            models_of_client = {
                "own": partial(clients.model, client),
                "tuned": partial(clients.fine_tuned, client, self.options.epochs),
            }
            rows[client] = {}
            for kind, make in models_of_client.items():
                rows[client] |= self._of_client(task, label, kind, make, clients.class_counts(client))
                measured += 1
                progress(measured * examples, 0, round(measured * examples * (result.accuracy or 0)))
        return replace(result, metrics=_over_clients(rows), details={**result.details, "clients": rows})

    def _of_client(
        self, task: EvaluationTask, label: str, kind: str, make: Callable[[], nn.Module], counts: Sequence[int]
    ) -> dict[str, Any]:
        """``<kind>_natural`` and ``<kind>_robust``, each None where no class of the client has test examples."""
        from calfat_plugin.evaluators.measure import silently_on

        failure = ""
        try:
            with silently_on(task, make()) as task_of_client:
                robust = super().evaluate(task_of_client, label).per_class
                right = task_of_client.clean_correct
                natural = counts_of(task.data.y, right, right, task.num_classes)["per_class"]
        except (UpdateError, ModelError, BudgetError) as error:
            examples = task.data.y.bincount(minlength=task.num_classes).tolist()
            natural = robust = tuple(0.0 if number else None for number in examples)
            failure = str(error)
        row: dict[str, Any] = {
            f"{kind}_natural": client_accuracy(natural, counts),
            f"{kind}_robust": client_accuracy(robust, counts),
        }
        if failure:
            row[f"{kind}_failed"] = failure
        return row


def _over_clients(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Every metric that is known of some client."""
    metrics: dict[str, float] = {}
    for kind, measured in product(_KINDS, _MEASURED):
        name = f"{kind}_{measured}"
        known = {client: row[name] for client, row in rows.items() if row[name] is not None}
        worst = worst_of(known)
        if worst is not None:
            metrics[name] = sum(known.values()) / len(known)
            metrics[f"{name}_worst"] = worst.accuracy
    return metrics


def _check(options: PersonalisedOptions, recipe: Recipe) -> None:
    check_budget(options, recipe)
    if recipe.common.training_type != "simulation":
        raise OptionError(
            "'personalised' fine-tunes the global model on each client's data, which across silos the server does not "
            "have. Remove it, or set common_args.training_type: simulation."
        )


ENTRY = EvaluatorEntry(
    "personalised",
    build=Personalised,
    config=PersonalisedOptions,
    summary="each client's own model, and the global one fine-tuned by it, on its own label mix",
    formula="mean over clients of sum_c n_kc acc_c(f_k) / sum_c n_kc, with f_k as sent, and after E epochs from f",
    citation=paper("wang2019federated"),
    check=_check,
    metrics=_metrics(),
    uses_clients=True,
)
