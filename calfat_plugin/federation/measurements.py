"""What the server measures: its test images after rounds, at the end, and once before the first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.entries import EvaluatorEntry
from calfat_plugin.evaluators.base import subset
from calfat_plugin.evaluators.measure import measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.global_rng import seeded_global_rng
from calfat_plugin.interfaces import State
from calfat_plugin.maths.graphs import Graphs
from calfat_plugin.observer import RunObserver
from calfat_plugin.profiling import timed
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.results import EvaluationResult
from calfat_plugin.seeds import derive_seed

_TRIED = 2  # monitored images on which evaluators are tried before the first round


class Measurements:
    """The recipe's evaluators on the server's images, with the server's model, whose tensors are replaced.

    Attributes:
        subset: the images that rounds are monitored on.
    """

    def __init__(
        self, experiment: Experiment, model: nn.Module, dataset: Dataset, device: torch.device, observer: RunObserver
    ) -> None:
        self._experiment, self._model, self._device, self._observer = experiment, model, device, observer
        self._num_classes = dataset.num_classes
        self._graphs = Graphs.wanted(experiment.runtime.cuda_graphs, device)
        self._test = dataset.test.to(device)
        self.subset = subset(dataset.monitored.to(device), experiment.monitor.max_examples)

    def of_round(self, state: State, round: int) -> dict[str, EvaluationResult]:
        """Label to result of the monitor's evaluators, for the model with these tensors."""
        on_progress = self._observer.evaluation_progress
        return self._measured(state, self.subset, self._experiment.monitor.evaluators, round, on_progress)

    def final(self, state: State, scratch: Path | None) -> dict[str, EvaluationResult]:
        """Label to result of the recipe's evaluators, on all test images."""
        on_progress = self._observer.evaluation_progress
        return self._measured(state, self._test, self._experiment.evaluators, 0, on_progress, scratch)

    def try_all(self, state: State) -> None:
        """Let every evaluator measure a few images; and discard the results."""
        few = self.subset.subset(range(min(_TRIED, len(self.subset))))
        for picks in (self._experiment.monitor.evaluators, self._experiment.evaluators):
            self._measured(state, few, picks, 0, lambda label, done, total, correct: None)

    def monitored(self) -> Monitored:
        """The images of :attr:`subset`, for an aggregator whose entry says that it looks at them."""
        return Monitored(self._model, self.subset, self._experiment.evaluation.batch_size)

    def _measured(
        self,
        state: State,
        data: ImageData,
        picks: tuple[Plugin[EvaluatorEntry], ...],
        round: int,
        on_progress: Callable[[str, int, int, int], None],
        scratch: Path | None = None,
    ) -> dict[str, EvaluationResult]:
        experiment = self._experiment
        self._model.load_state_dict(dict(state))
        with seeded_global_rng(derive_seed(experiment.seed, "ambient evaluation", round=round)), timed("evaluation"):
            return measure(
                self._model,
                data,
                experiment.build_evaluators(picks),
                num_classes=self._num_classes,
                threat=experiment.threat,
                batch_size=experiment.evaluation.batch_size,
                device=self._device,
                seed=experiment.seed,
                round=round,
                graphs=self._graphs,
                scratch=scratch,
                on_progress=on_progress,
            )


@dataclass(frozen=True)
class Monitored:
    """See ``interfaces.MonitoredData``."""

    model: nn.Module
    data: ImageData
    batch_size: int

    def logits(self, state: State) -> Tensor:
        """See ``interfaces.MonitoredData``."""
        self.model.load_state_dict(dict(state))
        with torch.no_grad():
            parts = [self.model(x).cpu() for x, *_ in batches(self.data, self.batch_size, self.data.y.device)]
        return torch.cat(parts)
