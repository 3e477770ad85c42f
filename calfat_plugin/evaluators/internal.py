"""Attacks from inside: adversarial images made with each client's model, against the global one and each other's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calfat_plugin.datasets import ImageData, pixels
from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import ModelError
from calfat_plugin.evaluators.base import budget_as_json, check_budget, counts_of, refuse_training_mode, share
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.transfer import FromModel
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.results import EvaluationResult

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        withstood = torch.ones(len(task.data), dtype=torch.bool)
        matrix: list[list[float]] = []  # of each client's images: accuracy of the global model, then of each client's
        results: list[EvaluationResult] = []
        for position, source in enumerate(right_of_client):
            on_progress = _progress(task, position, len(right_of_client), withstood)
            result, points = self._attacked(replace(task, on_progress=on_progress), clients.model(source), label)
            results.append(result)
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
        natural = [share(task.clean_correct), *map(share, right_of_client.values())]
        details = _details(results, {"clients": list(right_of_client), "natural": natural, "matrix": matrix})
        if unusable:
            details["unusable"] = unusable
        if all(result.not_run for result in results):
            return EvaluationResult.without_number(
                label,
                _NO_POINTS if results else _NO_CLIENTS,
                settings=settings,
                implementation=self.implementation,
                details=details,
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

    def _attacked(self, task: EvaluationTask, source: nn.Module, label: str) -> tuple[EvaluationResult, Tensor]:
        """What the images of one source do to the global model, and the images."""
        points = pixels(task.data.x).clone()

        def keep(where: Tensor, x_adv: Tensor) -> None:
            points[where.to(points.device)] = x_adv.to(points.device)

        return FromModel(self.options, source).evaluate(replace(task, on_examples=keep), label), points


def _details(results: list[EvaluationResult], of_all: dict[str, Any]) -> dict[str, Any]:
    """Details of the first source's images, with the most zero gradients of any, and those of all together."""
    details: dict[str, Any] = {}
    if results:
        details.update(results[0].details)
    details["zero_gradients"] = max((result.details.get("zero_gradients", 0) for result in results), default=0)
    return {**details, **of_all}


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


def _progress(task: EvaluationTask, position: int, count: int, withstood: Tensor) -> Callable[[int, int, int], None]:
    examples = len(withstood)

    def progress(done: int, total: int, correct: int) -> None:
        so_far = position * examples + done
        task.on_progress(so_far, count * examples, so_far * int(withstood.sum()) // examples)

    return progress


ENTRY = EvaluatorEntry(
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
