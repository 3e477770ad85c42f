"""The interface of attackers: clients that send what harms the others. They exist in simulations only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.errors import PluginError
from calfat_plugin.results import State

if TYPE_CHECKING:
    from torch import Generator

    from calfat_plugin.datasets import ImageData


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
