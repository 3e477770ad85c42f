"""The worker of a federation: trains clients.

In a simulation one worker serves every client; across silos each party has one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.errors import UpdateError
from calfat_plugin.experiment import Experiment
from calfat_plugin.experiment.checked import CheckedTrainer
from calfat_plugin.federation.side_effects import seeded_global_rng, stateless
from calfat_plugin.federation.updates import build_attacker
from calfat_plugin.federation.wire import Wire, num_bytes, pack_refusal, pack_update, unpack_downlink
from calfat_plugin.interfaces import InnerAttack, LocalTask, State, TrainSettings
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.maths.passes import chosen_precision, has_bf16_units
from calfat_plugin.maths.tied import each_once, load_state, moved, state_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.profiling import timed
from calfat_plugin.recipe.schema import ClientGroup
from calfat_plugin.results import LocalUpdate
from calfat_plugin.seeds import derive_seed

log = logging.getLogger(__name__)

_ONE_VALUE = "more than 1 value per channel when training"  # PyTorch's words
_PERSONAL = "personal/"  # namespace of a client's personal tensors in its state


@dataclass(frozen=True)
class _Training:
    """How a client trains: as the run does, or as its group of ``calfat.clients`` does."""

    experiment: Experiment
    trainer: CheckedTrainer
    inner: InnerAttack
    group: ClientGroup | None = None

    @classmethod
    def of(cls, experiment: Experiment, group: ClientGroup | None = None) -> _Training:
        return cls(experiment, experiment.build_trainer(), experiment.build_inner(), group)


class Worker:
    """Trains clients. Each call to :meth:`fit` is one client's local training in one round.

    Of the data set only shapes and augmentation are used; training changes ``client_states``.
    """

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        shards: Mapping[int, ImageData],
        device: torch.device,
        observer: RunObserver,
        client_states: MutableMapping[int, State] | None = None,
    ) -> None:
        self.experiment = experiment
        self.shards = shards
        self.device = device
        self.observer = observer
        self.client_states: MutableMapping[int, State] = {}
        if client_states is not None:
            self.client_states = client_states
        self._dataset = dataset
        self._reported: set[str] = set()

        self._training = _Training.of(experiment)
        self._training_of_client: dict[int, _Training] = {}
        training_of_group: dict[str, _Training] = {}
        for client, group in experiment.client_groups(dataset.train.y.numpy()).items():
            if group.name not in training_of_group:
                training_of_group[group.name] = _Training.of(experiment.trained_by(group), group)
            self._training_of_client[client] = training_of_group[group.name]

        trainer = self._training.trainer
        self._correction = experiment.build_aggregator().correction()
        self._model = moved(experiment.build_model(dataset, trainer), device)
        self._personal = trainer.personal_names(self._model)
        self._precision = chosen_precision(experiment.runtime.precision, device)
        log.info("clients train in %s on %s", self._precision, device)
        if self._precision == "bf16" and not has_bf16_units(device):
            log.warning("calfat.runtime.precision is bf16, but %s has no units for it: fp32 would be faster", device)

    def num_examples(self, client: int) -> int:
        return len(self.shards[client])

    @property
    def num_classes(self) -> int:
        return self._dataset.num_classes

    @property
    def model_bytes(self) -> int:
        return num_bytes(state_of(self._model))

    def check_downlink(self, downlink: Mapping[str, Tensor]) -> None:
        """Refuse a message of the server that does not fit this worker's model."""
        received, _ = unpack_downlink(downlink)
        check_update(received, state_of(self._model), who="server")

    def fit(self, client: int, round: int, downlink: Mapping[str, Tensor]) -> Wire:
        """Train one client from the global model and return its message.

        A client whose training leaves the finite numbers, or ends in something that is no update of this model, answers
        with a refusal; the round continues without it, and its kept state stays as it was.
        """
        settings = self._training_of(client).experiment.train_settings(round)
        try:
            update = self._update(client, round, downlink, settings, self.experiment.seed)
        except UpdateError as error:
            log.warning("client %d has no update in round %d: %s", client, round, error)
            return pack_refusal(str(error))
        personal = {_PERSONAL + name: update.state[name] for name in sorted(self._personal)}
        self.client_states[client] = {**update.client_state, **personal}
        return pack_update(update)

    def fine_tuned(self, client: int, round: int, downlink: Mapping[str, Tensor], epochs: int) -> State:
        """The global model after local epochs of one client, at the learning rate of ``round``.

        The client's state stays as it was.
        """
        settings = self._training_of(client).experiment.train_settings(round)
        settings = replace(settings, epochs=epochs, local_steps=None)
        return self._update(client, round, downlink, settings, derive_seed(self.experiment.seed, "fine-tune")).state

    def _training_of(self, client: int) -> _Training:
        return self._training_of_client.get(client, self._training)

    def _update(
        self, client: int, round: int, downlink: Mapping[str, Tensor], settings: TrainSettings, seed: int
    ) -> LocalUpdate:
        """Train one client from the global model and from its state, which stays as it was."""
        received, broadcast = unpack_downlink(downlink)
        client_state = self.client_states.get(client, {})
        start = dict(received)
        for name in self._personal:
            if _PERSONAL + name in client_state:  # not in its first round
                start[name] = client_state[_PERSONAL + name]
        load_state(self._model, start)

        training = self._training_of(client)
        experiment = training.experiment
        data = self.shards[client]
        if training.group is not None and training.group.attacker is not None:
            data = build_attacker(self.experiment, training.group).poisoned(data, self._dataset.num_classes)
        task = LocalTask(
            model=self._model,
            data=data,
            class_counts=torch.bincount(data.y, minlength=self._dataset.num_classes).cpu(),
            threat=experiment.threat.in_training,
            settings=settings,
            augment=self._dataset.augment,
            device=self.device,
            seed=seed,
            round=round,
            client=client,
            client_state=client_state,
            broadcast=broadcast,
            correction=self._correction,
            inner=training.inner,
            label_smoothing=experiment.additions.label_smoothing,
            awp=experiment.additions.awp,
            clean_rounds=experiment.additions.clean_rounds,
            by_class=experiment.threat.by_class,
            personal=self._personal,
            precision=self._precision,
            on_batch=self.observer.client_progress,
        )
        with seeded_global_rng(derive_seed(seed, "ambient", round=round, client=client)), timed("training"):
            update = self._trained(task, training)
        # A trainer with a loop of its own may give torch's state dict.
        update = replace(update, state=each_once(update.state, self._model, who=f"client {client}"))
        check_update(update.state, received, who=f"client {client}")
        return update

    def _trained(self, task: LocalTask, training: _Training) -> LocalUpdate:
        """What the client's trainer returns; a batch of one example is a refusal and no crash."""
        who = self.experiment.who(training.experiment.trainer)
        try:
            with stateless(training.trainer.plugin, who, self._reported):
                return training.trainer.fit(task)
        except ValueError as error:
            if _ONE_VALUE not in str(error):
                raise
            raise UpdateError(
                f"client {task.client}, round {task.round}: batch normalisation cannot train on one example a batch: "
                f"train_args.batch_size is {task.settings.batch_size}, the client has {len(task.data)} examples. Raise "
                "what is 1 (data_args decides on the examples), or take a model without batch normalisation."
            ) from None


class Shards(Mapping[int, ImageData]):
    """Client id to its training examples, copied when asked for, so that all is in memory only once."""

    def __init__(self, data: ImageData, indices: Sequence[npt.NDArray[np.int64]]) -> None:
        self._data = data
        self._indices = indices

    def __getitem__(self, client: int) -> ImageData:
        if client not in range(len(self)):
            raise KeyError(client)
        return self._data.subset(self._indices[client])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._indices)


def shards_of(experiment: Experiment, dataset: Dataset, device: torch.device) -> Shards:
    """Split the training set as the recipe says; the shards live on ``device``."""
    return Shards(dataset.train.to(device), experiment.split(dataset.train.y.numpy()))
