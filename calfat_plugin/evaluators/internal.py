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
        started, task = time.perf_counter(), self.narrow(task)
        clients, budget = task.clients(), budget_as_json(self.threat(task))
        clean, unusable = _clean(task)
        withstood = torch.ones(len(task.data), dtype=torch.bool)
        matrix: list[list[float]] = []
        found: list[EvaluationResult] = []
        for position, source in enumerate(clean):
            part = replace(task, on_progress=_progress(task, position, len(clean), withstood))
            result, points = self._attacked(part, clients.model(source), label)
            found.append(result)
            right = _right(task.model, task, points)
            where = torch.arange(len(right)) if position == 0 else (~right).nonzero().flatten()
            task.on_examples(where, points[where.to(points.device)].to(task.device))  # the last that broke each image
            withstood &= right
            row = [share(right & task.clean_correct.cpu())]
            for target, verdicts in clean.items():  # one model at a time: there may be a hundred
                row.append(share(verdicts & _right(clients.model(target), task, points)))
            matrix.append(row)
        of_others = [one for own, row in enumerate(matrix, start=1) for at, one in enumerate(row) if at != own]
        zero_gradients = max((result.details.get("zero_gradients", 0) for result in found), default=0)
        settings = {**budget, **self.settings(task), **budget}
        details = {
            **(found[0].details if found else {}),
            "zero_gradients": zero_gradients,
            "clients": list(clean),
            "natural": [share(task.clean_correct), *map(share, clean.values())],
            "matrix": matrix,
            **({"unusable": unusable} if unusable else {}),
        }
        if all(result.not_run for result in found):
            return EvaluationResult.without_number(
                label,
                _NO_POINTS if found else _NO_CLIENTS,
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
            metrics={"worst": min(of_others), "mean": sum(of_others) / len(of_others)} if of_others else {},
        )

    def _attacked(self, task: EvaluationTask, source: nn.Module, label: str) -> tuple[EvaluationResult, Tensor]:
        """What the images of one source do to the global model, and the images."""
        points = pixels(task.data.x).clone()

        def keep(where: Tensor, x_adv: Tensor) -> None:
            points[where.to(points.device)] = x_adv.to(points.device)

        return FromModel(self.options, source).evaluate(replace(task, on_examples=keep), label), points


def _clean(task: EvaluationTask) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Client to the verdicts of its model on the clean images, (N,) bool; and to why there are none."""
    from calfat_plugin.evaluators.measure import clean_correct

    clients, found, unusable = task.clients(), dict[int, "Tensor"](), dict[int, str]()
    sizes = {"num_classes": task.num_classes, "batch_size": task.batch_size}
    for client in clients.ids:
        try:
            found[client] = clean_correct(clients.model(client), task.data, device=task.device, **sizes)
        except ModelError as error:
            unusable[client] = str(error)
    return found, unusable


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
