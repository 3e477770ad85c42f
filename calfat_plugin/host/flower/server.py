"""Flower's server side with ours inside: its simulation, started here or by ``flwr run``, and its SuperNodes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from flwr.app import Message, MessageType

from calfat_plugin.compat import num_cores
from calfat_plugin.errors import HostError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.flower.client import any_client_app
from calfat_plugin.host.flower.launch import Engine, Grid, silently
from calfat_plugin.host.flower.messages import content, fields_of
from calfat_plugin.host.flower.rounds import run_rounds
from calfat_plugin.host.tasks import ServerTask, fingerprint
from calfat_plugin.peer_text import peer_text
from calfat_plugin.results import EvaluationResult

_CLUSTER = "RAY_ADDRESS"  # Ray's own variable: of a cluster to join
_PAUSE = 0.05  # seconds between two looks for nodes
_REMIND = 30.0  # seconds between two reports of who or how many are missing


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
    node_ids = _wait_for_nodes(grid, task.server.experiment.num_clients, check, task.warn)
    nodes = dict(enumerate(node_ids))
    run_rounds(task, grid, nodes, check, states_travel=True)


def _no_check() -> None:
    """Of an engine that somebody else has started, nothing is known."""


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
                self._ask(new_nodes)
            if self._asked:
                self._take_answers()
            missing = sorted(set(range(self._num_clients)) - set(self._nodes))
            if not missing:
                return self._nodes
            if time.monotonic() > remind_at:
                self._warn(f"still waiting for SuperNodes of the clients {', '.join(map(str, missing))}.")
                remind_at += _REMIND
            time.sleep(_PAUSE)

    def _ask(self, nodes: Collection[int]) -> None:
        messages = [Message(content({}), node, MessageType.QUERY) for node in nodes]
        message_ids = self._grid.push_messages(messages)
        for node, message_id in zip(nodes, message_ids, strict=True):
            if message_id:  # else the node has gone meanwhile
                self._asked[message_id] = node
                self._known.add(node)

    def _take_answers(self) -> None:
        for reply in self._grid.pull_messages(list(self._asked)):
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                raise HostError(f"SuperNode {node} cannot take part: {peer_text(reply.error.reason)}")
            self._enter(node, reply)

    def _enter(self, node: int, reply: Message) -> None:
        """Check who a node says that it is."""
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


def _wait_for_nodes(grid: Grid, number: int, check: Callable[[], None], warn: Callable[[str], None]) -> list[int]:
    """As many nodes, once Flower has registered them; ``warn`` is given how many are missing."""
    remind_at = time.monotonic() + _REMIND
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= number:
            return nodes[:number]
        check()
        if time.monotonic() > remind_at:
            warn(
                f"still waiting for nodes of Flower's simulation: {len(nodes)} of {number} are there. With flwr run, "
                f"add --federation-config 'num-supernodes={number}'."
            )
            remind_at += _REMIND
        time.sleep(_PAUSE)


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
