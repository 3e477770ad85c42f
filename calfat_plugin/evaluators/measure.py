"""Run a set of evaluators on one model, with the clean pass done once and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.errors import ModelError
from calfat_plugin.evaluators.base import refuse_training_mode
from calfat_plugin.evaluators.evidence import Collector
from calfat_plugin.interfaces import EvaluationTask, Evaluator, RoundClients
from calfat_plugin.maths.attacks import modes_of
from calfat_plugin.maths.losses import cross_entropy, falling
from calfat_plugin.maths.passes import PROBED, fast_passes
from calfat_plugin.maths.precision import float32_as
from calfat_plugin.models.building import refuse_changed
from calfat_plugin.profiling import timed
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import ThreatModel

_WATCHED = 64  # examples of each attack whose loss is compared with that of the clean images


def measure(
    model: nn.Module,
    data: ImageData,
    evaluators: Iterable[tuple[str, Evaluator]],
    *,
    num_classes: int,
    threat: ThreatModel,
    batch_size: int,
    device: torch.device,
    seed: int,
    round: int = 0,
    correct: Tensor | None = None,
    scratch: Path | None = None,
    on_progress: Callable[[str, int, int, int], None] = lambda label, done, total, correct: None,
    on_examples: Callable[[Tensor, Tensor], None] = lambda where, x_adv: None,
    clients: RoundClients | None = None,
    collector: Collector | None = None,
) -> dict[str, EvaluationResult]:
    """Label to result of evaluators, (label, evaluator) pairs that are set up, on ``model`` in evaluation mode.

    Args:
        correct: what :func:`clean_correct` gave for this very model and data; None: it is called here.
        on_examples: see ``EvaluationTask``; of several evaluators, the last one's examples come last.
        scratch: where a long evaluation keeps what it needs to continue after a crash.
        on_progress: called with (label, examples done, examples in all, correct so far).
        clients: of the round, for evaluators that look at them.
        collector: keeps adversarial images of attacks within ``threat``.
    """
    refuse_training_mode(model)
    if correct is None and collector is not None:
        correct = collector.correct
    if correct is None:
        with timed("clean examples"):
            correct = clean_correct(model, data, num_classes=num_classes, batch_size=batch_size, device=device)
    results = {}
    sample = pixels(data.x[:PROBED].to(device))
    with float32_as("fp32", device), fast_passes(model, sample) as rows_at_once:
        for label, evaluator in evaluators:
            collecting = collector if evaluator.gives_examples and evaluator.has_budget else None
            first = _FirstExamples(collecting.listener(label) if collecting else on_examples)
            task = EvaluationTask(
                model=model,
                data=data,
                num_classes=num_classes,
                threat=threat,
                batch_size=batch_size,
                device=device,
                seed=seed,
                round=round,
                clean_correct=correct.clone(),
                rows_at_once=rows_at_once,
                scratch=scratch,
                on_progress=partial(on_progress, label),
                on_examples=first,
            )
            if clients is not None and evaluator.uses_clients:
                task = replace(task, clients=lambda: clients)
            before = _versions(model)
            with timed(label):
                result = evaluator.evaluate(task, label)
            if _versions(model) != before:
                raise ModelError(
                    f"evaluator '{label}' changed the model it was to measure (weights, buffers or training mode), so "
                    "no number after it would be about the same model."
                )
            found = list(result.details.get("warnings", ()))
            if evaluator.has_budget:
                found += first.findings(model, data, device)
            if collecting:
                found += collecting.finished(result)
            results[label] = replace(result, details={**result.details, "warnings": found}) if found else result
    return results


@contextmanager
def on_model(task: EvaluationTask, model: nn.Module) -> Iterator[EvaluationTask]:
    """The same task on another model, in evaluation mode, of which nobody hears."""
    correct = clean_correct(
        model, task.data, num_classes=task.num_classes, batch_size=task.batch_size, device=task.device
    )
    with fast_passes(model, pixels(task.data.x[:PROBED].to(task.device))) as rows_at_once:
        yield replace(
            task,
            model=model,
            clean_correct=correct,
            rows_at_once=rows_at_once,
            scratch=None,
            on_progress=lambda done, total, correct: None,
            on_examples=lambda where, x_adv: None,
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
        if len(where) == 0:  # nobody asks the model for nothing
            return
        if self._room > 0:
            self._where.append(where[: self._room].cpu())
            self._x_adv.append(x_adv[: self._room].detach().clone())
            self._room -= len(where)
        self._on_examples(where, x_adv)

    def findings(self, model: nn.Module, data: ImageData, device: torch.device) -> list[dict[str, str]]:
        """A finding if the loss of the true label falls where it should rise; the global generators stay."""
        if not self._where:
            return []
        few = data.subset(torch.cat(self._where).numpy()).to(device)
        gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
        with torch.no_grad(), torch.random.fork_rng(devices=gpus):
            clean = cross_entropy(model(pixels(few.x)), few.y, reduction="none")
            attacked = cross_entropy(model(torch.cat(self._x_adv)), few.y, reduction="none")
        fell = falling(clean, attacked)
        if not fell:
            return []
        text = (
            f"on the first {len(few)} examples the loss of the true label falls from {float(clean.mean()):.3g} to "
            f"{float(attacked.mean()):.3g}, for {fell} of them: the attack goes down where it should climb. Has its "
            "loss the wrong sign? The accuracy under it says nothing."
        )
        return [{"code": "loss-falls", "text": text}]


def clean_correct(
    model: nn.Module, data: ImageData, *, num_classes: int, batch_size: int, device: torch.device
) -> Tensor:
    """Which clean examples the model gets right: (N,) bool on the CPU."""
    found = clean_predictions(model, data, num_classes=num_classes, batch_size=batch_size, device=device)
    return found == data.y.cpu()


def clean_predictions(
    model: nn.Module, data: ImageData, *, num_classes: int, batch_size: int, device: torch.device
) -> Tensor:
    """What the model says of clean examples: (N,) int64 on the CPU."""
    classes = []
    first = pixels(data.x[:PROBED].to(device))
    with torch.no_grad(), float32_as("fp32", device), fast_passes(model, first):
        for x, y, _ in batches(data, batch_size, device):
            logits = logits_of(model, x)
            if not isinstance(logits, Tensor) or logits.shape != (len(y), num_classes):
                found = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
                raise ModelError(
                    f"the model returned {found} for {len(y)} images of shape {tuple(x.shape[1:])}; "
                    f"expected logits of shape ({len(y)}, {num_classes})."
                )
            if not bool(logits.isfinite().all()):
                raise ModelError(f"the model returned nan or inf for clean images: {_cause_of_nan(model)}")
            classes.append(logits.argmax(dim=1).cpu())
    return torch.cat(classes)


def logits_of(model: nn.Module, x: Tensor) -> object:
    """What the model returns for images of which it is not yet known whether they fit it; a copy of them is asked."""
    asked = x.clone()
    try:
        answer = model(asked)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"{x.device} has no memory for a batch of {len(x)} images; take a smaller batch size "
            f"({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:  # somebody else's model may fail in any way
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        dtype = next((tensor.dtype for tensor in model.parameters() if tensor.dtype != x.dtype), None)
        hint = f"Its weights are {dtype}: call model.float() first." if dtype else "Is it the model of this data set?"
        raise ModelError(
            f"the model cannot take images of shape {tuple(x.shape[1:])} ({type(error).__name__}: {first}). {hint}"
        ) from error
    refuse_changed(asked, x, "the model")
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
    tensors = (*model.parameters(), *model.buffers())
    versions = ((id(tensor), None if tensor.is_inference() else tensor._version) for tensor in tensors)
    return [*versions, *(mode for _, mode in modes_of(model))]
