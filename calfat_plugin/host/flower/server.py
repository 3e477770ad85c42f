"""Flower's server side with ours inside: the rounds over its grid, in its simulation or between SuperNodes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from flwr.app import Message, MessageType

from calfat_plugin.compat import num_cores
from calfat_plugin.errors import HostError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.host.flower.launch import Engine, Grid, silently
from calfat_plugin.host.flower.messages import (
    MODEL,
    STATE,
    Answer,
    answer_in,
    any_client_app,
    content,
    fields_of,
    packed,
)
from calfat_plugin.host.tasks import ServerTask, fingerprint, max_message
from calfat_plugin.peer_text import peer_text
from calfat_plugin.results import EvaluationResult, State

_CLUSTER = "RAY_ADDRESS"  # Ray's own variable: of a cluster to join
_PAUSE = 0.05  # seconds between two looks for nodes, or for their answers
_REMIND = 30.0  # seconds between two reports of who or how many are missing


# --- rounds -----------------------------------------------------------------------------------------------------------


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
                time.sleep(_PAUSE)
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


# --- a simulation -----------------------------------------------------------------------------------------------------


def simulate(task: ServerTask, grid: Grid | None) -> tuple[EvaluationResult, ...]:
    """Run all remaining rounds in Flower's simulation, then the final evaluation."""
    server = task.server
    if server.is_over:  # the run was stopped in its final evaluation
        return server.final_evaluation(task.scratch)
    if grid is None:
        assert task.start_elsewhere is not None
        app = any_client_app(task.start_elsewhere)
        experiment = server.experiment
        with silently(), Engine(app, experiment.num_clients, resources(experiment)) as engine:
            _simulate_rounds(task, engine.grid, engine.check)
    else:
        _simulate_rounds(task, grid, _no_check)
    return server.final_evaluation(task.scratch)


def _simulate_rounds(task: ServerTask, grid: Grid, check: Callable[[], None]) -> None:
    """Wait until Flower has registered as many nodes as there are clients, then run the rounds on them."""
    num_clients = task.server.experiment.num_clients
    remind_at = time.monotonic() + _REMIND
    node_ids = sorted(grid.get_node_ids())
    while len(node_ids) < num_clients:
        check()
        if time.monotonic() > remind_at:
            task.warn(
                f"still waiting for nodes of Flower's simulation: {len(node_ids)} of {num_clients} are there. With "
                f"flwr run, add --federation-config 'num-supernodes={num_clients}'."
            )
            remind_at += _REMIND
        time.sleep(_PAUSE)
        node_ids = sorted(grid.get_node_ids())
    nodes = dict(enumerate(node_ids[:num_clients]))
    run_rounds(task, grid, nodes, check, states_travel=True)


def _no_check() -> None:
    """Of an engine that somebody else has started, nothing is known."""


def resources(experiment: Experiment) -> dict[str, Any]:
    """What Flower's engine and Ray are given: cores and GPUs of each client, and of this machine what a round needs."""
    cores = num_cores()
    client_cpus = experiment.flower.client_cpus or experiment.runtime.threads or cores
    client_gpus = experiment.flower.client_gpus
    if client_gpus is None:
        client_gpus = float(experiment.device.using_gpu)
    of_ray: dict[str, Any] = {"log_to_driver": False}
    if not os.environ.get(_CLUSTER):
        clients_at_once = min(int(cores / client_cpus), experiment.clients_per_round)
        if clients_at_once == 0:
            raise experiment.document.error(
                ("calfat", "flower", "client_cpus"),
                f"a client is to have {client_cpus:g} cores, but this machine has {cores}. Write {cores} or less, or "
                f"name a Ray cluster in {_CLUSTER}.",
            )
        of_ray["num_cpus"] = math.ceil(clients_at_once * client_cpus)
    return {"client_resources": {"num_cpus": client_cpus, "num_gpus": client_gpus}, "init_args": of_ray}


# --- SuperNodes -------------------------------------------------------------------------------------------------------


def serve(task: ServerTask, grid: Grid) -> tuple[EvaluationResult, ...]:
    """Run all remaining rounds with SuperNodes, each a client with data of its own, then the final evaluation."""
    experiment = task.server.experiment
    if not task.server.is_over:
        nodes = RollCall(grid, experiment, task.warn).complete()
        run_rounds(task, grid, nodes, _no_check, states_travel=False)
    return task.server.final_evaluation(task.scratch)


class RollCall:
    """Which node is which client: every node is asked once, until all clients are there."""

    def __init__(self, grid: Grid, experiment: Experiment, warn: Callable[[str], None]) -> None:
        self._grid = grid
        self._num_clients = experiment.num_clients
        self._warn = warn
        self._fingerprint = fingerprint(experiment)
        self._asked: dict[str, int] = {}  # id of a question to the node that has not answered it
        self._known: set[int] = set()  # nodes that were asked
        self._nodes: dict[int, int] = {}  # client to its node

    def complete(self) -> dict[int, int]:
        """Client id to node id, once all clients have come; Flower knows no deadline."""
        remind_at = time.monotonic() + _REMIND
        while True:
            new_nodes = set(self._grid.get_node_ids()) - self._known
            if new_nodes:
                messages = [Message(content({}), node, MessageType.QUERY) for node in new_nodes]
                message_ids = self._grid.push_messages(messages)
                for node, message_id in zip(new_nodes, message_ids, strict=True):
                    if message_id:  # else the node has gone meanwhile
                        self._asked[message_id] = node
                        self._known.add(node)
            if self._asked:
                for reply in self._grid.pull_messages(list(self._asked)):
                    node = self._asked.pop(reply.metadata.reply_to_message_id)
                    self._enter(node, reply)
            missing = sorted(set(range(self._num_clients)) - set(self._nodes))
            if not missing:
                return self._nodes
            if time.monotonic() > remind_at:
                self._warn(f"still waiting for SuperNodes of the clients {', '.join(map(str, missing))}.")
                remind_at += _REMIND
            time.sleep(_PAUSE)

    def _enter(self, node: int, reply: Message) -> None:
        """Check who a node says that it is."""
        if reply.has_error():
            raise HostError(f"SuperNode {node} cannot take part: {peer_text(reply.error.reason)}")
        fields: Mapping[str, Any] = {}
        with suppress(KeyError):  # the checks below refuse a reply without fields
            fields = fields_of(reply)
        if "trouble" in fields:
            raise HostError(f"SuperNode {node} cannot take part: {peer_text(fields['trouble'])}")
        client = fields.get("client")
        if type(client) is not int or not 0 <= client < self._num_clients:
            raise HostError(
                f"SuperNode {node} says that it is client {peer_text(client)}; the clients of this recipe are 0 to "
                f"{self._num_clients - 1} (partition-id in its --node-config)."
            )
        if client in self._nodes:
            raise HostError(f"the SuperNodes {self._nodes[client]} and {node} both say that they are client {client}.")
        if fields.get("recipe") != self._fingerprint:
            raise HostError(f"SuperNode {node}, client {client}, runs another recipe or another calfat_plugin.")
        self._nodes[client] = node
