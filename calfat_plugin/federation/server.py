"""The server of a federation: holds the global model, aggregates and evaluates.

Everything here is a function of the experiment, the round and the messages, so every runtime gives the same bits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from calfat_plugin.datasets import Dataset, pixels
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.evidence import Evidence
from calfat_plugin.evaluators.measure import logits_of
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.early_stopping import Patience
from calfat_plugin.federation.measurements import ClientsOfRound, LoadModel, Measurements, no_worker
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
from calfat_plugin.federation.side_effects import seeded_global_rng, stateless, untouched
from calfat_plugin.federation.updates import Attackers, RoundUpdates
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
from calfat_plugin.profiling import PeakMemory, begin_part, timed
from calfat_plugin.recipe.clients import OTHERS
from calfat_plugin.results import ALIGNMENT, PASSES, EarlyStop, EvaluationResult, RoundRecord
from calfat_plugin.seeds import derive_seed

log = logging.getLogger(__name__)

Uploads: TypeAlias = "Mapping[int, tuple[int, Mapping[str, Tensor]]]"  # client to (number of examples, message)

_TRIED_CLIENTS = 2  # with which evaluators are tried before the first round
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
        self.experiment = experiment
        self.dataset = dataset
        self.device = device
        self.observer = observer
        self._trainer = experiment.build_trainer()
        self._aggregator = experiment.build_aggregator()
        self._model = experiment.build_model(dataset, self._trainer)
        self._measurements = Measurements(experiment, self._model, dataset, device, observer, load_model)
        self._personal = sorted(self._trainer.personal_names(self._model))
        self._parameter_names = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._personal:
                self._parameter_names.append(name)

        self._groups = experiment.client_groups(dataset.train.y.numpy())
        trainer_of_group = {group.name: experiment.trained_by(group).build_trainer() for group in experiment.clients}
        trainer_of_client = {client: trainer_of_group[group.name] for client, group in self._groups.items()}
        self._trainer = self._trainer.among(trainer_of_client)
        self._attackers = Attackers(experiment, self._groups, self._parameter_names)
        self._updates = UpdateHistory(experiment, self._groups)
        self._alignments = Alignments()
        self._patience = Patience(experiment)
        self._worker: Callable[[], Worker] = no_worker
        if worker is not None:
            self._worker = cache(worker)
        self._client_models: Mapping[int, State] = {}
        self._reported: set[str] = set()
        self._earlier_evidence: Evidence | None = None
        self._started = time.perf_counter()
        self._memory = PeakMemory(device)

        self.state: State = {name: tensor.detach().clone() for name, tensor in state_of(self._model).items()}
        self.average: State = {}
        self.server_state: State = {}
        self.broadcast: State = {}
        self.round = 0
        moved(self._model, device).eval()

    def begin(
        self, snapshot: Snapshot | None, records: Sequence[RoundRecord] = (), earlier: Evidence | None = None
    ) -> None:
        """Continue after ``snapshot.round``; a new run tries its evaluators first, so that mistakes in them show.

        ``records`` are the rounds that a resumed run has behind it; ``earlier`` is the evidence of a finished run, to
        whose final evaluation evaluators are added.
        """
        self._earlier_evidence = earlier
        self._measurements.set_up()
        if snapshot is None:
            # The initial model is evaluated. Honest clients of the first round stand in for those of a round.
            clients = self.clients_of(1)
            honest = [client for client in clients if client not in self._attackers.ids]
            tried = (honest or clients)[:_TRIED_CLIENTS]
            self._measurements.try_all(self.state, self._clients(dict.fromkeys(tried, self.state)))
            return
        trained = snapshot.trained or snapshot.global_state
        for state in (trained, snapshot.global_state, *snapshot.client_models.values()):
            check_update(state, self.state, who="checkpoint")
        self.round = snapshot.round
        self._patience.read(records)
        if self.is_over and self._measurements.final_uses_clients and not snapshot.client_models:
            raise RunError(
                f"the final evaluation measures the clients of round {snapshot.round}, whose models the checkpoint "
                "does not have: when it was written, the run was asked for more rounds, or for no evaluator that "
                f"measures clients. Resume with more rounds, --set train_args.comm_round={snapshot.round + 1}, or "
                "leave that evaluator out."
            )
        self.state = trained
        if snapshot.trained:
            self.average = snapshot.global_state
        self.server_state = snapshot.server_state
        self.broadcast = snapshot.broadcast
        self._client_models = snapshot.client_models
        self._updates.read(records)
        self._alignments.read(records)

    def snapshot(self, client_states: Mapping[int, State] | None = None) -> Snapshot:
        """All that must be kept at the end of a round; ``client_states`` where clients keep theirs here."""
        client_models: Mapping[int, State] = {}
        if self.is_over and self._measurements.final_uses_clients:
            client_models = self._client_models
        trained: State = {}
        if self.average:
            trained = self.state
        return Snapshot(
            round=self.round,
            global_state=self.evaluated,
            server_state=self.server_state,
            broadcast=self.broadcast,
            client_states={} if client_states is None else client_states,
            client_models=client_models,
            trained=trained,
        )

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
        experiment = self.experiment
        return sample_clients(experiment.seed, round, experiment.num_clients, experiment.clients_per_round)

    def downlink(self) -> Wire:
        return pack_downlink(self.state, self.broadcast)

    def finish_round(self, round: int, uploads: Uploads) -> RoundRecord:
        return self.evaluate_round(self.aggregate_round(round, uploads))

    def aggregate_round(self, round: int, uploads: Uploads) -> RoundRecord:
        """Aggregate a round's messages. Clients may train the next round from here on."""
        bytes_down = len(uploads) * num_bytes(self.downlink())
        bytes_up = sum(num_bytes(wire) for _, wire in uploads.values())
        previous = self.state
        with timed("aggregation"):
            updates = self._admitted(round, dict(sorted(uploads.items())))
            aggregate, self.state = self._aggregate(updates)
        self.round = round
        self.server_state = aggregate.server_state
        self.broadcast = {**aggregate.broadcast, **self._trainer.broadcast(updates.usable)}
        if self.experiment.ema is not None:
            # All earlier models together have the weight decay + decay^2 + ..., a term for each of them. So the first
            # rounds count for no more than later ones.
            decay = self.experiment.ema.decay
            earlier = math.fsum(decay**age for age in range(1, round))
            self.average = weighted_average([self.state, self.average or self.state], [1.0, earlier])
        if self._measurements.use_clients:
            self._client_models = {client: update.state for client, update in updates.usable.items()}
        record = self._record_of(updates, aggregate, previous)
        return replace(record, bytes_down=bytes_down, bytes_up=bytes_up)

    def _record_of(self, updates: RoundUpdates, aggregate: Aggregate, previous: State) -> RoundRecord:
        """The record of a round that started from the model ``previous``, before evaluations and costs are known."""
        usable = updates.usable
        drifted = drift([update.state for update in usable.values()], previous, self._parameter_names, self.state)
        personal = [name for name in self._personal if previous[name].is_floating_point()]
        norms: dict[int, float] = {}
        cosines: dict[int, float] = {}
        losses: dict[int, float] = {}
        num_examples: dict[int, int] = {}
        personal_norms: dict[int, float] = {}
        for (client, update), norm, cosine in zip(usable.items(), drifted.norms, drifted.cosines, strict=True):
            norms[client] = norm
            if not math.isnan(cosine):  # an update of zeros has no direction
                cosines[client] = cosine
            losses[client] = update.metrics.get("loss", math.nan)
            num_examples[client] = update.num_examples
            personal_norms[client] = update_norm(update.state, previous, personal)
        alignments = updates.metric(ALIGNMENT)
        alarms = (
            *self._updates.add(norms, cosines, num_examples),
            *weight_alarms(aggregate.weights, num_examples),
            *personal_alarms(personal_norms),
            *loss_alarms(updates.metric("loss")),
            *self._alignments.add(alignments),
            *step_alarms(drifted, remembers=bool(aggregate.server_state)),
        )
        for alarm in alarms:
            log.warning("round %d: %s", updates.round, alarm)
        numbers = {"loss": plausible_losses(losses), "update_norm": norms, "update_cosine": cosines}
        return RoundRecord(
            round=updates.round,
            clients=tuple(usable),
            refused=dict(sorted(updates.refused.items())),
            losses=losses,
            update_norms=norms,
            heterogeneity=drifted.heterogeneity,
            evaluations={},
            seconds=0.0,
            bytes_down=0,
            bytes_up=0,
            alarms=alarms,
            metrics=self._metrics_of(updates, numbers, aggregate),
            learning_rate=self.experiment.train.learning_rate_of(updates.round),
            num_examples=num_examples,
            weights=aggregate.weights,
            update_cosines=cosines,
            attackers_named=self._updates.named_share(attackers=True),
            others_named=self._updates.named_share(attackers=False),
            passes=sum(updates.metric(PASSES).values()) or None,
            alignments=alignments,
        )

    def evaluate_round(self, record: RoundRecord) -> RoundRecord:
        """Complete the record of the round that was aggregated last: evaluations where the recipe asks, and costs."""
        evaluations: dict[str, EvaluationResult] = {}
        if record.round % self.experiment.monitor.every == 0 or record.round == self.experiment.num_rounds:
            evaluations = self._measurements.of_round(self.evaluated, record.round, self._clients())
        metrics = dict(record.metrics)
        for label, result in evaluations.items():
            for name, number in result.metrics.items():
                metrics[f"{label}/{name}"] = number
        not_run = not_run_alarms(evaluations)
        for alarm in not_run:
            log.warning("round %d: %s", record.round, alarm)
        record = replace(record, evaluations=evaluations, alarms=(*record.alarms, *not_run), metrics=metrics)
        self._patience.add(record.round, record.accuracy(self.experiment.selecting_label or ""))
        return replace(
            record,
            stop=self.stop,
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
        if models is None:
            models = self._client_models
        return ClientsOfRound(
            states=models,
            attackers=self._attackers.ids,
            template=self._measurements.template,
            round=self.round,
            downlink=pack_downlink(self.evaluated, self.broadcast),
            worker=self._worker,
        )

    def _admitted(self, round: int, uploads: Uploads) -> RoundUpdates:
        """The updates in a round's messages, with what attackers make of theirs; those of no use are refused."""
        updates = RoundUpdates(round)
        received = {}
        parameters = {name: self.state[name] for name in self._parameter_names}
        for client, (num_examples, wire) in uploads.items():
            with updates.refusing(client):
                update = unpack_update(wire, num_examples)
                check_update(update.state, self.state, who=f"client {client}")
                self._aggregator.check_extras(update.extras, parameters, who=f"client {client}")
                received[client] = update
        for client, update in self._attackers.send(round, received, self.state).items():
            with updates.refusing(client):
                if update is not received[client]:
                    check_update(update.state, self.state, who=f"client {client}")
                updates.usable[client] = update
        sent = {}
        reference = dict(self.state)
        for client, update in updates.usable.items():
            sent[client] = {**update.state, **update.extras}
            for name, tensor in update.extras.items():
                if name.rpartition("/")[2] in self.state:  # it belongs to a tensor of the model, and starts at zero
                    reference[name] = torch.zeros_like(tensor)
        for client, problem in absurd_changes(sent, reference).items():
            updates.refuse(client, problem)
        updates.require_one()
        return updates

    def _aggregate(self, updates: RoundUpdates) -> tuple[Aggregate, State]:
        """(aggregate, next global model). While the outcome is of no use, the update that moves furthest is refused.

        Each update passed its own checks; but numbers below their limit can still overflow in an aggregator's memory
        or on the way through the model, and one client must not end the run of the others with them. Nor with a
        single number, such as a negative variance of a batch normalisation, which moves less far than training does:
        where models that were sent are of no use by themselves, one of theirs is refused.
        """
        round = updates.round
        usable = updates.usable
        while True:
            with seeded_global_rng(derive_seed(self.experiment.seed, "ambient aggregation", round=round)):
                aggregate = self.combined(self._aggregation_task(updates))
                check_form(aggregate.state, self.state, who=f"aggregator '{self.experiment.aggregator.name}'")
                state = dict(aggregate.state)
                if self._personal:
                    state |= self._trainer.evaluated_personal(usable, self._personal)
                problem = self._problem_of(aggregate, state)
            if not problem:
                return aggregate, state
            alone = [client for client in usable if self._logits_problem(usable[client].state)]
            furthest = max(alone or usable, key=lambda client: updates.displacement(client, self.state))
            why = "which moves furthest"
            if alone:
                why = "which is of no use by itself"
            updates.refuse(furthest, f"with its update, {why}, {problem}")
            updates.require_one()

    def _aggregation_task(self, updates: RoundUpdates) -> AggregationTask:
        unattacked = []
        for client in updates.usable:
            if not self.experiment.trained_by(self._groups.get(client)).trains_attacked:
                unattacked.append(client)
        return AggregationTask(
            global_state=self.state,
            updates=dict(updates.usable),
            server_state=self.server_state,
            parameter_names=self._parameter_names,
            num_clients=self.experiment.num_clients,
            round=updates.round,
            seed=derive_seed(self.experiment.seed, "aggregator", round=updates.round),
            num_classes=self.dataset.num_classes,
            unattacked=frozenset(unattacked),
        )

    def combined(self, task: AggregationTask) -> Aggregate:
        """What the aggregator returns for a round's updates; it must change nothing that it is given."""
        pick = self.experiment.aggregator
        if pick.entry.uses_monitored_data:
            task = replace(task, monitored=self._measurements.monitored)
        inputs = {}  # the first client's update comes first: in that one, what numpy writes is found as well
        for client, update in task.updates.items():
            inputs[f"the update of client {client}"] = update.state
            inputs[f"the extras of client {client}"] = update.extras
        inputs["the global model"] = task.global_state
        inputs["server_state"] = task.server_state
        with self.experiment.attribute_errors_to(pick):
            watched = stateless(self._aggregator.plugin, self.experiment.who(pick), self._reported)
            with watched, untouched(inputs, f"round {task.round}: combine"):
                return self._aggregator.combine(task)

    def _metrics_of(
        self, updates: RoundUpdates, numbers: Mapping[str, Mapping[int, float]], aggregate: Aggregate
    ) -> dict[str, float]:
        """What plugins measured in a round, and the means of ``numbers`` (name to client to number) over groups."""
        metrics: dict[str, float] = {}
        trainers = [self.experiment.trainer]
        trainers += [group.recipe.trainer for group in self.experiment.clients]
        for trainer in trainers:
            for name in trainer.entry.metrics:
                mean = updates.mean_metric(name)
                if mean is not None:
                    metrics[f"train/{name}"] = mean
        members: dict[str, list[int]] = {}
        if self._groups:
            for client in updates.usable:
                group_of_client = self._groups.get(client)
                name_of_group = OTHERS if group_of_client is None else group_of_client.name
                members.setdefault(name_of_group, []).append(client)
        for name_of_group, clients in members.items():
            for name, number_of in numbers.items():
                values = [number_of[client] for client in clients if client in number_of]
                if values:
                    metrics[f"group/{name_of_group}/{name}"] = math.fsum(values) / len(values)
        for name, number in aggregate.metrics.items():
            metrics[f"server/{name}"] = number
        return metrics

    def _problem_of(self, aggregate: Aggregate, state: State) -> str:
        """Why no round can start from the outcome of this one, in words; an empty text where all is well."""
        for tensors in (state, aggregate.server_state, aggregate.broadcast):
            for name, tensor in tensors.items():
                problem = value_problem(tensor)
                if problem:
                    return f"the aggregate's '{name}' {problem}"
        problem = self._logits_problem(state)
        if problem:
            return f"a logit of the global model {problem}"
        return ""

    def _logits_problem(self, state: State) -> str:
        """What makes the logits of a model useless, in words; an empty text where they are finite."""
        load_state(self._model, state)
        with torch.no_grad():
            logits = logits_of(self._model, pixels(self._measurements.subset.x[:_PROBED]))
        if not isinstance(logits, Tensor):
            return ""  # the evaluation refuses such a model, with an error that says what it returns
        return value_problem(logits)
