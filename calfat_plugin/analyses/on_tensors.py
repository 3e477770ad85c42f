"""Evaluators on any model and any images in memory, for Python programs and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack_plan import DEFAULT_RATIO
from calfat_plugin.errors import DataError, ModelError, OptionError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import Document
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import Norm, ThreatModel, exact_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor, nn

    from calfat_plugin.datasets import ImageData

Number = float | str | Fraction


def evaluate(
    model: nn.Module,
    x: Tensor | ArrayLike,
    y: Tensor | ArrayLike,
    evaluators: Sequence[str | Mapping[str, Any]],
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
        x: (N, C, H, W) images, floats in [0, 1] or uint8.
        y: (N,) labels, whole numbers from 0.
        evaluators: as recipes write them: names such as ``"pgd20"``, or mappings with a name and options.
        eps: the budget of attacks, a fraction of the pixel range: 0.1 or ``"8/255"``.
        norm: of the budget: ``"linf"``, ``"l2"`` or ``"l1"``.
        step_size: of attacks that take steps; None: a quarter of ``eps``.
        batch_size: images a batch.
        seed: of random starts.
        on_progress: called with (label, examples done, examples in all, correct so far).

    Returns:
        Label to result, in the order given.

    Raises:
        CalfatError: something does not fit; the text says what.
    """
    experiment = _experiment(
        [evaluators] if isinstance(evaluators, str) else evaluators, eps, norm, step_size, batch_size, seed
    )
    return _measure(experiment, model, _images(x, y), on_progress=on_progress or _ignore)


def attack(
    name: str | Mapping[str, Any],
    model: nn.Module,
    x: Tensor | ArrayLike,
    y: Tensor | ArrayLike,
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
        x: (N, C, H, W) images, floats in [0, 1] or uint8.
        y: (N,) labels, whole numbers from 0.
        eps: the budget, a fraction of the pixel range: 0.1 or ``"8/255"``.
        norm: of the budget: ``"linf"``, ``"l2"`` or ``"l1"``.
        step_size: of attacks that take steps; None: a quarter of ``eps``.
        batch_size: images a batch.
        seed: of random starts.

    Returns:
        (N, C, H, W) float32 in [0, 1], on the device of ``x``. Images that were not attacked, or that AutoAttack could
        not break, are as they were.

    Raises:
        CalfatError: something does not fit, or the evaluator makes no adversarial examples (``natural``).
    """
    from calfat_plugin.datasets import pixels

    experiment = _experiment([name], eps, norm, step_size, batch_size, seed)
    ((label, evaluator),) = experiment.build_evaluators(experiment.evaluators)
    if not evaluator.gives_examples:
        raise OptionError(f"evaluator '{label}' makes no adversarial examples; name an attack, such as pgd20.")
    data = _images(x, y)
    found = pixels(data.x).clone()

    def keep(where: Tensor, x_adv: Tensor) -> None:
        found[where.to(found.device)] = x_adv.detach().to(found.device)

    _measure(experiment, model, data, on_examples=keep)
    return found


def _ignore(*arguments: object) -> None:
    pass


def _experiment(
    evaluators: Sequence[str | Mapping[str, Any]],
    eps: Number | None,
    norm: Norm,
    step_size: Number | None,
    batch_size: int,
    seed: int,
) -> Experiment:
    """The arguments as a recipe, which types and checks them; its data set and its model are not used.

    Raises:
        CalfatError: an argument is no good, or an attack lacks its eps.
    """
    budget: dict[str, Any] = {"norm": norm} if eps is None else {"norm": norm, "eps": eps}  # it reads any number
    threat = ThreatModel(**budget)
    budget["step_size"] = (threat.eps * DEFAULT_RATIO or threat.step_size) if step_size is None else step_size
    threat = ThreatModel(**budget)
    picks = [dict(pick) if isinstance(pick, Mapping) else pick for pick in evaluators]
    document = Document("evaluators", {}, {})
    for path, value, place in (
        (("calfat", "evaluators"), picks, f"evaluators {picks!r}"),
        (("calfat", "threat", "norm"), norm, f"norm={norm!r}"),
        (("calfat", "threat", "eps"), exact_text(threat.eps), f"eps={eps!r}"),
        (("calfat", "threat", "step_size"), exact_text(threat.step_size), f"step_size={step_size!r}"),
        (("calfat", "evaluation", "batch_size"), batch_size, f"batch_size={batch_size!r}"),
        (("common_args", "random_seed"), seed, f"seed={seed!r}"),
    ):
        document = document.with_value(path, value, place)
    experiment = assemble(document, Registry.load())
    for pick in experiment.evaluators if eps is None else ():
        ((label, evaluator),) = experiment.build_evaluators((pick,))
        if getattr(evaluator, "has_budget", True) and getattr(pick.options, "eps", None) is None:
            raise OptionError(f"evaluator '{label}' needs eps, a fraction of the pixel range such as 0.1 or '8/255'.")
    return experiment


def _images(x: Tensor | ArrayLike, y: Tensor | ArrayLike) -> ImageData:
    """Images and labels, checked; integers of any width become labels, floats of any width pixels.

    Raises:
        DataError: they are no images with their labels, or pixels lie outside [0, 1].
    """
    import torch

    from calfat_plugin.datasets import ImageData

    try:
        images, labels = torch.as_tensor(x).detach(), torch.as_tensor(y).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"x and y must be tensors or arrays of numbers: {error}.") from None
    if images.is_floating_point():
        images = images.float()
    if not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool):
        labels = labels.to(images.device, torch.int64)
    data = ImageData(images, labels)
    if not len(data):
        raise DataError("there are no images in x.")
    if data.x.is_floating_point():
        low, high = (float(end) for end in data.x.aminmax())
        if not (low >= 0 and high <= 1):
            raise DataError(
                f"pixels run from {low:g} to {high:g}; expected [0, 1]: divide bytes by 255 or give them as uint8, and "
                "leave normalisation to the model."
            )
    return data


def _measure(
    experiment: Experiment,
    model: nn.Module,
    data: ImageData,
    *,
    on_progress: Callable[[str, int, int, int], None] = _ignore,
    on_examples: Callable[[Tensor, Tensor], None] = _ignore,
) -> dict[str, EvaluationResult]:
    import torch
    from torch import nn

    from calfat_plugin.datasets import pixels
    from calfat_plugin.evaluators.base import refuse_training_mode
    from calfat_plugin.evaluators.measure import logits_of, measure

    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module.")
    refuse_training_mode(model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), data.x.device)
    with torch.no_grad():
        logits = logits_of(model, pixels(data.x[:1]).to(device))
    low, high = int(data.y.min()), int(data.y.max())
    num_classes = logits.shape[-1] if isinstance(logits, torch.Tensor) and logits.ndim == 2 else high + 1
    if low < 0 or high >= num_classes:
        raise DataError(f"labels run from {low} to {high}; the model knows 0 to {num_classes - 1}.")
    return measure(
        model,
        data,
        experiment.build_evaluators(experiment.evaluators),
        num_classes=num_classes,
        threat=experiment.recipe.threat,
        batch_size=experiment.recipe.evaluation.batch_size,
        device=device,
        seed=experiment.seed,
        on_progress=on_progress,
        on_examples=on_examples,
    )
