"""The interface of evaluators: what measures a model, and what it is given."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from calfat_plugin.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from calfat_plugin.datasets import ImageData
    from calfat_plugin.results import EvaluationResult
    from calfat_plugin.threat import ThreatModel


class RoundClients(Protocol):
    """The clients of the last round that was aggregated, as the server's process knows them."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Those whose update was used, ascending, attackers included."""
        ...

    @property
    def honest(self) -> tuple[int, ...]:
        """The same without attackers, as far as the recipe makes them (``calfat.clients``)."""
        ...

    def class_counts(self, client: int) -> tuple[int, ...]:
        """(C,) training examples of each class that an honest client has.

        Args:
            client: its id.

        Raises:
            PluginError: across silos, where the server does not know it.
        """
        ...

    def model(self, client: int) -> nn.Module:
        """A new copy of what the client sent, its personal tensors included, in evaluation mode on the device.

        Args:
            client: its id.
        """
        ...

    def fine_tuned(self, client: int, epochs: int) -> nn.Module:
        """The global model after local epochs of this client, in evaluation mode on the device.

        The client trains as it does in a round (method, budget, group, what it keeps), in random streams of their own;
        nothing of it is kept.

        Args:
            client: an honest one.
            epochs: instead of the recipe's, >= 1.

        Raises:
            PluginError: as ``class_counts``.
            UpdateError: the training diverged.
        """
        ...


def no_clients() -> RoundClients:
    """What ``task.clients`` is for an evaluator that does not declare ``uses_clients``."""
    raise PluginError(
        "evaluate asks for the round's clients (task.clients), which its entry does not declare. Give the "
        "EvaluatorEntry uses_clients=True."
    )


def _no_loading(source: str, model: str | None) -> nn.Module:
    raise PluginError("no other model can be loaded here.")


@dataclass(frozen=True)
class SetUpTask:
    """What is known before the first model is measured.

    Attributes:
        num_classes: C.
        in_channels: colour channels of an image.
        image_size: (H, W) of an image in pixels.
        device: where models will be measured.
        load_model: called with (source, model) gives another model in evaluation mode on ``device``, for such images
            and classes: a run directory or a checkpoint and None, or weights and how the model is built
            (``package.module:factory``, or a name as recipes write it). It is shared, so nobody may change it.
        has_clients: whether tasks will have clients.
    """

    num_classes: int
    in_channels: int
    image_size: tuple[int, int]
    device: torch.device
    load_model: Callable[[str, str | None], nn.Module] = _no_loading
    has_clients: bool = False


@dataclass(frozen=True)
class EvaluationTask:
    """One evaluator's work on one model.

    Attributes:
        model: in evaluation mode, on ``device``; raw logits for pixels in [0, 1].
        data: test examples.
        num_classes: C.
        threat: the budget.
        batch_size: examples a batch.
        device: where to compute.
        seed: derive every stream from (seed, purpose, round).
        round: round number for derived seeds; 0 for the final evaluation.
        rows_at_once: how many examples to pass through the model at once where each passes many times, >= 1; more are
            right, but slower.
        clean_predictions: (N,) int64 on the CPU, the class that the model gives each clean example; computed once and
            shared.
        scratch: a folder for what a long evaluation needs to continue after a crash; it need not exist yet, other
            evaluators use it too, and it is removed once the results are written. None: nothing is kept.
        on_progress: called with (examples done, examples in all, correct so far).
        tally: called with (name, count) to add up a number for ``EvaluationResult.details``.
        record: called with (name, (n,) numbers of n examples) to give ``EvaluationResult.metrics`` their mean under a
            name that the entry declares.
        on_examples: called with adversarial examples that were checked against the budget: their positions in ``data``,
            (n,) int64 on the CPU, n >= 1, and the points, (n, C, H, W) float32 on ``device``.
        clients: gives the clients of the round, when called; only for entries that set ``uses_clients``. Before the
            first round evaluators are tried with two that have the initial model.
    """

    model: nn.Module
    data: ImageData
    num_classes: int
    threat: ThreatModel
    batch_size: int
    device: torch.device
    seed: int
    round: int
    clean_predictions: Tensor
    rows_at_once: int = sys.maxsize
    scratch: Path | None = None
    on_progress: Callable[[int, int, int], None] = lambda done, total, correct: None
    tally: Callable[[str, int], None] = lambda name, count: None
    record: Callable[[str, Tensor], None] = lambda name, values: None
    on_examples: Callable[[Tensor, Tensor], None] = lambda where, x_adv: None
    clients: Callable[[], RoundClients] = no_clients

    @cached_property
    def clean_correct(self) -> Tensor:
        """(N,) bool on the CPU, whether the model classifies the clean example correctly."""
        return self.clean_predictions == self.data.y.cpu()


class Evaluator(ABC):
    """Measures a model.

    Attributes:
        gives_examples: whether ``evaluate`` calls ``task.on_examples``.
        has_budget: whether a ball bounds the images; where none does, no eps is checked or reported.
        uses_clients: what its entry says; set where it is built.
    """

    gives_examples: bool = False
    has_budget: bool = True
    uses_clients: bool = False

    def set_up(self, task: SetUpTask) -> None:
        """Prepare what is the same for every model: called once, before anything is measured.

        The one place where an evaluator may keep something in itself.

        Args:
            task: what is known before there is a model.

        Raises:
            CalfatError: something is missing or does not fit.
        """
        return None  # most evaluators need nothing

    @abstractmethod
    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Measure ``task.model``; see ``evaluators.base.AttackEvaluator``, which re-checks the budget.

        Args:
            task: the model and the test examples.
            label: the evaluator's name in this run, for the result.

        Raises:
            BudgetError: when adversarial examples left the budget.
            ModelError: when the model cannot be evaluated.
        """
