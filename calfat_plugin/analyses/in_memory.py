"""Evaluators on any model and any images in memory, for Python programs and notebooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from calfat_plugin.datasets.findings import image_findings
from calfat_plugin.errors import DataError, ModelError, OptionError, one_line
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.experiment.resolve import recipe_of_own_model
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult
from calfat_plugin.runs.loaded_run import Trust, model_loader
from calfat_plugin.threat import Norm, ThreatModel

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from calfat_plugin.datasets import Dataset, ImageData
    from calfat_plugin.interfaces import SetUpTask

    Labels: TypeAlias = Tensor | ArrayLike
    Images: TypeAlias = Tensor | ArrayLike | DataLoader[Any] | ImageData | Dataset

Number = float | str | Fraction


@fresh_torch_state()
def evaluate(
    model: nn.Module,
    x: Images,
    y: Labels | None = None,
    evaluators: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    *,
    eps: Number | None = None,
    norm: Norm = "linf",
    step_size: Number | None = None,
    batch_size: int = 500,
    seed: int = 0,
    on_progress: Callable[[str, int, int, int], None] | None = None,
) -> dict[str, EvaluationResult]:
    """Measure any model, on the device where it is.

    Args:
        model: in evaluation mode; it takes pixels in [0, 1] and returns raw logits (N, C).
        x: (N, C, H, W) images, a tensor or an array, floats in [0, 1] or uint8 in 0..255; or a ``DataLoader`` of
            (images, labels) batches, an ``ImageData``, or a ``Dataset``, whose ``test`` it is then, without ``y``.
        y: (N,) labels, whole numbers from 0.
        evaluators: as recipes write them: names such as ``"pgd20"``, or mappings with a name and options.
        eps: the budget of attacks, a fraction of the pixel range: 0.1 or ``"8/255"``.
        norm: of the budget: ``"linf"``, ``"l2"`` or ``"l1"``.
        step_size: of attacks that take steps, a number or a multiple of eps such as ``"eps/10"``; None: ``eps/4``.
        batch_size: images a batch.
        seed: of random starts.
        on_progress: called with (label, examples done, examples in all, correct so far).

    Returns:
        Label to result, in the order given.

    Raises:
        CalfatError: something does not fit; the text says what.

    Warns:
        UserWarning: a finding about the images (nearly black, of one colour) or about these numbers, as ``calfat
            attack`` prints it (masked gradients and the like).
    """
    from calfat_plugin.evaluators.measure import evaluation_task, measure, no_progress

    items: Sequence[object] = (y,)
    if isinstance(y, (list, tuple)):
        items = y
    if not evaluators and any(isinstance(item, (str, Mapping)) for item in items):
        raise OptionError(
            f"y: got {one_line(y)}; expected labels. Evaluators go by keyword: evaluate(model, data, "
            f"evaluators={one_line(y)}), or evaluate(model, x, y, evaluators={one_line(y)})."
        )
    if isinstance(evaluators, (str, Mapping)):
        picks: Sequence[str | Mapping[str, Any]] = [evaluators]
    else:
        picks = evaluators
    if not picks:
        raise OptionError("evaluators: name at least one, such as natural or pgd20.")
    experiment = experiment_of(picks, eps, norm, step_size, batch_size, seed)
    data = images_of(x, y)
    for text in image_findings(data, "images"):
        warnings.warn(text, stacklevel=3)  # the caller, outside of the decorator
    set_up = set_up_task_of(model, data)
    ready = experiment.ready_evaluators(experiment.evaluators, set_up)
    task = evaluation_task(model, data, experiment, set_up)
    results = measure(task, ready, on_progress=on_progress or no_progress)
    for alarm in find_alarms(results.values()):
        warnings.warn(f"{alarm.code}: {alarm.text}", stacklevel=3)  # the caller, outside of the decorator
    return results


@fresh_torch_state()
def attack(
    name: str | Mapping[str, Any],
    model: nn.Module,
    x: Images,
    y: Labels | None = None,
    *,
    eps: Number | None = None,
    norm: Norm = "linf",
    step_size: Number | None = None,
    batch_size: int = 500,
    seed: int = 0,
) -> Tensor:
    """Adversarial examples, checked against the budget: those that ``evaluate`` counts with the same arguments.

    Args:
        name: an evaluator as recipes write it, such as ``"pgd20"``.
        model: in evaluation mode; it takes pixels in [0, 1] and returns raw logits (N, C).
        x: (N, C, H, W) images, a tensor or an array, floats in [0, 1] or uint8 in 0..255; or a ``DataLoader`` of
            (images, labels) batches that does not shuffle, an ``ImageData``, or the ``test`` of a ``Dataset``, without
            ``y``.
        y: (N,) labels, whole numbers from 0.
        eps: the budget, a fraction of the pixel range: 0.1 or ``"8/255"``.
        norm: of the budget: ``"linf"``, ``"l2"`` or ``"l1"``.
        step_size: of attacks that take steps, a number or a multiple of eps such as ``"eps/10"``; None: ``eps/4``.
        batch_size: images a batch.
        seed: of random starts.

    Returns:
        (N, C, H, W) float32 in [0, 1], on the device of ``x``. Images that were not attacked, or that AutoAttack could
        not break, are as they were.

    Raises:
        CalfatError: something does not fit, or the evaluator makes no adversarial examples (``natural``).

    Warns:
        UserWarning: a finding about the images (nearly black, of one colour).
    """
    from calfat_plugin.datasets import pixels
    from calfat_plugin.evaluators.measure import evaluation_task, measure

    experiment = experiment_of([name], eps, norm, step_size, batch_size, seed)
    ((label, evaluator),) = experiment.build_evaluators(experiment.evaluators)
    if not evaluator.gives_examples:
        raise OptionError(f"evaluator '{label}' makes no adversarial examples; name an attack, such as pgd20.")
    data = images_of(x, y, keeps_order=True)
    for text in image_findings(data, "images"):
        warnings.warn(text, stacklevel=3)  # the caller, outside of the decorator
    x_adv = pixels(data.x).clone()

    def keep(where: Tensor, points: Tensor) -> None:
        x_adv[where.to(x_adv.device)] = points.detach().to(x_adv.device)

    set_up = set_up_task_of(model, data)
    ready = experiment.ready_evaluators(experiment.evaluators, set_up)
    task = evaluation_task(model, data, experiment, set_up)
    measure(replace(task, on_examples=keep), ready)
    return x_adv


def experiment_of(
    evaluators: Sequence[str | Mapping[str, Any]],
    eps: Number | None,
    norm: Norm,
    step_size: Number | None,
    batch_size: int,
    seed: int,
) -> Experiment:
    """The arguments as a recipe, which types and checks them; its data set and its model are not used."""
    budget: dict[str, Any] = {"norm": norm}
    if eps is not None:
        budget["eps"] = eps
    if step_size is not None:
        budget["step_size"] = step_size
    threat = ThreatModel(**budget)  # it reads any number
    picks: list[str | dict[str, Any]] = []
    for pick in evaluators:
        if isinstance(pick, Mapping):
            pick = dict(pick)
        picks.append(pick)
    document = recipe_of_own_model(
        "evaluators",
        [
            (("calfat", "evaluators"), picks, f"evaluators {one_line(picks)}"),
            (("calfat", "threat", "norm"), norm, f"norm={one_line(norm)}"),
            (("calfat", "threat", "eps"), threat.eps, f"eps={one_line(eps)}"),
            (("calfat", "threat", "step_size"), threat.step_size, f"step_size={one_line(step_size)}"),
            (("calfat", "evaluation", "batch_size"), batch_size, f"batch_size={one_line(batch_size)}"),
            (("common_args", "random_seed"), seed, f"seed={one_line(seed)}"),
        ],
    )
    experiment = assemble(document, Registry.load())
    if eps is not None:
        return experiment
    built = experiment.build_evaluators(experiment.evaluators)
    for plugin, (label, evaluator) in zip(experiment.evaluators, built, strict=True):
        if evaluator.has_budget and getattr(plugin.options, "eps", None) is None:
            raise OptionError(f"evaluator '{label}' needs eps, a fraction of the pixel range such as 0.1 or '8/255'.")
    return experiment


def images_of(x: Images, y: Labels | None, *, keeps_order: bool = False) -> ImageData:
    """Images and labels, checked."""
    from torch.utils.data import DataLoader, RandomSampler

    from calfat_plugin.datasets import Dataset, ImageData
    from calfat_plugin.datasets.data import check_pixels

    has_labels = isinstance(x, (DataLoader, ImageData, Dataset))
    if has_labels and y is not None:
        raise DataError(f"y is given beside a {type(x).__name__}, which has labels of its own; leave one of them out.")
    if isinstance(x, Dataset):
        data = x.test
    elif isinstance(x, ImageData):
        data = x
    elif isinstance(x, DataLoader):
        if keeps_order and isinstance(x.sampler, RandomSampler):
            raise DataError(
                "the DataLoader shuffles, so nobody could tell whose examples are whose; take shuffle=False."
            )
        data = ImageData(*_loaded(x))
    elif y is None:
        raise DataError("y is missing: the labels of the images. A DataLoader or an ImageData has them with it.")
    else:
        data = ImageData(x, y)
    if not len(data):
        raise DataError("there are no images in x.")
    check_pixels(data)
    return data


def _loaded(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """All images and labels of a DataLoader, in its order."""
    import torch

    images, labels = [], []
    for batch in loader:
        if not isinstance(batch, (tuple, list)):
            raise DataError(f"a batch of the DataLoader is a {type(batch).__name__}; expected (images, labels).")
        if [type(part) for part in batch] != [torch.Tensor, torch.Tensor]:
            raise DataError(
                f"a batch of the DataLoader is a {type(batch).__name__} of {len(batch)}; expected (images, labels)."
            )
        images.append(batch[0])
        labels.append(batch[1])
    if not images:
        raise DataError("there are no images in x.")
    try:
        return torch.cat(images), torch.cat(labels)
    except RuntimeError as error:
        raise DataError(f"the batches of the DataLoader do not go together: {error}.") from None


def set_up_task_of(model: nn.Module, data: ImageData, trust: Trust | None = None) -> SetUpTask:
    """What evaluators of this model are set up with, on the device where it is."""
    from torch import nn

    from calfat_plugin.evaluators.base import refuse_training_mode
    from calfat_plugin.interfaces import SetUpTask

    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module.")
    refuse_training_mode(model)
    device = data.x.device
    for tensor in (*model.parameters(), *model.buffers()):
        device = tensor.device
        break
    num_classes = _num_classes(model, data, device)
    low, high = int(data.y.min()), int(data.y.max())
    if low < 0 or high >= num_classes:
        raise DataError(f"labels run from {low} to {high}; the model knows 0 to {num_classes - 1}.")
    shape = SetUpTask(num_classes, data.x.shape[1], (data.x.shape[2], data.x.shape[3]), device)
    return replace(shape, load_model=model_loader(None, shape, device, trust))


def _num_classes(model: nn.Module, data: ImageData, device: torch.device) -> int:
    """As many as the model gives logits; by the labels of a model whose answer is of another shape, refused later."""
    import torch

    from calfat_plugin.datasets import pixels
    from calfat_plugin.evaluators.measure import logits_of

    with torch.no_grad():
        logits = logits_of(model, pixels(data.x[:1]).to(device))
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        return int(data.y.max()) + 1
    if logits.shape[1] == 1:
        raise ModelError(
            "the model returns one logit for an image, so any answer is right; expected one for each class. Let one "
            "with a sigmoid return two, 0 and its logit."
        )
    return logits.shape[1]
