"""Run a set of evaluators on one model, with the clean pass done once and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.errors import ModelError
from calfat_plugin.evaluators.base import refuse_training_mode
from calfat_plugin.evaluators.evidence import Collector
from calfat_plugin.interfaces import EvaluationTask, Evaluator, SetUpTask
from calfat_plugin.interfaces.evaluation import no_clients
from calfat_plugin.maths.attacks import modes_of
from calfat_plugin.maths.losses import cross_entropy, falling
from calfat_plugin.maths.passes import PROBED, fast_passes, float32_as
from calfat_plugin.models.building import refuse_changed
from calfat_plugin.profiling import timed
from calfat_plugin.results import EvaluationResult

if TYPE_CHECKING:
    from calfat_plugin.recipe.schema import Recipe

#: Called with (label of the evaluator, examples done, examples in all, correct so far).
Progress = Callable[[str, int, int, int], None]

_WATCHED = 64  # examples of each attack whose loss is compared with that of the clean images


def no_progress(label: str, done: int, total: int, correct: int) -> None:
    """Inform nobody."""


def evaluation_task(
    model: nn.Module,
    data: ImageData,
    recipe: Recipe,
    set_up: SetUpTask,
    *,
    round: int = 0,
    scratch: Path | None = None,
) -> EvaluationTask:
    """What all evaluators of this model on these images are given; the model is asked about the clean images here.

    Args:
        model: in evaluation mode, on ``set_up.device``.
        recipe: its budget, batch size and seed are those of the task.
        set_up: what the evaluators were set up with.
        round: for the seeds; 0 for the final evaluation.
        scratch: where a long evaluation keeps what it needs to continue after a crash.
    """
    refuse_training_mode(model)
    batch_size = recipe.evaluation.batch_size
    with timed("clean examples"):
        clean = clean_predictions(
            model, data, num_classes=set_up.num_classes, batch_size=batch_size, device=set_up.device
        )
    return EvaluationTask(
        model=model,
        data=data,
        num_classes=set_up.num_classes,
        threat=recipe.threat,
        batch_size=batch_size,
        device=set_up.device,
        seed=recipe.seed,
        round=round,
        clean_predictions=clean,
        scratch=scratch,
    )


def with_model(task: EvaluationTask, model: nn.Module) -> EvaluationTask:
    """The same task on another model, in evaluation mode, which is asked about the clean images here."""
    clean = clean_predictions(
        model, task.data, num_classes=task.num_classes, batch_size=task.batch_size, device=task.device
    )
    return replace(task, model=model, clean_predictions=clean)


@contextmanager
def silently_on(task: EvaluationTask, model: nn.Module) -> Iterator[EvaluationTask]:
    """The same task on another model, without a scratch folder, progress and listeners to examples."""
    other = with_model(task, model)
    other = replace(other, scratch=None, on_progress=partial(no_progress, ""))
    other = replace(other, on_examples=lambda where, x_adv: None)
    with fast_passes(model, _first_images(task)) as rows_at_once:
        yield replace(other, rows_at_once=rows_at_once)


def measure(
    task: EvaluationTask,
    evaluators: Iterable[tuple[str, Evaluator]],
    *,
    on_progress: Progress = no_progress,
    collector: Collector | None = None,
) -> dict[str, EvaluationResult]:
    """Label to result of evaluators, (label, evaluator) pairs that are set up.

    Args:
        task: of all of them; its ``on_examples`` gets the examples of one evaluator after the other.
        on_progress: is informed of each.
        collector: keeps adversarial images of attacks within the task's budget, which ``task.on_examples`` then does
            not get.
    """
    refuse_training_mode(task.model)
    results = {}
    with float32_as("fp32", task.device), fast_passes(task.model, _first_images(task)) as rows_at_once:
        task = replace(task, rows_at_once=rows_at_once)
        for label, evaluator in evaluators:
            progress = partial(on_progress, label)
            results[label] = _measured(replace(task, on_progress=progress), label, evaluator, collector)
    return results


def _measured(task: EvaluationTask, label: str, evaluator: Evaluator, collector: Collector | None) -> EvaluationResult:
    """The result of one evaluator, with what is found out about its examples."""
    if evaluator.has_budget:
        _refuse_inference_tensors(task.model, label)
    if not (evaluator.gives_examples and evaluator.has_budget):
        collector = None
    listener = task.on_examples
    if collector is not None:
        listener = collector.listener(label)
    first_examples = _FirstExamples(listener)
    clients = task.clients
    if not evaluator.uses_clients:
        clients = no_clients
    # A copy of what is shared, so that an evaluator that writes to it spoils its own number alone.
    clean = task.clean_predictions.clone()
    before = _versions(task.model)
    with timed(label):
        result = evaluator.evaluate(
            replace(task, clean_predictions=clean, on_examples=first_examples, clients=clients), label
        )
    if _versions(task.model) != before:
        raise ModelError(
            f"evaluator '{label}' changed the model it was to measure (weights, buffers or training mode), so "
            "no number after it would be about the same model."
        )
    warnings = list(result.details.get("warnings", ()))
    if evaluator.has_budget:
        warnings += first_examples.findings(task)
    if collector is not None:
        warnings += collector.finished(result)
    if not warnings:
        return result
    return replace(result, details={**result.details, "warnings": warnings})


def _first_images(task: EvaluationTask) -> Tensor:
    """As many as ``fast_passes`` tries the model on."""
    return pixels(task.data.x[:PROBED].to(task.device))


def _refuse_inference_tensors(model: nn.Module, label: str) -> None:
    """Refuse to attack a model through whose weights torch lets no gradient pass."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ModelError(
                f"evaluator '{label}' needs gradients, and the model's tensor '{name}' was made inside "
                "torch.inference_mode(). Build the model outside of that block."
            )


class _FirstExamples:
    """The first adversarial examples of an evaluator, noted on their way to ``on_examples``.

    An attack that climbs, however weakly, raises the loss of the true label; noise lets it fall for about half of the
    images. Where it falls for nearly all, the attack goes down, and the accuracy under it is no upper bound.
    """

    def __init__(self, on_examples: Callable[[Tensor, Tensor], None]) -> None:
        self._on_examples = on_examples
        self._where: list[Tensor] = []
        self._x_adv: list[Tensor] = []
        self._room = _WATCHED

    def __call__(self, where: Tensor, x_adv: Tensor) -> None:
        if len(where) == 0:  # the model is not asked about an empty batch
            return
        if self._room > 0:
            self._where.append(where[: self._room].cpu())
            self._x_adv.append(x_adv[: self._room].detach().clone())
            self._room -= len(where)
        self._on_examples(where, x_adv)

    def findings(self, task: EvaluationTask) -> list[dict[str, str]]:
        """A finding if the loss of the true label falls where it should rise; the global generators stay."""
        if not self._where:
            return []
        few = task.data.subset(torch.cat(self._where).numpy()).to(task.device)
        gpus = range(0)
        if task.device.type == "cuda":
            gpus = range(torch.cuda.device_count())
        with torch.no_grad(), torch.random.fork_rng(devices=gpus):
            clean = cross_entropy(task.model(pixels(few.x)), few.y, reduction="none")
            attacked = cross_entropy(task.model(torch.cat(self._x_adv)), few.y, reduction="none")
        fell = falling(clean, attacked)
        if not fell:
            return []
        text = (
            f"on the first {len(few)} examples the loss of the true label falls from {float(clean.mean()):.3g} to "
            f"{float(attacked.mean()):.3g}, for {fell} of them: the attack goes down where it should climb. Has its "
            "loss the wrong sign? The accuracy under it says nothing."
        )
        return [{"code": "loss-falls", "text": text}]


# --- the model and the clean images -----------------------------------------------------------------------------------


def clean_predictions(
    model: nn.Module, data: ImageData, *, num_classes: int, batch_size: int, device: torch.device
) -> Tensor:
    """The class that the model gives each clean example, (N,) int64 on the CPU; an answer that is none is refused."""
    classes = []
    first = pixels(data.x[:PROBED].to(device))
    with torch.no_grad(), float32_as("fp32", device), fast_passes(model, first):
        for x, y, _ in batches(data, batch_size, device):
            logits = logits_of(model, x)
            if not isinstance(logits, Tensor):
                raise _other_shape(f"a {type(logits).__name__}", x, num_classes)
            if logits.shape != (len(y), num_classes):
                raise _other_shape(str(tuple(logits.shape)), x, num_classes)
            if not bool(logits.isfinite().all()):
                raise ModelError(f"the model returned nan or inf for clean images: {_cause_of_nan(model)}")
            classes.append(logits.argmax(dim=1).cpu())
    return torch.cat(classes)


def _other_shape(got: str, x: Tensor, num_classes: int) -> ModelError:
    return ModelError(
        f"the model returned {got} for {len(x)} images of shape {tuple(x.shape[1:])}; "
        f"expected logits of shape ({len(x)}, {num_classes})."
    )


def logits_of(model: nn.Module, x: Tensor) -> object:
    """What the model returns for images of which it is not yet known whether they fit it; a copy of them is asked."""
    copy = x.clone()
    try:
        answer = model(copy)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"{x.device} has no memory for a batch of {len(x)} images; take a smaller batch size "
            f"({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:  # somebody else's model may fail in any way
        lines = str(error).strip().splitlines() or ["no message"]
        hint = "Is it the model of this data set?"
        for tensor in model.parameters():
            if tensor.dtype != x.dtype:
                hint = f"Its weights are {tensor.dtype}: call model.float() first."
                break
        raise ModelError(
            f"the model cannot take images of shape {tuple(x.shape[1:])} ({type(error).__name__}: {lines[0]}). {hint}"
        ) from error
    refuse_changed(copy, x, "the model")
    return answer


def _cause_of_nan(model: nn.Module) -> str:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        broken = int(tensor.isfinite().logical_not().sum())
        if broken:
            return (
                f"{broken} of {tensor.numel()} values of its tensor '{name}' are not finite. The training diverged "
                "(lower train_args.learning_rate), or the checkpoint is damaged."
            )
    return "its weights are finite, so the numbers grow too large on the way."


def _versions(model: nn.Module) -> list[object]:
    """Changes when a tensor of the model is written to or replaced, or a module changes mode."""
    versions: list[object] = []
    for tensor in (*model.parameters(), *model.buffers()):
        version = None
        if not tensor.is_inference():  # torch counts no versions of tensors of inference mode
            version = tensor._version
        versions.append((id(tensor), version))
    for _, training in modes_of(model):
        versions.append(training)
    return versions
