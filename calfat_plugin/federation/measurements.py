"""What the server measures: its test images after rounds, at the end, and once before the first round; and memory."""

from __future__ import annotations

import re
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

MB = 1e6  # bytes
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"  # proc(5): the highest resident size becomes the present one


class PeakMemory:
    """The largest memory in use since :meth:`begin`, in MB (10^6 bytes).

    The kernel's own mark is set back and read, so nothing is sampled and no peak is missed. Where it cannot be set back
    (it is Linux's, and a sandbox may forbid it) there is no number: the mark of the whole life of a process says
    nothing about one round.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, False

    def begin(self) -> None:
        """Forget what was in use before."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            _RESET.write_text(_FORGET_PEAK, encoding="ascii")
            self._known = True
        except OSError:
            self._known = False

    def of_process(self) -> float | None:
        """Resident memory of this process; None where the system does not give it for a while alone."""
        if not self._known:
            return None
        mark = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
        return None if mark is None else int(mark[1]) * 1024 / MB

    def of_gpu(self) -> float | None:
        """Memory of torch's tensors on the GPU; None on another device."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) / MB


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
