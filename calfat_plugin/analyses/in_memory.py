"""``calfat.evaluate`` and ``calfat.attack``: evaluators on a model and images in memory, for programs and notebooks.

Both make an experiment of their arguments (``experiment_of``), check the images (``images_of``) and the model
(``set_up_task_of``), and then measure as a run does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
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

# The ``stacklevel`` of a warning that names the user's line: 1 is ``evaluate`` or ``attack``, 2 is the decorator
# ``fresh_torch_state`` around it, 3 is the line that called.
_USERS_LINE = 3


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
    """Measure any model with evaluators, on the device of the model.

    Args:
        model: in evaluation mode; it takes pixels in [0, 1] and returns raw logits (N, C).
        x: (N, C, H, W) images, a tensor or an array, floats in [0, 1] or uint8 in 0..255; or, with the labels and so
            without ``y``, a ``DataLoader`` of (images, labels) batches, an ``ImageData``, or a ``Dataset``, of which
            the test images are taken.
        y: (N,) labels, whole numbers from 0.
        evaluators: as recipes write them: names such as ``"pgd20"``, or mappings with a name and options.
        eps: the budget of attacks, a fraction of the pixel range: 0.1 or ``"8/255"``.
        norm: the norm of the budget: ``"linf"``, ``"l2"`` or ``"l1"``.
        step_size: the length of a step, for attacks that take steps: a number or a multiple of eps such as
            ``"eps/10"``; None: ``eps/4``.
        batch_size: the number of images in a batch.
        seed: the seed of random starts.
        on_progress: called with (label, examples done, examples in all, correct so far).

    Returns:
        A result for the label of each evaluator, in the order of ``evaluators``.

    Raises:
        CalfatError: something does not fit; the text says what.

    Warns:
        UserWarning: a finding about the images (nearly black, of one colour) or about the results (such as masked
            gradients), as ``calfat attack`` prints it.
    """
    from calfat_plugin.evaluators.measure import evaluation_task, measure, no_progress

    if not evaluators:
        _refuse_evaluators_as_labels(y)
    evaluator_list: Sequence[str | Mapping[str, Any]]
    if isinstance(evaluators, (str, Mapping)):
        evaluator_list = [evaluators]
    else:
        evaluator_list = evaluators
    if not evaluator_list:
        raise OptionError("evaluators: name at least one, such as natural or pgd20.")
    if on_progress is None:
        on_progress = no_progress
    experiment = experiment_of(evaluator_list, eps, norm, step_size, batch_size, seed)
    data = images_of(x, y)
    for finding in image_findings(data, "images"):
        warnings.warn(finding, stacklevel=_USERS_LINE)
    set_up_task = set_up_task_of(model, data)
    labelled_evaluators = experiment.ready_evaluators(experiment.evaluators, set_up_task)
    task = evaluation_task(model, data, experiment, set_up_task)
    results = measure(task, labelled_evaluators, on_progress=on_progress)
    for alarm in find_alarms(results.values()):
        warnings.warn(f"{alarm.code}: {alarm.text}", stacklevel=_USERS_LINE)
    return results


def _refuse_evaluators_as_labels(y: Labels | None) -> None:
    """Refuse evaluators in the place of labels, as in ``evaluate(model, data, ["pgd20"])``."""
    entries: Sequence[object] = (y,)
    if isinstance(y, (list, tuple)):
        entries = y
    if any(isinstance(entry, (str, Mapping)) for entry in entries):
        raise OptionError(
            f"y: got {one_line(y)}; expected labels. Evaluators go by keyword: evaluate(model, data, "
            f"evaluators={one_line(y)}), or evaluate(model, x, y, evaluators={one_line(y)})."
        )


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
    """Make adversarial examples, checked against the budget: those that ``evaluate`` counts with the same arguments.

    Args:
        name: an evaluator as recipes write it, such as ``"pgd20"``.
        model: in evaluation mode; it takes pixels in [0, 1] and returns raw logits (N, C).
        x: (N, C, H, W) images, a tensor or an array, floats in [0, 1] or uint8 in 0..255; or, with the labels and so
            without ``y``, a ``DataLoader`` of (images, labels) batches that does not shuffle, an ``ImageData``, or a
            ``Dataset``, of which the test images are taken.
        y: (N,) labels, whole numbers from 0.
        eps: the budget, a fraction of the pixel range: 0.1 or ``"8/255"``.
        norm: the norm of the budget: ``"linf"``, ``"l2"`` or ``"l1"``.
        step_size: the length of a step, for attacks that take steps: a number or a multiple of eps such as
            ``"eps/10"``; None: ``eps/4``.
        batch_size: the number of images in a batch.
        seed: the seed of random starts.

    Returns:
        (N, C, H, W) float32 in [0, 1], on the device of ``x``. An image that was not attacked, or that AutoAttack could
        not break, is unchanged.

    Raises:
        CalfatError: something does not fit, or the evaluator makes no adversarial examples (``natural``).

    Warns:
        UserWarning: a finding about the images (nearly black, of one colour).
    """
    from calfat_plugin.datasets import pixels
    from calfat_plugin.evaluators.measure import evaluation_task, measure

    experiment = experiment_of([name], eps, norm, step_size, batch_size, seed)
    # Built, but not set up yet: an evaluator that makes no examples is refused before the images are read.
    built_evaluators = experiment.build_evaluators(experiment.evaluators)
    label, evaluator = built_evaluators[0]  # the only one
    if not evaluator.gives_examples:
        raise OptionError(f"evaluator '{label}' makes no adversarial examples; name an attack, such as pgd20.")
    data = images_of(x, y, keeps_order=True)
    for finding in image_findings(data, "images"):
        warnings.warn(finding, stacklevel=_USERS_LINE)
    x_adv = pixels(data.x).clone()  # an image without an adversarial example stays as it is

    def store_examples(positions: Tensor, examples: Tensor) -> None:
        x_adv[positions.to(x_adv.device)] = examples.detach().to(x_adv.device)

    set_up_task = set_up_task_of(model, data)
    labelled_evaluators = experiment.ready_evaluators(experiment.evaluators, set_up_task)
    task = evaluation_task(model, data, experiment, set_up_task)
    task_with_store = replace(task, on_examples=store_examples)
    measure(task_with_store, labelled_evaluators)  # the results are not used: store_examples has filled x_adv
    return x_adv


def experiment_of(
    evaluators: Sequence[str | Mapping[str, Any]],
    eps: Number | None,
    norm: Norm,
    step_size: Number | None,
    batch_size: int,
    seed: int,
) -> Experiment:
    """An experiment with these arguments, for the evaluation of a model in memory.

    The arguments are written into a recipe, because all values of a recipe are checked and converted when an experiment
    is made of it. Nobody uses the data set and the model of this experiment.
    """
    budget: dict[str, Any] = {"norm": norm}
    if eps is not None:
        budget["eps"] = eps
    if step_size is not None:
        budget["step_size"] = step_size
    threat = ThreatModel(**budget)  # converts eps and step_size, which may be any Number, to fractions
    plain_evaluators: list[str | dict[str, Any]] = []  # as a recipe file has them: names, and plain dicts
    for name_or_mapping in evaluators:
        if isinstance(name_or_mapping, Mapping):
            plain_evaluators.append(dict(name_or_mapping))
        else:
            plain_evaluators.append(name_or_mapping)
    document = recipe_of_own_model(
        "evaluators",
        [  # (key of the recipe, value, what an error names as the place of the value)
            (("calfat", "evaluators"), plain_evaluators, f"evaluators {one_line(plain_evaluators)}"),
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
    # The recipe now has the default eps of ThreatModel. No evaluator may use it without the caller's knowledge.
    built_evaluators = experiment.build_evaluators(experiment.evaluators)
    for plugin, labelled_evaluator in zip(experiment.evaluators, built_evaluators, strict=True):
        label, evaluator = labelled_evaluator
        has_own_eps = getattr(plugin.options, "eps", None) is not None
        if evaluator.has_budget and not has_own_eps:
            raise OptionError(f"evaluator '{label}' needs eps, a fraction of the pixel range such as 0.1 or '8/255'.")
    return experiment


def images_of(x: Images, y: Labels | None, *, keeps_order: bool = False) -> ImageData:
    """Images and labels as one ``ImageData``, whose types, shapes and pixel range are checked.

    Args:
        x: images, with or without labels, as :func:`evaluate` takes them.
        y: labels, if ``x`` has none.
        keeps_order: whether the caller needs the images in their order, so that a ``DataLoader`` must not shuffle.
    """
    from torch.utils.data import DataLoader, RandomSampler

    from calfat_plugin.datasets import Dataset, ImageData
    from calfat_plugin.datasets.data import check_pixels

    x_has_labels = isinstance(x, (DataLoader, ImageData, Dataset))
    if x_has_labels and y is not None:
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
        images, labels = _read_all_batches(x)
        data = ImageData(images, labels)
    elif y is None:
        raise DataError("y is missing: the labels of the images. A DataLoader or an ImageData has them with it.")
    else:
        data = ImageData(x, y)
    if len(data) == 0:
        raise DataError("there are no images in x.")
    check_pixels(data)
    return data


def _read_all_batches(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """All images and all labels of a DataLoader, in the order of its batches."""
    import torch

    images, labels = [], []
    for batch in loader:
        if not isinstance(batch, (tuple, list)):
            raise DataError(f"a batch of the DataLoader is a {type(batch).__name__}; expected (images, labels).")
        types = [type(part) for part in batch]
        if types != [torch.Tensor, torch.Tensor]:
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
    """The task that evaluators are set up with before they measure ``model``, which stays on its device.

    Args:
        model: in evaluation mode.
        data: the images that it will be measured on.
        trust: is asked whether to execute the plugin files of another run, when an evaluator loads the model of that
            run; None: only files that this user has run before are executed.

    Raises:
        ModelError: the model is no module, is in training mode, or returns one logit for an image.
        DataError: a label is not among the model's classes.
    """
    from torch import nn

    from calfat_plugin.evaluators.base import refuse_training_mode
    from calfat_plugin.interfaces import SetUpTask

    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module.")
    refuse_training_mode(model)
    tensors: Iterator[Tensor] = chain(model.parameters(), model.buffers())
    first_tensor = next(tensors, None)
    if first_tensor is None:  # a model with neither parameters nor buffers can work on any device
        device = data.x.device
    else:
        device = first_tensor.device
    num_classes = _num_classes(model, data, device)
    lowest_label = int(data.y.min())
    highest_label = int(data.y.max())
    if lowest_label < 0 or highest_label >= num_classes:
        raise DataError(f"labels run from {lowest_label} to {highest_label}; the model knows 0 to {num_classes - 1}.")
    _, channels, height, width = data.x.shape
    # Other models that an evaluator loads are built for the same images and classes as this model.
    task_without_loader = SetUpTask(num_classes, channels, (height, width), device)
    load_model = model_loader(None, task_without_loader, device, trust)
    return replace(task_without_loader, load_model=load_model)


def _num_classes(model: nn.Module, data: ImageData, device: torch.device) -> int:
    """The number of logits that the model returns for one image.

    If the model does not return a tensor (N, C), it is the number of classes in the labels: ``evaluation_task`` refuses
    such a model later, and its error says which shape was expected.
    """
    import torch

    from calfat_plugin.datasets import pixels
    from calfat_plugin.evaluators.measure import logits_of

    first_image = pixels(data.x[:1]).to(device)
    with torch.no_grad():
        logits = logits_of(model, first_image)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        return int(data.y.max()) + 1
    num_logits = logits.shape[1]
    if num_logits == 1:
        raise ModelError(
            "the model returns one logit for an image, so any answer is right; expected one for each class. Let one "
            "with a sigmoid return two, 0 and its logit."
        )
    return num_logits
