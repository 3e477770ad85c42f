"""The rounds of a run over Flower's grid: what the server sends to the nodes, and what it makes of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from calfat_plugin.errors import HostError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.host.flower.messages import MODEL, STATE, Answer, answer_in, content, packed
from calfat_plugin.host.tasks import ServerTask, max_message
from calfat_plugin.peer_text import peer_text
from calfat_plugin.results import State

_INTERVAL = 0.05  # seconds between two looks for answers


class RemoteTrainingError(RuntimeError):
    """A bug showed where a client was trained; the traceback from there is in the text."""


def run_rounds(
    task: ServerTask, grid: Grid, nodes: Mapping[int, int], check: Callable[[], None], *, states_travel: bool
) -> None:
    """All remaining rounds.

    Args:
        task: whose rounds.
        grid: carries the messages.
        nodes: client to the node that trains it.
        check: raises what ends the run while it waits.
        states_travel: any node trains any client, so what a client keeps is kept here and travels with the models, and
            the next round is trained while this one is evaluated. Otherwise nodes keep it.
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
        rounds.note_used(aggregated.clients, aggregated.round, answers)
        # Where nodes keep states, the next model makes a node forget the state before this round. So that model is sent
        # after this round is on the disk.
        is_sent_ahead = states_travel and not server.is_over and not server.evaluation_decides
        if is_sent_ahead:
            sent = rounds.send()
        record = server.evaluate_round(aggregated)
        task.on_round(record, rounds.snapshot())
        if server.is_over:
            return
        if not is_sent_ahead:
            sent = rounds.send()
        server.start_round(server.round + 1)


class _Rounds:
    """The messages of the rounds, and what clients keep between them."""

    def __init__(
        self, task: ServerTask, grid: Grid, nodes: Mapping[int, int], check: Callable[[], None], states_travel: bool
    ) -> None:
        self._task = task
        self._grid = grid
        self._nodes = nodes
        self._check = check
        self._states_travel = states_travel
        self._used = dict(task.used)  # client to the last round that used its update
        self._limit: int | None = None  # bytes of an answer
        if not states_travel:
            self._limit = max_message(task.server.experiment, num_bytes(task.server.state))

    def send(self) -> dict[str, int]:
        """Ask the clients of the next round to train; message id to client."""
        server = self._task.server
        round = server.round + 1
        model = packed(server.downlink())
        clients = server.clients_of(round)
        messages = []
        for client in clients:
            state: State = {}
            if self._states_travel:
                state = self._task.client_states.get(client, {})
            request = content(
                {MODEL: model, STATE: packed(state)},
                round=round,
                client=client,
                used=self._used.get(client, 0),
                # Ray's processes would choose both by what they see: one core, and perhaps no GPU.
                threads=torch.get_num_threads(),
                precision=server.experiment.runtime.precision,
            )
            messages.append(Message(request, self._nodes[client], MessageType.TRAIN))
        message_ids = list(self._grid.push_messages(messages))
        if len(message_ids) != len(clients) or not all(message_ids):
            raise HostError(f"round {round}: Flower did not take all messages to the clients; its log says why.")
        return dict(zip(message_ids, clients, strict=True))

    def collect(self, sent: Mapping[str, int]) -> dict[int, Answer]:
        """Wait for the answers to all messages, by client."""
        waiting = dict(sent)
        answers: dict[int, Answer] = {}
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
        if answer.trouble is None:
            return answer
        text, is_users = answer.trouble
        if not self._states_travel:  # a party sent it: its text is made fit to show, and a bug there is not ours
            raise HostError(f"{where} cannot train: {peer_text(text)}")
        if is_users:
            raise HostError(f"{where} cannot train: {text}")
        raise RemoteTrainingError(f"{where}: {text}")

    def note_used(self, clients: Iterable[int], round: int, answers: Mapping[int, Answer]) -> None:
        """Note whose updates a round has used; the other clients go on from what they kept before."""
        for client in clients:
            self._used[client] = round
            if self._states_travel:
                self._task.client_states[client] = answers[client].state

    def snapshot(self) -> Snapshot:
        if not self._states_travel:
            return self._task.server.snapshot()
        return self._task.server.snapshot(self._task.client_states)
