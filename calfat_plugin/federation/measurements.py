"""What the server measures, after rounds, at the end, and once before the first round; and what evaluators look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.batches import batches
from calfat_plugin.errors import PluginError
from calfat_plugin.evaluators.base import subset
from calfat_plugin.evaluators.evidence import Collector, Evidence, write_evidence
from calfat_plugin.evaluators.measure import evaluation_task, measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.side_effects import seeded_global_rng, set_global_rng
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import EvaluationTask, Evaluator, SetUpTask, State
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
        self._experiment = experiment
        self._model = model
        self._observer = observer
        self._test = dataset.test.to(device)
        self.subset = subset(dataset.monitored.to(device), experiment.monitor.max_examples)  # for each round
        self._set_up = SetUpTask(dataset.num_classes, dataset.in_channels, dataset.image_size, device, has_clients=True)
        if load_model is not None:
            self._set_up = replace(self._set_up, load_model=load_model)

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
        """Whether any evaluator looks at the clients of a round."""
        return self.final_uses_clients or any(pick.entry.uses_clients for pick in self._experiment.monitor.evaluators)

    def set_up(self) -> None:
        """Set all evaluators up, so that what is missing shows now."""
        _ = self._monitoring, self._closing

    @cached_property
    def _monitoring(self) -> Ready:
        return self._experiment.ready_evaluators(self._experiment.monitor.evaluators, self._set_up)

    @cached_property
    def _closing(self) -> Ready:
        return self._experiment.ready_evaluators(self._experiment.evaluators, self._set_up)

    def of_round(self, state: State, round: int, clients: ClientsOfRound | None) -> dict[str, EvaluationResult]:
        """Label to result of the evaluators of rounds, on the monitored images."""
        with self._measuring(state, self.subset, clients, round) as task:
            evaluators = self._each_with_the_same_generators(self._monitoring, round)
            return measure(task, evaluators, on_progress=self._observer.evaluation_progress)

    def final(
        self, state: State, scratch: Path | None, clients: ClientsOfRound | None, earlier: Evidence | None = None
    ) -> dict[str, EvaluationResult]:
        """Label to result of the recipe's evaluators, on all test images; in ``scratch`` their evidence.

        ``earlier`` is evidence of other evaluators about the same model, to which theirs is added.
        """
        with self._measuring(state, self._test, clients, scratch=scratch) as task:
            if earlier is not None:
                task = replace(task, clean_predictions=earlier.clean)
            collector = None
            max_bytes = self._experiment.evaluation.evidence_mb * 10**6
            if max_bytes or earlier is not None:
                collector = Collector(task, max_bytes, scratch, earlier)
            results = measure(
                task,
                self._each_with_the_same_generators(self._closing),
                on_progress=self._observer.evaluation_progress,
                collector=collector,
            )
            if collector is None:
                return results
            evidence = collector.evidence()
            worst = evidence.worst_case(task.num_classes, collector.not_run)
            if worst is not None:
                results[worst.label] = worst
            if scratch is not None:
                write_evidence(scratch / EVIDENCE, evidence)
            return results

    def try_all(self, state: State, clients: ClientsOfRound | None) -> None:
        """Try every evaluator on a few images, before the first round."""
        few = self.subset.subset(range(min(_TRIED, len(self.subset))))
        with self._measuring(state, few, clients) as task:
            for evaluators in (self._monitoring, self._closing):
                measure(task, self._each_with_the_same_generators(evaluators))

    def monitored(self) -> Monitored:
        return Monitored(self._model, self.subset, self._experiment.evaluation.batch_size)

    @contextmanager
    def _measuring(
        self,
        state: State,
        data: ImageData,
        clients: ClientsOfRound | None,
        round: int = 0,
        scratch: Path | None = None,
    ) -> Iterator[EvaluationTask]:
        """The task of all evaluators of a model; global generators that they draw from are put back."""
        load_state(self._model, state)
        with seeded_global_rng(self._seed(round)), timed("evaluation"):
            task = evaluation_task(self._model, data, self._experiment, self._set_up, round=round, scratch=scratch)
            if clients is not None:
                task = replace(task, clients=lambda: clients)
            yield task

    def _each_with_the_same_generators(self, evaluators: Ready, round: int = 0) -> Iterator[tuple[str, Evaluator]]:
        """The evaluators, each with the global generators at one state.

        What an evaluator of a plugin draws from them must not depend on those before it: it may be added to a finished
        run.
        """
        for label, evaluator in evaluators:
            set_global_rng(self._seed(round))
            yield label, evaluator

    def _seed(self, round: int) -> int:
        return derive_seed(self._experiment.seed, "ambient evaluation", round=round)


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


def no_worker() -> Worker:
    raise PluginError(
        "it asks for a client's data, which across silos the server does not have; let its entry's check refuse "
        "recipes whose common_args.training_type is not simulation."
    )


@dataclass(frozen=True)
class ClientsOfRound:
    """See ``interfaces.RoundClients``."""

    states: Mapping[int, State]  # client id to the model that it sent, ascending ids
    attackers: Collection[int]
    template: nn.Module  # in evaluation mode on the device; its tensors do not matter
    round: int  # the last one that was aggregated; 0 before the first, when nobody trains
    downlink: Mapping[str, Tensor]  # after it
    worker: Callable[[], Worker]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.states)

    @property
    def honest(self) -> tuple[int, ...]:
        return tuple(client for client in self.states if client not in self.attackers)

    def class_counts(self, client: int) -> tuple[int, ...]:
        worker = self.worker()
        counts = torch.bincount(worker.shards[client].y, minlength=worker.num_classes)
        return tuple(counts.tolist())

    def model(self, client: int) -> nn.Module:
        return self._holding(self.states[client])

    def fine_tuned(self, client: int, epochs: int) -> nn.Module:
        if self.round == 0:
            return self.model(client)
        return self._holding(self.worker().fine_tuned(client, self.round, self.downlink, epochs))

    def _holding(self, state: State) -> nn.Module:
        model = deepcopy(self.template)
        load_state(model, state)
        return model
