"""The interfaces of aggregators, which combine the clients' updates, and of attackers, who send updates that harm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces.training import LocalCorrection
from calfat_plugin.results import LocalUpdate, State

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.datasets import ImageData


class MonitoredData(Protocol):
    """What the server holds beside the model: the images on which it monitors the run (``calfat.monitor``).

    These are of the validation split (``data_args.validation_share``). A recipe without one has test images there: an
    aggregator that looks at them chooses by test images, which the run's results say.
    """

    @property
    def data(self) -> ImageData:
        """The images and labels, on the server's device."""
        ...

    def logits(self, state: State) -> Tensor:
        """(N, C) logits of all of these images, on the CPU.

        Args:
            state: tensors of the model, which is in evaluation mode.
        """
        ...


def _no_data() -> MonitoredData:
    raise PluginError(
        "combine asks for the server's images (task.monitored), which its entry does not declare. Give the "
        "AggregatorEntry uses_monitored_data=True; results say so where these are test images."
    )


@dataclass(frozen=True)
class AggregationTask:
    """One round's aggregation.

    Attributes:
        global_state: the model that the clients started from, on the CPU.
        updates: client id to checked update (finite, right names and shapes), ascending ids, at least one.
        server_state: what the aggregator handed back last round; empty at first.
        parameter_names: names of trainable parameters that are not personal; the other tensors are buffers, or are
            replaced after the aggregation.
        num_clients: clients in total (not only this round's).
        round: 1-based round number.
        seed: of what the aggregator draws, the round's own, derived from the run's: ``generator(task.seed, "noise")``.
        num_classes: C.
        unattacked: clients of the round whose method trains without an attack.
        monitored: gives the server's images, when called; only for entries that set ``uses_monitored_data``.
    """

    global_state: State
    updates: Mapping[int, LocalUpdate]
    server_state: State
    parameter_names: Sequence[str]
    num_clients: int
    round: int
    seed: int = 0
    num_classes: int = 0
    unattacked: frozenset[int] = frozenset()
    monitored: Callable[[], MonitoredData] = _no_data


@dataclass(frozen=True)
class Aggregate:
    """The outcome of an aggregation.

    Attributes:
        state: the new global model.
        server_state: what the aggregator wants back next round.
        broadcast: extras for every client, under a namespaced name (``scaffold/c/conv.weight``).
        weights: client id to the weight its update got, summing to 1.
        metrics: numbers for the record, under names that the entry declares.
    """

    state: State
    server_state: State = field(default_factory=dict)
    broadcast: State = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Aggregator(ABC):
    """Combines client updates into the next global model.

    Attributes:
        options: an instance of the entry's options.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def correction(self) -> LocalCorrection:
        """The aggregator's part of local training."""
        return LocalCorrection()

    def check_extras(self, extras: State, parameters: State, *, who: str) -> None:
        """Refuse one client's extras before they can spoil the aggregation; the round continues without that client.

        Args:
            extras: what came beside the client's model, under namespaced names.
            parameters: the global model's trainable parameters that are not personal, for names and shapes.
            who: the sender, as the message should name it.

        Raises:
            UpdateError: something is missing, misshapen or not finite.
        """
        return None  # most aggregators take no extras, so there is nothing to refuse

    @abstractmethod
    def combine(self, task: AggregationTask) -> Aggregate:
        """Combine the updates without touching them.

        Args:
            task: the updates, and what they started from.

        Raises:
            UpdateError: when the updates cannot be combined.
        """


# --- attackers, which exist in simulations only -----------------------------------------------------------------------


def _unseen() -> Mapping[int, State]:
    raise PluginError(
        "sent asks for the honest clients' models (task.honest), which its entry does not declare. Give the "
        "AttackerEntry sees_honest=True."
    )


@dataclass(frozen=True)
class AttackTask:
    """What one attacker knows when it sends its message.

    Attributes:
        client: its 0-based id.
        round: 1-based round number.
        own: the model that it trained, on its own data as it poisoned them.
        global_state: the model that all clients started from.
        parameter_names: names of the trainable parameters that are not personal; the other tensors are buffers.
        generator: its own stream of random numbers, on the CPU.
        num_attackers: attackers whose models are in this round, this one included.
        honest: gives the models of the round's other clients, client id to state, when called; only for entries that
            set ``sees_honest``.
    """

    client: int
    round: int
    own: State
    global_state: State
    parameter_names: Sequence[str]
    generator: Generator
    num_attackers: int
    honest: Callable[[], Mapping[int, State]] = _unseen


class Attacker:
    """A client that attacks the federation; this one does not. It is stateless, as all plugins are.

    Attributes:
        options: an instance of the entry's options.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def poisoned(self, data: ImageData, num_classes: int) -> ImageData:
        """What it trains on instead of its own data.

        Args:
            data: its training examples; they must not be changed.
            num_classes: C.
        """
        return data

    def sent(self, task: AttackTask) -> State:
        """The model that it sends instead of the one that it trained, with the same names, shapes and dtypes.

        Args:
            task: what it knows; its tensors must not be changed.
        """
        return task.own
