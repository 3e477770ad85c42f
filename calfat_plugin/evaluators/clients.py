"""Evaluators that are given the clients of the round, and attack their models: internal and personalised."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from calfat_plugin.datasets import ImageData, pixels
from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import BudgetError, ModelError, OptionError, UpdateError
from calfat_plugin.evaluators.base import budget_as_json, check_budget, counts_of, refuse_training_mode, share
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.transfer import FromModel
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.metrics import client_accuracy, worst_of
from calfat_plugin.options import option
from calfat_plugin.results import EvaluationResult

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.recipe.schema import Recipe

_COUNTING = "right clean and at the images of every client's model"
_NO_POINTS = "no client's model gave a finite point for any image, so there was nothing to attack with"
_NO_CLIENTS = "no client's model gave finite answers on clean images, so there was nothing to attack with"


class Internal(PGD):
    """PGD on the model that each client of the round sent; an image counts if the global model withstands all."""

    options: PGDOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "attack": "internal", "counting": _COUNTING}

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Let each client's model attack all models.

        A client whose model gives nan or inf on clean images is left out, and named in ``details``.
        """
        import torch

        refuse_training_mode(task.model)
        started = time.perf_counter()
        task = self.narrow(task)
        clients = task.clients()
        right_of_client, unusable = _clean(task)
        models = len(right_of_client)
        withstood = torch.ones(len(task.data), dtype=torch.bool)
        matrix: list[list[float]] = []  # of each client's images: accuracy of the global model, then of each client's
        results: list[EvaluationResult] = []
        for position, source in enumerate(right_of_client):
            points = pixels(task.data.x).clone()
            task_of_source = _watched(task, points, position, models, withstood)
            results.append(FromModel(self.options, clients.model(source)).evaluate(task_of_source, label))
            right = _right(task.model, task, points)
            where = torch.arange(len(right))
            if position > 0:
                where = (~right).nonzero().flatten()
            task.on_examples(where, points[where.to(points.device)].to(task.device))  # the last that broke each image
            withstood &= right
            row = [share(right & task.clean_correct)]
            for target, right_when_clean in right_of_client.items():  # one model at a time: there may be a hundred
                row.append(share(right_when_clean & _right(clients.model(target), task, points)))
            matrix.append(row)
        budget = budget_as_json(self.threat(task))
        settings = {**budget, **self.settings(task), **budget}
        why_no_number = _NO_CLIENTS
        details: dict[str, Any] = {}
        if results:
            why_no_number = _NO_POINTS
            details.update(results[0].details)
        details["zero_gradients"] = max((result.details.get("zero_gradients", 0) for result in results), default=0)
        details["clients"] = list(right_of_client)
        details["natural"] = [share(task.clean_correct), *map(share, right_of_client.values())]
        details["matrix"] = matrix
        if unusable:
            details["unusable"] = unusable
        if all(result.not_run for result in results):
            return EvaluationResult.without_number(
                label, why_no_number, settings=settings, implementation=self.implementation, details=details
            )
        return EvaluationResult(
            **counts_of(task.data.y, task.clean_correct, withstood, task.num_classes),
            label=label,
            settings=settings,
            implementation=self.implementation,
            seconds=time.perf_counter() - started,
            details=details,
            metrics=_among_others(matrix),
        )


def _among_others(matrix: list[list[float]]) -> dict[str, float]:
    """Lowest and mean accuracy of a model under another client's images; nothing where there are none."""
    accuracies = []
    for client, row in enumerate(matrix):
        for column, accuracy in enumerate(row):
            if column != client + 1:  # not under its own; column 0 is the global model
                accuracies.append(accuracy)
    if not accuracies:
        return {}
    return {"worst": min(accuracies), "mean": sum(accuracies) / len(accuracies)}


def _clean(task: EvaluationTask) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Client to the verdicts of its model on the clean images, (N,) bool; and to why there are none."""
    from calfat_plugin.evaluators.measure import with_model

    clients = task.clients()
    right_of_client: dict[int, Tensor] = {}
    unusable: dict[int, str] = {}
    for client in clients.ids:
        try:
            right_of_client[client] = with_model(task, clients.model(client)).clean_correct
        except ModelError as error:
            unusable[client] = str(error)
    return right_of_client, unusable


def _right(model: nn.Module, task: EvaluationTask, points: Tensor) -> Tensor:
    """(N,) bool on the CPU, which points the model gets right; an answer with nan or inf is wrong."""
    import torch

    from calfat_plugin.datasets.batches import batches

    verdicts = []
    with torch.no_grad():
        for x, y, _ in batches(ImageData(points, task.data.y), task.batch_size, task.device):
            logits = model(x)
            verdicts.append(((logits.argmax(dim=1) == y) & logits.isfinite().all(dim=1)).cpu())
    return torch.cat(verdicts)


def _watched(task: EvaluationTask, points: Tensor, position: int, models: int, withstood: Tensor) -> EvaluationTask:
    """The task of one client's model, whose adversarial images are written into ``points``.

    Its progress is that of all models together, of which so many were tried before this one.
    """
    examples = len(withstood)

    def keep(where: Tensor, x_adv: Tensor) -> None:
        points[where.to(points.device)] = x_adv.to(points.device)

    def progress(done: int, total: int, correct: int) -> None:
        so_far = position * examples + done
        task.on_progress(so_far, models * examples, so_far * int(withstood.sum()) // examples)

    return replace(task, on_examples=keep, on_progress=progress)


INTERNAL = EvaluatorEntry(
    "internal",
    build=Internal,
    config=PGDOptions,
    summary="PGD on each client's own model, against the global model and those of the other clients",
    formula="x'_k <- Proj(x'_k + step_size sign grad CE(f_k(x'_k), y)) on client k's f_k, counted on f and each f_j",
    citation=paper("kim2023characterizing"),
    number_option="steps",
    check=check_budget,
    metrics={
        "worst": "lowest accuracy of a model, global or a client's, under the images of another client's",
        "mean": "mean of these accuracies over all pairs",
    },
    uses_clients=True,
)


# --- personalised accuracy: each client's own model, and the global one after fine-tuning, on its label mix ----------

_KINDS = {"own": "each client's own model", "tuned": "the global model fine-tuned by each client"}
_MEASURED = {"natural": "accuracy", "robust": "accuracy under the attack"}


def _metrics() -> dict[str, str]:
    """Name of each metric to what it says."""
    metrics = {}
    for kind, model in _KINDS.items():
        for measured, number in _MEASURED.items():
            text = f"{number} of {model} on its own label mix"
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
        examples = len(task.data)
        models = 1 + len(_KINDS) * len(clients.honest)

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
        metrics: dict[str, float] = {}
        for kind, measured_as in product(_KINDS, _MEASURED):
            name = f"{kind}_{measured_as}"
            known = {client: row[name] for client, row in rows.items() if row[name] is not None}
            worst = worst_of(known)
            if worst is not None:
                metrics[name] = sum(known.values()) / len(known)
                metrics[f"{name}_worst"] = worst.accuracy
        return replace(result, metrics=metrics, details={**result.details, "clients": rows})

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
            none_right = task.clean_correct.new_zeros(len(task.data))
            natural = robust = counts_of(task.data.y, none_right, none_right, task.num_classes)["per_class"]
            failure = str(error)
        row: dict[str, Any] = {
            f"{kind}_natural": client_accuracy(natural, counts),
            f"{kind}_robust": client_accuracy(robust, counts),
        }
        if failure:
            row[f"{kind}_failed"] = failure
        return row


def _check(options: PersonalisedOptions, recipe: Recipe) -> None:
    check_budget(options, recipe)
    if recipe.common.training_type != "simulation":
        raise OptionError(
            "'personalised' fine-tunes the global model on each client's data, which across silos the server does not "
            "have. Remove it, or set common_args.training_type: simulation."
        )


PERSONALISED = EvaluatorEntry(
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

ENTRIES = (INTERNAL, PERSONALISED)
