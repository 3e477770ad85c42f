"""What the server measures: its test images after rounds, at the end, and once before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.evaluators.base import subset
from calfat_plugin.evaluators.evidence import Collector, Evidence
from calfat_plugin.evaluators.evidence_file import write_evidence
from calfat_plugin.evaluators.measure import clean_predictions, measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.clients import ClientsOfRound
from calfat_plugin.federation.global_rng import seeded_global_rng, set_global_rng
from calfat_plugin.interfaces import Evaluator, SetUpTask, State
from calfat_plugin.maths.tied import load_state
from calfat_plugin.observer import RunObserver
from calfat_plugin.profiling import timed
from calfat_plugin.results import EVIDENCE, EvaluationResult
from calfat_plugin.seeds import derive_seed

Ready = list[tuple[str, Evaluator]]
LoadModel = Callable[[str, "str | None"], nn.Module]  #: see ``interfaces.SetUpTask``
_TRIED = 2  # monitored images on which evaluators are tried before the first round


class Measurements:
    """The recipe's evaluators on the server's images, with the server's model, whose tensors are replaced.

    Each evaluator is built and set up once.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        dataset: Dataset,
        device: torch.device,
        observer: RunObserver,
        load_model: LoadModel | None = None,
    ) -> None:
        self._experiment, self._model, self._observer = experiment, model, observer
        self._test = dataset.test.to(device)
        self.subset = subset(dataset.monitored.to(device), experiment.monitor.max_examples)  # for each round
        task = SetUpTask(dataset.num_classes, dataset.in_channels, dataset.image_size, device, has_clients=True)
        self._task = task if load_model is None else replace(task, load_model=load_model)

    @cached_property
    def template(self) -> nn.Module:
        """A copy of the model, in evaluation mode on the device; its tensors do not matter."""
        return deepcopy(self._model)

    @property
    def final_uses_clients(self) -> bool:
        """Whether an evaluator of the final evaluation looks at the clients of the last round."""
        return any(pick.entry.uses_clients for pick in self._experiment.evaluators)

    @property
    def use_clients(self) -> bool:
        return self.final_uses_clients or any(pick.entry.uses_clients for pick in self._experiment.monitor.evaluators)

    def set_up(self) -> None:
        """Set all evaluators up, so that what is missing shows now."""
        _ = self._monitoring, self._closing

    @cached_property
    def _monitoring(self) -> Ready:
        return self._experiment.ready_evaluators(self._experiment.monitor.evaluators, self._task)

    @cached_property
    def _closing(self) -> Ready:
        return self._experiment.ready_evaluators(self._experiment.evaluators, self._task)

    def of_round(self, state: State, round: int, clients: ClientsOfRound | None) -> dict[str, EvaluationResult]:
        return self._measured(state, self.subset, self._monitoring, clients, round)

    def final(
        self, state: State, scratch: Path | None, clients: ClientsOfRound | None, earlier: Evidence | None = None
    ) -> dict[str, EvaluationResult]:
        """Label to result of the recipe's evaluators, on all test images; in ``scratch`` their evidence.

        ``earlier`` is evidence of other evaluators about the same model, to which theirs is added.
        """
        return self._measured(state, self._test, self._closing, clients, scratch=scratch, keep=True, earlier=earlier)

    def try_all(self, state: State, clients: ClientsOfRound | None) -> None:
        few = self.subset.subset(range(min(_TRIED, len(self.subset))))
        for evaluators in (self._monitoring, self._closing):
            self._measured(state, few, evaluators, clients, quiet=True)

    def monitored(self) -> Monitored:
        return Monitored(self._model, self.subset, self._experiment.evaluation.batch_size)

    def _measured(
        self,
        state: State,
        data: ImageData,
        evaluators: Ready,
        clients: ClientsOfRound | None,
        round: int = 0,
        scratch: Path | None = None,
        *,
        quiet: bool = False,
        keep: bool = False,
        earlier: Evidence | None = None,
    ) -> dict[str, EvaluationResult]:
        experiment = self._experiment
        observer = RunObserver() if quiet else self._observer
        load_state(self._model, state)
        seed = derive_seed(experiment.seed, "ambient evaluation", round=round)
        with seeded_global_rng(seed), timed("evaluation"):
            sizes = {"num_classes": self._task.num_classes, "batch_size": experiment.evaluation.batch_size}
            collector, room = None, experiment.evaluation.evidence_mb * 10**6
            if keep and (room or earlier):
                with timed("clean examples"):
                    clean = clean_predictions(self._model, data, device=self._task.device, **sizes)
                collector = Collector(self._model, data, clean, experiment.threat, room, scratch, earlier)
            found = measure(
                self._model,
                data,
                _each_with_the_same_generators(evaluators, seed),
                num_classes=self._task.num_classes,
                threat=experiment.threat,
                batch_size=experiment.evaluation.batch_size,
                device=self._task.device,
                seed=experiment.seed,
                round=round,
                scratch=scratch,
                on_progress=observer.evaluation_progress,
                clients=clients,
                collector=collector,
            )
            if collector is not None:
                evidence = collector.evidence()
                if worst := evidence.worst_case(self._task.num_classes, collector.not_run):
                    found[worst.label] = worst
                if scratch is not None:
                    write_evidence(scratch / EVIDENCE, evidence)
            return found


def _each_with_the_same_generators(evaluators: Ready, seed: int) -> Iterator[tuple[str, Evaluator]]:
    """The evaluators, each with the global generators at one state.

    What an evaluator of a plugin draws from them must not depend on those before it: it may be added to a finished run.
    """
    for label, evaluator in evaluators:
        set_global_rng(seed)
        yield label, evaluator


@dataclass(frozen=True)
class Monitored:
    """See ``interfaces.MonitoredData``."""

    model: nn.Module
    data: ImageData
    batch_size: int

    def logits(self, state: State) -> Tensor:
        load_state(self.model, state)
        with torch.no_grad():
            parts = [self.model(x).cpu() for x, *_ in batches(self.data, self.batch_size, self.data.y.device)]
        return torch.cat(parts)
