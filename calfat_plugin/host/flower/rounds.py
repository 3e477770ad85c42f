"""The rounds of a run over Flower's grid: what the server sends to the nodes, and what it makes of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from calfat_plugin.errors import HostError
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.host.flower.messages import MODEL, STATE, Answer, answer_in, content, packed
from calfat_plugin.host.tasks import ServerTask, max_message
from calfat_plugin.peer_text import peer_text

_INTERVAL = 0.05  # seconds between two looks for answers


class RemoteTrainingError(RuntimeError):
    """A bug showed where a client was trained; the traceback from there is in the text."""


def run_rounds(
    task: ServerTask, grid: Grid, nodes: Mapping[int, int], check: Callable[[], None], *, states_travel: bool
) -> None:
    """All remaining rounds; ``nodes`` has the node of each client, ``check`` raises what ends the run while it waits.

    Where states travel, any node trains any client: what a client keeps is kept here and goes to and fro with the
    models, and the next round is trained while this one is evaluated. Otherwise nodes keep it.
    """
    server = task.server
    if server.is_over:  # the run was stopped in its final evaluation
        return
    rounds = _Rounds(task, grid, nodes, check, states_travel)
    sent = rounds.send()
    server.start_round(server.round + 1)
    while True:
        answers = rounds.collect(sent)
        uploads = {client: (answer.num_examples, answer.wire) for client, answer in answers.items()}
        aggregated = server.aggregate_round(server.round + 1, uploads)
        rounds.used |= dict.fromkeys(aggregated.clients, aggregated.round)
        for client in aggregated.clients if states_travel else ():  # the others keep what they kept
            task.client_states[client] = answers[client].state
        # With the next model, a node that keeps states forgets what it kept before this round.
        ahead = states_travel and not server.is_over and not server.evaluation_decides
        if ahead:
            sent = rounds.send()
        task.on_round(server.evaluate_round(aggregated), server.snapshot(task.client_states if states_travel else None))
        if server.is_over:
            return
        if not ahead:
            sent = rounds.send()
        server.start_round(server.round + 1)


class _Rounds:
    def __init__(
        self, task: ServerTask, grid: Grid, nodes: Mapping[int, int], check: Callable[[], None], states_travel: bool
    ) -> None:
        self._task, self._grid, self._nodes, self._check = task, grid, nodes, check
        self._states_travel = states_travel
        size = num_bytes(task.server.state)
        self._limit = None if states_travel else max_message(task.server.experiment, size)
        self.used = dict(task.used)

    def send(self) -> dict[str, int]:
        """Ask the clients of the next round to train; message id to client."""
        server = self._task.server
        round = server.round + 1
        model, clients = packed(server.downlink()), server.clients_of(round)
        # Ray's processes would choose both by what they see: one core, and perhaps no GPU.
        chosen = {"threads": torch.get_num_threads(), "precision": server.experiment.runtime.precision}
        messages = []
        for client in clients:
            state = self._task.client_states.get(client, {}) if self._states_travel else {}
            fields = {"round": round, "client": client, "used": self.used.get(client, 0), **chosen}
            arrays = {MODEL: model, STATE: packed(state)}
            messages.append(Message(content(arrays, **fields), self._nodes[client], MessageType.TRAIN))
        sent = list(self._grid.push_messages(messages))
        if len(sent) != len(clients) or not all(sent):
            raise HostError(f"round {round}: Flower did not take all messages to the clients; its log says why.")
        return dict(zip(sent, clients, strict=True))

    def collect(self, sent: Mapping[str, int]) -> dict[int, Answer]:
        waiting, answers = dict(sent), dict[int, Answer]()
        while waiting:
            self._check()
            for reply in self._grid.pull_messages(list(waiting)):
                client = waiting.pop(reply.metadata.reply_to_message_id)
                answers[client] = self._answer(client, reply)
            if waiting:
                time.sleep(_INTERVAL)
        return answers

    def _answer(self, client: int, reply: Message) -> Answer:
        where = f"round {self._task.server.round + 1}: client {client}"
        if reply.has_error():
            reason = peer_text(reply.error.reason)
            raise HostError(f"{where} has not answered; Flower says: {reason}. Finished rounds are kept: resume it.")
        answer = answer_in(reply, self._limit)
        if answer.trouble is not None:
            text, is_users = answer.trouble if self._states_travel else (peer_text(answer.trouble[0]), True)
            raise HostError(f"{where} cannot train: {text}") if is_users else RemoteTrainingError(f"{where}: {text}")
        return answer
