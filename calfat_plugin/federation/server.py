"""The server of a federation: holds the global model, aggregates and evaluates.

Everything here is a function of the experiment, the round and the messages, so every runtime gives the same bits.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from calfat_plugin import returned
from calfat_plugin.datasets import Dataset, pixels
from calfat_plugin.errors import NO_UPDATE, RunError, UpdateError
from calfat_plugin.evaluators.evidence import Evidence
from calfat_plugin.evaluators.measure import logits_of
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.attackers import Attackers
from calfat_plugin.federation.clients import ClientsOfRound, no_worker
from calfat_plugin.federation.early_stopping import Patience
from calfat_plugin.federation.global_rng import seeded_global_rng
from calfat_plugin.federation.measurements import LoadModel, Measurements
from calfat_plugin.federation.memory import PeakMemory
from calfat_plugin.federation.outliers import (
    Alignments,
    UpdateHistory,
    absurd_changes,
    loss_alarms,
    not_run_alarms,
    personal_alarms,
    step_alarms,
    weight_alarms,
)
from calfat_plugin.federation.wire import Wire, num_bytes, pack_downlink, unpack_update
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import Aggregate, AggregationTask, State
from calfat_plugin.maths.averaging import (
    check_form,
    check_update,
    drift,
    update_norm,
    value_problem,
    weighted_average,
)
from calfat_plugin.maths.metrics import plausible_losses
from calfat_plugin.maths.tied import load_state, moved, state_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.peer_text import peer_text
from calfat_plugin.profiling import begin_part, timed
from calfat_plugin.recipe.clients import OTHERS
from calfat_plugin.results import ALIGNMENT, PASSES, EarlyStop, EvaluationResult, LocalUpdate, RoundRecord
from calfat_plugin.seeds import derive_seed

log = logging.getLogger(__name__)

_TRIED_CLIENTS = 2  # with which evaluators are tried before the first round
Uploads: TypeAlias = "Mapping[int, tuple[int, Mapping[str, Tensor]]]"  # client to (number of examples, message)
_PROBED = 32  # test images on which a new global model has to give finite logits


@dataclass(frozen=True)
class Snapshot:
    """All that must survive a crash to continue without a trace of it. Random streams are derived, so none is kept."""

    round: int  # the last finished one
    global_state: State  # after it; with calfat.ema the moving average
    server_state: State = field(default_factory=dict)  # the aggregator's memory
    broadcast: State = field(default_factory=dict)  # extras that go out with the next model
    #: What each client keeps; where a run has a directory, files that are read when asked for, and that rounds change.
    client_states: Mapping[int, State] = field(default_factory=dict)
    client_models: Mapping[int, State] = field(default_factory=dict)  # as sent, if the final evaluation needs them
    trained: State = field(default_factory=dict)  # what clients go on from, where global_state is an average


def sample_clients(seed: int, round: int, num_clients: int, per_round: int) -> tuple[int, ...]:
    """Ids of the clients that train in a round, ascending: all of them, or a uniform draw without replacement."""
    if per_round >= num_clients:
        return tuple(range(num_clients))
    stream = np.random.default_rng(derive_seed(seed, "sample clients", round=round))
    return tuple(sorted(int(client) for client in stream.choice(num_clients, per_round, replace=False)))


class Server:
    """Holds the global model, on the CPU; the training split of its data set only gives shapes."""

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        device: torch.device,  # where to evaluate
        observer: RunObserver,
        worker: Callable[[], Worker] | None = None,  # for evaluators that fine-tune clients
        load_model: LoadModel | None = None,
    ) -> None:
        self.experiment, self.dataset, self.device, self.observer = experiment, dataset, device, observer
        self._trainer = experiment.build_trainer()
        self._aggregator = experiment.build_aggregator()
        self._model = experiment.build_model(dataset, self._trainer)
        self._measurements = Measurements(experiment, self._model, dataset, device, observer, load_model)
        self._personal = sorted(self._trainer.personal_names(self._model))
        self._parameter_names = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and name not in self._personal
        ]
        self._groups = experiment.client_groups(dataset.train.y.numpy())
        self._attackers = Attackers(experiment, self._groups, self._parameter_names)
        self._updates = UpdateHistory(experiment, self._groups)
        self._alignments = Alignments()
        self._patience = Patience(experiment)
        own = {group.name: experiment.trained_by(group).build_trainer() for group in experiment.clients}
        self._trainer = self._trainer.among({client: own[group.name] for client, group in self._groups.items()})
        self._worker = no_worker if worker is None else cache(worker)
        self._client_models: Mapping[int, State] = {}
        self._reported: set[str] = set()
        self.state: State = {name: tensor.detach().clone() for name, tensor in state_of(self._model).items()}
        self.average: State = {}
        self.server_state: State = {}
        self.broadcast: State = {}
        self.round = 0
        self._earlier_evidence: Evidence | None = None
        moved(self._model, device).eval()
        self._started, self._memory = time.perf_counter(), PeakMemory(device)

    def begin(
        self, snapshot: Snapshot | None, rows: Iterable[Mapping[str, str]] = (), earlier: Evidence | None = None
    ) -> None:
        """Continue after ``snapshot.round``; a new run tries its evaluators first, so that mistakes in them show.

        ``earlier`` is the evidence of a finished run, to whose final evaluation evaluators are added.
        """
        self._earlier_evidence = earlier
        self._measurements.set_up()
        if snapshot is None:
            first = [client for client in self.clients_of(1) if client not in self._attackers.ids] or self.clients_of(1)
            self._measurements.try_all(self.state, self._clients(dict.fromkeys(first[:_TRIED_CLIENTS], self.state)))
            return
        trained = snapshot.trained or snapshot.global_state
        for state in (trained, snapshot.global_state, *snapshot.client_models.values()):
            check_update(state, self.state, who="checkpoint")
        self.round = snapshot.round
        rows = list(rows)
        self._patience.read(rows)
        if self.is_over and self._measurements.final_uses_clients and not snapshot.client_models:
            raise RunError(
                f"the final evaluation measures the clients of round {snapshot.round}, whose models the checkpoint "
                "does not have: when it was written, the run was asked for more rounds, or for no evaluator that "
                f"measures clients. Resume with more rounds, --set train_args.comm_round={snapshot.round + 1}, or "
                "leave that evaluator out."
            )
        self._client_models = snapshot.client_models
        self.average = snapshot.global_state if snapshot.trained else {}
        self.state, self.server_state = trained, snapshot.server_state
        self.broadcast = snapshot.broadcast
        self._updates.read(rows)
        self._alignments.read(rows)

    def snapshot(self, client_states: Mapping[int, State] | None = None) -> Snapshot:
        """All that must be kept at the end of a round; ``client_states`` where clients keep theirs here."""
        states = {} if client_states is None else client_states
        needed = self.is_over and self._measurements.final_uses_clients
        models = self._client_models if needed else {}
        trained = self.state if self.average else {}
        return Snapshot(self.round, self.evaluated, self.server_state, self.broadcast, states, models, trained)

    @property
    def evaluated(self) -> State:
        """The run's model: the moving average of the global models where the recipe asks for one, else the last."""
        return self.average or self.state

    @property
    def stop(self) -> EarlyStop | None:
        """Why training ended before the recipe's last round; None: it did not."""
        return self._patience.stop

    @property
    def is_over(self) -> bool:
        """Whether no round is left: all are done, or training stopped early. The final evaluation comes after that."""
        return self.round >= self.experiment.num_rounds or self.stop is not None

    @property
    def evaluation_decides(self) -> bool:
        """Whether the evaluation of the round that was aggregated last may be the end of training."""
        return self._patience.may_end_with(self.round)

    def start_round(self, round: int) -> tuple[int, ...]:
        self._started = time.perf_counter()
        self._memory.begin()
        begin_part(f"round {round}")
        clients = self.clients_of(round)
        self.observer.round_started(round, clients)
        return clients

    def clients_of(self, round: int) -> tuple[int, ...]:
        return sample_clients(
            self.experiment.seed, round, self.experiment.num_clients, self.experiment.clients_per_round
        )

    def downlink(self) -> Wire:
        return pack_downlink(self.state, self.broadcast)

    def finish_round(self, round: int, uploads: Uploads) -> RoundRecord:
        return self.evaluate_round(self.aggregate_round(round, uploads))

    def aggregate_round(self, round: int, uploads: Uploads) -> RoundRecord:
        """Aggregate a round's messages. Clients may train the next round from here on."""
        bytes_down = len(uploads) * num_bytes(self.downlink())
        previous, names = self.state, self._parameter_names
        with timed("aggregation"):
            usable, refused = self._usable(round, dict(sorted(uploads.items())))
            aggregate, self.state = self._aggregate(round, usable, refused)
        self.server_state, self.round = aggregate.server_state, round
        if (ema := self.experiment.ema) is not None:
            earlier = math.fsum(ema.decay**age for age in range(1, round))  # so the first rounds count for no more
            self.average = weighted_average([self.state, self.average or self.state], [1.0, earlier])
        if self._measurements.use_clients:
            self._client_models = {client: update.state for client, update in usable.items()}
        self.broadcast = {**aggregate.broadcast, **self._trainer.broadcast(usable)}
        drifted = drift([update.state for update in usable.values()], previous, names, self.state)
        norms = dict(zip(usable, drifted.norms, strict=True))
        cosines = {client: cosine for client, cosine in zip(usable, drifted.cosines, strict=True) if cosine == cosine}
        losses = {client: update.metrics.get("loss", math.nan) for client, update in usable.items()}
        num_examples = {client: update.num_examples for client, update in usable.items()}
        alignments = _sent(ALIGNMENT, usable)
        alarms = (
            *self._updates.add(norms, cosines, num_examples),
            *weight_alarms(aggregate.weights, num_examples),
            *personal_alarms(self._personal_norms(usable, previous)),
            *loss_alarms(_sent("loss", usable)),
            *self._alignments.add(alignments),
            *step_alarms(drifted, remembers=bool(aggregate.server_state)),
        )
        for alarm in alarms:
            log.warning("round %d: %s", round, alarm)
        return RoundRecord(
            round=round,
            clients=tuple(usable),
            refused=dict(sorted(refused.items())),
            losses=losses,
            update_norms=norms,
            heterogeneity=drifted.heterogeneity,
            evaluations={},
            seconds=0.0,
            bytes_down=bytes_down,
            bytes_up=sum(num_bytes(wire) for _, wire in uploads.values()),
            alarms=alarms,
            metrics={
                **self._of_clients(usable),
                **self._of_groups({"loss": plausible_losses(losses), "update_norm": norms, "update_cosine": cosines}),
                **{f"server/{n}": value for n, value in aggregate.metrics.items()},
            },
            learning_rate=self.experiment.train.learning_rate_of(round),
            num_examples=num_examples,
            weights=aggregate.weights,
            update_cosines=cosines,
            attackers_named=self._updates.named_share(attackers=True),
            others_named=self._updates.named_share(attackers=False),
            passes=sum(_sent(PASSES, usable).values()) or None,
            alignments=alignments,
        )

    def evaluate_round(self, record: RoundRecord) -> RoundRecord:
        """Complete the record of the round that was aggregated last: evaluations where the recipe asks, and costs."""
        due = record.round % self.experiment.monitor.every == 0 or record.round == self.experiment.num_rounds
        evaluations = self._measurements.of_round(self.evaluated, record.round, self._clients()) if due else {}
        measured = {
            f"{label}/{name}": value for label, result in evaluations.items() for name, value in result.metrics.items()
        }
        not_run = not_run_alarms(evaluations)
        for alarm in not_run:
            log.warning("round %d: %s", record.round, alarm)
        deciding = evaluations.get(self.experiment.selecting_label or "")
        self._patience.add(record.round, None if deciding is None else deciding.accuracy)
        return replace(
            record,
            stop=self.stop,
            evaluations=evaluations,
            alarms=(*record.alarms, *not_run),
            metrics={**record.metrics, **measured},
            seconds=time.perf_counter() - self._started,
            peak_memory_mb=self._memory.of_process(),
            peak_gpu_memory_mb=self._memory.of_gpu(),
        )

    def final_evaluation(self, scratch: Path | None = None) -> tuple[EvaluationResult, ...]:
        """Evaluate the global model with the recipe's evaluators on the full test split."""
        begin_part("final evaluation")
        measured = self._measurements.final(self.evaluated, scratch, self._clients(), self._earlier_evidence)
        return tuple(measured.values())

    def _clients(self, models: Mapping[int, State] | None = None) -> ClientsOfRound | None:
        """For evaluators that look at them: the clients of the last round, or others with these models."""
        if not self._measurements.use_clients:
            return None
        states = self._client_models if models is None else models
        template, downlink = self._measurements.template, pack_downlink(self.evaluated, self.broadcast)
        return ClientsOfRound(states, self._attackers.ids, template, self.round, downlink, self._worker)

    def _usable(self, round: int, uploads: Uploads) -> tuple[dict[int, LocalUpdate], dict[int, str]]:
        received: dict[int, LocalUpdate] = {}
        usable: dict[int, LocalUpdate] = {}
        refused: dict[int, str] = {}
        parameters = {name: self.state[name] for name in self._parameter_names}

        @contextmanager
        def refusing(client: int) -> Iterator[None]:
            try:
                yield
            except UpdateError as error:
                reason = peer_text(error)  # it may quote names, or be the client's own
                own = re.match(rf"client {client}\b", reason)
                refused[client] = reason if own else f"client {client}: {reason}"
                log.warning("round %d: update refused: %s", round, refused[client])

        for client, (num_examples, wire) in uploads.items():
            with refusing(client):
                update = unpack_update(wire, num_examples)
                check_update(update.state, self.state, who=f"client {client}")
                self._aggregator.check_extras(update.extras, parameters, who=f"client {client}")
                received[client] = update
        for client, update in self._attackers.send(round, received, self.state).items():
            with refusing(client):
                if update is not received[client]:
                    check_update(update.state, self.state, who=f"client {client}")
                usable[client] = update
        for client, problem in self._absurd(usable).items():
            with refusing(client):
                del usable[client]
                raise UpdateError(problem)
        _refuse_empty_round(round, usable, refused)
        return usable, refused

    def _absurd(self, usable: Mapping[int, LocalUpdate]) -> dict[int, str]:
        """What is absurd in a round's updates, by client; among extras, those of a parameter start from zero."""
        sent = {client: {**update.state, **update.extras} for client, update in usable.items()}
        zeros = {
            name: torch.zeros_like(tensor)
            for update in usable.values()
            for name, tensor in update.extras.items()
            if name.rpartition("/")[2] in self.state
        }
        return absurd_changes(sent, {**self.state, **zeros})

    def _aggregate(
        self, round: int, usable: dict[int, LocalUpdate], refused: dict[int, str]
    ) -> tuple[Aggregate, State]:
        """(aggregate, next global model). While the outcome is of no use, the update that moves furthest is refused.

        Each update passed its own checks; but numbers below their limit can still overflow in an aggregator's memory
        or on the way through the model, and one client must not end the run of the others with them. Nor with a
        single number, such as a negative variance of a batch normalisation, which moves less far than training does:
        where models that were sent are of no use by themselves, one of theirs is refused.
        """
        while True:
            with seeded_global_rng(derive_seed(self.experiment.seed, "ambient aggregation", round=round)):
                aggregate = self.combined(
                    AggregationTask(
                        global_state=self.state,
                        updates=dict(usable),
                        server_state=self.server_state,
                        parameter_names=self._parameter_names,
                        num_clients=self.experiment.num_clients,
                        round=round,
                        seed=derive_seed(self.experiment.seed, "aggregator", round=round),
                        num_classes=self.dataset.num_classes,
                        unattacked=self._unattacked(usable),
                    )
                )
                check_form(aggregate.state, self.state, who=f"aggregator '{self.experiment.aggregator.name}'")
                personal = self._trainer.evaluated_personal(usable, self._personal) if self._personal else {}
                state = {**aggregate.state, **personal}
                problem = self._problem_of(aggregate, state)
            if not problem:
                return aggregate, state
            alone = [client for client in usable if self._logits_problem(usable[client].state)]
            furthest = max(alone or usable, key=lambda client: self._displacement(usable[client]))
            del usable[furthest]
            which = "which is of no use by itself" if alone else "which moves furthest"
            refused[furthest] = f"client {furthest}: with its update, {which}, {problem}"
            log.warning("round %d: update refused: %s", round, refused[furthest])
            _refuse_empty_round(round, usable, refused)

    def _unattacked(self, clients: Iterable[int]) -> frozenset[int]:
        """Those of these clients whose method trains without an attack."""
        trained_by, groups = self.experiment.trained_by, self._groups
        return frozenset(client for client in clients if not trained_by(groups.get(client)).trains_attacked)

    def combined(self, task: AggregationTask) -> Aggregate:
        """What the aggregator makes of a round's updates, if it is an aggregate."""
        pick = self.experiment.aggregator
        if pick.entry.uses_monitored_data:
            task = replace(task, monitored=self._measurements.monitored)
        given = {f"the update of client {client}": update.state for client, update in task.updates.items()}
        given |= {f"the extras of client {client}": update.extras for client, update in task.updates.items()}
        given |= {"the global model": task.global_state, "server_state": task.server_state}
        with self.experiment.attribute_errors_to(pick):
            stateless = returned.stateless(self._aggregator, self.experiment.who(pick), self._reported)
            with stateless, returned.untouched(given, f"round {task.round}: combine"):
                return self._aggregator.combine(task)

    def _of_clients(self, usable: Mapping[int, LocalUpdate]) -> dict[str, float]:
        """``train/<name>``: the mean over clients, by their examples, of each metric that the trainer declares.

        What is not finite is left out, for one client would make the mean useless; so is what else a client sends under
        the name of a metric.
        """
        found = {}
        trainers = (self.experiment.trainer, *(group.recipe.trainer for group in self.experiment.clients))
        for name in dict.fromkeys(name for trainer in trainers for name in trainer.entry.metrics):
            sent = [
                (usable[client].num_examples, value)
                for client, value in _sent(name, usable).items()
                if math.isfinite(value)
            ]
            if sent:
                total = sum(examples for examples, _ in sent)
                found[f"train/{name}"] = math.fsum(examples * value for examples, value in sent) / total
        return found

    def _of_groups(self, numbers: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
        """``group/<group>/<name>``: the mean over a group's clients of the round; nothing without groups."""
        found: dict[str, dict[str, list[float]]] = {}
        for name, by_client in numbers.items() if self._groups else ():
            for client, number in by_client.items():
                group = self._groups.get(client)
                found.setdefault(OTHERS if group is None else group.name, {}).setdefault(name, []).append(number)
        return {
            f"group/{group}/{name}": math.fsum(values) / len(values)
            for group, measured in found.items()
            for name, values in measured.items()
        }

    def _problem_of(self, aggregate: Aggregate, state: State) -> str:
        """Why nobody could go on from the outcome of a round, in words; an empty text where all is well."""
        for tensors in (state, aggregate.server_state, aggregate.broadcast):
            for name, tensor in tensors.items():
                if problem := value_problem(tensor):
                    return f"the aggregate's '{name}' {problem}"
        problem = self._logits_problem(state)
        return f"a logit of the global model {problem}" if problem else ""

    def _logits_problem(self, state: State) -> str:
        """What makes the logits of a model useless, in words; an empty text where they are finite."""
        load_state(self._model, state)
        with torch.no_grad():
            logits = logits_of(self._model, pixels(self._measurements.subset.x[:_PROBED]))
        return value_problem(logits) if isinstance(logits, Tensor) else ""  # else the evaluation finds the words

    def _personal_norms(self, usable: Mapping[int, LocalUpdate], previous: State) -> dict[int, float]:
        """How far each client moves its personal tensors, where the method has some."""
        names = [name for name in self._personal if previous[name].is_floating_point()]
        if not names:
            return {}
        return {client: update_norm(update.state, previous, names) for client, update in usable.items()}

    def _displacement(self, update: LocalUpdate) -> float:
        """Euclidean length of all that an update changes, extras included."""
        zero = {name: torch.zeros(()) for name in update.extras}
        return math.hypot(
            update_norm(update.state, self.state, self.state), update_norm(update.extras, zero, update.extras)
        )


def _refuse_empty_round(round: int, usable: Mapping[int, LocalUpdate], refused: Mapping[int, str]) -> None:
    if not usable:
        reasons = "\n".join(f"  {reason}" for _, reason in sorted(refused.items()))
        hint = "" if "train_args." in reasons else "\n  If training diverged, lower train_args.learning_rate."
        raise UpdateError(f"round {round}: {NO_UPDATE}.\n{reasons}{hint}")


def _sent(metric: str, updates: Mapping[int, LocalUpdate]) -> dict[int, float]:
    return {client: update.metrics[metric] for client, update in updates.items() if metric in update.metrics}
