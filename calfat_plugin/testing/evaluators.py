"""The check of evaluators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.evaluators.base import share
from calfat_plugin.evaluators.measure import Progress, evaluation_task, measure, no_progress
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.interfaces import SetUpTask
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult
from calfat_plugin.runs.loaded_run import model_loader
from calfat_plugin.runs.request import named_device
from calfat_plugin.testing.tiny import (
    NUM_CLASSES,
    answered,
    balanced_images,
    balanced_model,
    in_each_norm,
    one_thread,
    require,
    tiny_experiment,
    unchanged,
)
from calfat_plugin.threat import ThreatModel

_NUMBERS = ("num_examples", "accuracy", "accuracy_release", "per_class", "per_class_release")
_BATCH_SIZE = 5  # so that a dozen images are three batches, of which the last is smaller
_TOLERANCE = 1e-6  # of a share, or of a number of examples: a mean in float32 is right


@fresh_torch_state()
@one_thread()
def check_evaluator(
    name: str, *, registry: Registry | None = None, device: str | torch.device = "cpu", **options: Any
) -> None:
    """Hold an evaluator to its contract.

    It leaves model and images alone, and asks the model about no empty batch; gives the same numbers again, whatever it
    measured in between, also where it was interrupted half way; its accuracies are shares of the examples that it
    counted, add up over the classes, and ``accuracy`` is above neither ``accuracy_release`` nor the natural accuracy;
    its settings and details are ready for JSON. If it hands out its examples, its accuracies are what the model says of
    them, and they lie in the pixel range.

    Whatever is an attack keeps its budget, and with eps 0 it finds the natural accuracy. In each norm that it takes it
    breaks some of a dozen images that a model gets right, which an attack that descends its loss does not; one without
    gradients may be weaker, and does so in one norm at least. One that looks at the clients of a round is given three,
    the last of which attacks; they have other models than the one that is measured, which fine-tuning moves half way
    to theirs.

    Args:
        name: as recipes name it, also with a number (``pgd20``).
        registry: where it is; None: among the built-ins and what is installed.
        device: where to compute, ``cpu``, ``cuda`` or ``cuda:N``.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it; ``BudgetError``: its examples left the budget.
    """
    pick = {"name": name, **options}
    on_device = named_device(str(device), "device")
    experiment = tiny_experiment(registry, evaluators=[pick])
    trial = _Trial(experiment, balanced_images().to(on_device))
    result, x_adv = trial.measured()
    _require_number(name, result)
    _check_numbers(name, result, trial)
    trial.measured(seed=1)
    again, _ = trial.measured()
    _check_same(
        result,
        again,
        f"{name}: the same model, images and seed must give the same result; draw from EvaluationTask.seed alone.",
    )
    has_own_eps = getattr(experiment.evaluators[0].options, "eps", None) is not None
    is_attack = trial.evaluator.has_budget and not has_own_eps
    if is_attack:
        without_budget, _ = trial.measured(threat=dataclasses.replace(trial.threat, eps=Fraction(0)))
        accuracy = _require_number(name, without_budget)
        natural = share(trial.right)
        is_natural = math.isclose(accuracy, natural, abs_tol=_TOLERANCE)
        require(
            is_natural or without_budget.num_examples < len(trial.data),
            f"{name}: with eps 0 it must find the natural accuracy {natural}; got {accuracy}.",
        )
    if result.num_examples == len(trial.data):
        _check_classes(name, result, trial)
    if trial.evaluator.gives_examples:
        _check_examples(name, result, x_adv, trial)
    _check_continued(name, result, trial)
    # All images right and next to none within reach of an error, then all wrong: some masks select nothing.
    right = answered(balanced_model().to(on_device))
    _Trial(experiment, right).measured(threat=dataclasses.replace(experiment.threat, eps=Fraction(1, 10**4)))
    wrong = ImageData(right.x, (right.y + 1) % NUM_CLASSES)
    _Trial(experiment, wrong).measured()
    if is_attack:
        others = in_each_norm(experiment.registry, evaluators=[pick])
        _check_breaks(name, [_Trial(other, answered(balanced_model().to(on_device))) for other in others])


class TinyClients:
    """Three clients of a round of this global model; see ``interfaces.RoundClients``."""

    ids, honest = (0, 1, 2), (0, 1)

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def class_counts(self, client: int) -> tuple[int, ...]:
        """Client k has most examples of class k, and none of the last class."""
        counts = [1] * (NUM_CLASSES - 1) + [0]
        counts[client] = 5
        return tuple(counts)

    def model(self, client: int) -> nn.Module:
        """The global model with noise of the client's own on its parameters."""
        return self._moved(client, 0.1)

    def fine_tuned(self, client: int, epochs: int) -> nn.Module:
        """With half the noise."""
        return self._moved(client, 0.05)

    def _moved(self, client: int, scale: float) -> nn.Module:
        model = deepcopy(self._model)
        noise = torch.Generator().manual_seed(client)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=noise).to(parameter.device), alpha=scale)
        return model


def tiny_set_up(data: ImageData) -> SetUpTask:
    """What an evaluator of these images is set up with."""
    _, channels, *size = data.x.shape
    shape = SetUpTask(NUM_CLASSES, channels, (size[0], size[1]), data.x.device, has_clients=True)
    return dataclasses.replace(shape, load_model=model_loader(None, shape, data.x.device))


class _Trial:
    """An evaluator, and the model and the images that it is tried on."""

    def __init__(self, experiment: Experiment, data: ImageData) -> None:
        self.data = data
        self.threat = experiment.threat
        self.model = balanced_model().to(data.x.device).eval()
        set_up = tiny_set_up(data)
        ((self.label, self.evaluator),) = experiment.ready_evaluators(experiment.evaluators, set_up)
        self.took_gradients = False  # whether a pass was one for the gradient of the images

        def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            require(len(inputs[0]) > 0, f"{self.label}: it asks the model about an empty batch; skip the call then.")
            if inputs[0].requires_grad and torch.is_grad_enabled():
                self.took_gradients = True

        self.model.register_forward_pre_hook(watch)
        self.right = self.is_right_about(data.x)  # (N,) bool, of the clean images
        clients = TinyClients(self.model)
        task = evaluation_task(self.model, data, experiment, set_up)
        self._task = dataclasses.replace(task, batch_size=_BATCH_SIZE, clients=lambda: clients)

    def is_right_about(self, x: Tensor) -> Tensor:
        """Whether the model is right about these images, (N, C, H, W): (N,) bool."""
        with torch.no_grad():
            verdicts: Tensor = self.model(x).argmax(dim=1) == self.data.y
        return verdicts

    def measured(
        self,
        *,
        seed: int = 0,
        threat: ThreatModel | None = None,
        scratch: Path | None = None,
        on_progress: Progress = no_progress,
    ) -> tuple[EvaluationResult, Tensor]:
        """The result and the examples; an example that the evaluator does not hand out is the clean one."""
        x_adv = self.data.x.clone()

        def keep(where: Tensor, points: Tensor) -> None:
            x_adv[where] = points

        task = dataclasses.replace(
            self._task, seed=seed, threat=threat or self.threat, scratch=scratch, on_examples=keep
        )
        with unchanged(f"{self.label}: the test images", self.data.x, self.data.y), seeded_global_rng(seed):
            results = measure(task, [(self.label, self.evaluator)], on_progress=on_progress)
        for parameter in self.model.parameters():
            require(
                parameter.grad is None and parameter.requires_grad,
                f"{self.label}: the model's parameters must be left without gradients, and able to have them; take "
                "torch.autograd.grad(loss, x_adv) in place of loss.backward().",
            )
        return results[self.label], x_adv


def _require_number(name: str, result: EvaluationResult) -> float:
    """The accuracy, which an evaluator must have on images and a model that any attack can be run on."""
    if result.accuracy is None:
        raise AssertionError(f"{name}: it did not run on the trial's images: {result.not_run}.")
    return result.accuracy


def _check_numbers(name: str, result: EvaluationResult, trial: _Trial) -> None:
    """Accuracies are shares of the examples, none is above what it is a part of, and each class has a value."""
    total = result.num_examples
    require(0 < total <= len(trial.data), f"{name}: num_examples must be those that it counted.")
    for kind in ("accuracy", "accuracy_release"):
        accuracy = getattr(result, kind)
        is_share = math.isclose(accuracy * total, round(accuracy * total), abs_tol=_TOLERANCE)
        require(is_share, f"{name}: {kind} must be a share of its {total} examples; got {accuracy}.")
    limits = {"accuracy_release": result.accuracy_release or 0.0}
    if total == len(trial.data):
        limits["the natural accuracy"] = share(trial.right)
    accuracy = _require_number(name, result)
    for what, limit in limits.items():
        require(
            accuracy <= limit + _TOLERANCE,
            f"{name}: accuracy must be at most {what}; got {accuracy} and {limit}.",
        )
    classes = len(result.per_class) == len(result.per_class_release) == NUM_CLASSES
    require(classes, f"{name}: per_class and per_class_release must have values for each of the {NUM_CLASSES} classes.")


def _check_classes(name: str, result: EvaluationResult, trial: _Trial) -> None:
    """The classes add up to all examples, of which each class has as many as the trial's images."""
    counts = torch.bincount(trial.data.y, minlength=NUM_CLASSES).tolist()
    for suffix in ("", "_release"):
        right = 0.0
        for accuracy, count in zip(getattr(result, f"per_class{suffix}"), counts, strict=True):
            right += (accuracy or 0.0) * count
        expected = getattr(result, f"accuracy{suffix}") * result.num_examples
        text = f"the examples that per_class{suffix} counts as right must be those of accuracy{suffix}"
        require(math.isclose(right, expected, abs_tol=_TOLERANCE), f"{name}: {text}; got {right:g} and {expected:g}.")


def _check_same(result: EvaluationResult, again: EvaluationResult, otherwise: str) -> None:
    for number in _NUMBERS:
        require(getattr(again, number) == getattr(result, number), otherwise)


def _check_examples(name: str, result: EvaluationResult, x_adv: Tensor, trial: _Trial) -> None:
    """The examples are in the budget that the result states, and the numbers are theirs."""
    stated: dict[str, Any] = {"norm": "linf", "eps": 1}  # anywhere in the pixel range
    if trial.evaluator.has_budget:
        settings = result.settings
        stated = {"norm": settings.get("norm", trial.threat.norm), "eps": settings.get("eps", trial.threat.eps)}
    threat = dataclasses.replace(trial.threat, **stated)
    threat.check(x_adv, trial.data.x, who=f"evaluator '{name}'")
    if result.num_examples < len(trial.data):
        return  # of the others, it is not known whether they were attacked
    right = trial.is_right_about(x_adv)
    for kind, verdicts in (("accuracy", right & trial.right), ("accuracy_release", right)):
        accuracy = getattr(result, kind)
        expected = share(verdicts)
        text = f"{name}: {kind} is {accuracy:.4g}; on the examples that it hands out it is {expected:.4g}."
        require(math.isclose(accuracy, expected, abs_tol=_TOLERANCE), text)


class _InterruptedError(Exception):
    """Half of the work is done."""


def _check_continued(name: str, result: EvaluationResult, trial: _Trial) -> None:
    """Interrupted and started again, it gives the same result."""

    def interrupt(label: str, done: int, total: int, correct: int) -> None:
        if 2 * done >= total:
            raise _InterruptedError

    with TemporaryDirectory() as folder:
        with suppress(_InterruptedError):
            trial.measured(scratch=Path(folder), on_progress=interrupt)
        again, _ = trial.measured(scratch=Path(folder))
    _check_same(
        result,
        again,
        f"{name}: interrupted half way and started again with what it kept in "
        "EvaluationTask.scratch, it must give the same result.",
    )


def _check_breaks(name: str, trials: Sequence[_Trial]) -> None:
    """In each norm, if it takes gradients there; else in one of them: noise of few draws may break none in a ball."""
    unbroken = []
    takes_gradients = []
    for trial in trials:
        result, _ = trial.measured()
        if result.accuracy == 1:
            unbroken.append(trial)
            if trial.took_gradients:
                takes_gradients.append(trial)
    wrong = takes_gradients
    if len(unbroken) == len(trials):
        wrong = unbroken
    if wrong:
        threat = wrong[0].threat
        ball = f"the {threat.norm} ball of eps {exact_text(threat.eps)}"
        raise AssertionError(
            f"{name}: an attack must break some of {len(wrong[0].data)} images that the model gets right, in {ball}; "
            "it broke none. Does it climb its loss, or descend? An evaluator that is no attack sets has_budget = False "
            "in its class."
        )
