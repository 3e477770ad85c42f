"""Flower's server side with ours inside: its simulation, started here or by ``flwr run``, and its SuperNodes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
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
    if not server.is_over:  # else the run was stopped in its final evaluation
        assert task.start_elsewhere is not None
        app, clients = any_client_app(task.start_elsewhere), server.experiment.num_clients
        with ExitStack() as at_end:
            check: Callable[[], None] = lambda: None  # noqa: E731 (of an engine that is not ours, nothing is known)
            if grid is None:
                at_end.enter_context(silently())
                engine = at_end.enter_context(Engine(app, clients, resources(server.experiment)))
                grid, check = engine.grid, engine.check
            nodes = dict(enumerate(_nodes(grid, clients, check, task.warn)))
            run_rounds(task, grid, nodes, check, states_travel=True)
    return server.final_evaluation(task.scratch)


def serve(task: ServerTask, grid: Grid) -> tuple[EvaluationResult, ...]:
    """Run all remaining rounds with SuperNodes, each a client with data of its own, then the final evaluation."""
    experiment = task.server.experiment
    if not task.server.is_over:
        nodes = _Roll(grid, experiment, task.warn).complete()
        run_rounds(task, grid, nodes, lambda: None, states_travel=False)
    return task.server.final_evaluation(task.scratch)


class _Roll:
    """Which node is which client: every node is asked once, until all clients are there."""

    def __init__(self, grid: Grid, experiment: Experiment, warn: Callable[[str], None]) -> None:
        self._grid, self._clients, self._warn = grid, experiment.num_clients, warn
        self._recipe = fingerprint(experiment)
        self._asked: dict[str, int] = {}
        self._known: set[int] = set()
        self._nodes: dict[int, int] = {}

    def complete(self) -> dict[int, int]:
        """Client id to node id, once all clients have come; Flower knows no deadline."""
        remind_at = time.monotonic() + _REMIND
        while len(self._nodes) < self._clients:
            self._ask(set(self._grid.get_node_ids()) - self._known)
            for reply in self._grid.pull_messages(list(self._asked)) if self._asked else ():
                node = self._asked.pop(reply.metadata.reply_to_message_id)
                self._enter(node, reply)
            missing = sorted(set(range(self._clients)) - set(self._nodes))
            if missing and time.monotonic() > remind_at:
                self._warn(f"still waiting for SuperNodes of the clients {', '.join(map(str, missing))}.")
                remind_at += _REMIND
            time.sleep(_PAUSE)
        return self._nodes

    def _ask(self, nodes: Collection[int]) -> None:
        messages = [Message(content({}), node, MessageType.QUERY) for node in nodes]
        for node, sent in zip(nodes, self._grid.push_messages(messages) if messages else (), strict=True):
            if sent:  # else it has gone meanwhile
                self._asked[sent] = node
                self._known.add(node)

    def _enter(self, node: int, reply: Message) -> None:
        try:
            found = {"trouble": reply.error.reason} if reply.has_error() else fields_of(reply)
        except KeyError:
            found = {}
        if "trouble" in found:
            raise HostError(f"SuperNode {node} cannot take part: {peer_text(found['trouble'])}")
        client, recipe = found.get("client"), found.get("recipe")
        if type(client) is not int or not 0 <= client < self._clients:
            raise HostError(
                f"SuperNode {node} says that it is client {peer_text(client)}; the clients of this recipe are 0 to "
                f"{self._clients - 1} (partition-id in its --node-config)."
            )
        if client in self._nodes:
            raise HostError(f"the SuperNodes {self._nodes[client]} and {node} both say that they are client {client}.")
        if recipe != self._recipe:
            raise HostError(f"SuperNode {node}, client {client}, runs another recipe or another calfat_plugin.")
        self._nodes[client] = node


def _nodes(grid: Grid, number: int, check: Callable[[], None], warn: Callable[[str], None]) -> list[int]:
    """As many nodes; Flower registers them while the rounds could begin already. Who has started too few is told."""
    remind_at = time.monotonic() + _REMIND
    while len(found := sorted(grid.get_node_ids())) < number:
        check()
        if time.monotonic() > remind_at:
            warn(
                f"still waiting for nodes of Flower's simulation: {len(found)} of {number} are there. With flwr run, "
                f"add --federation-config 'num-supernodes={number}'."
            )
            remind_at += _REMIND
        time.sleep(_PAUSE)
    return found[:number]


def resources(experiment: Experiment) -> dict[str, Any]:
    """What Flower's engine and Ray are given: cores and GPUs of each client, and of this machine what a round needs."""
    cores = num_cores()
    cpus = experiment.flower.client_cpus or experiment.runtime.threads or cores
    gpus = experiment.flower.client_gpus
    gpus = float(experiment.device.using_gpu) if gpus is None else gpus
    of_ray: dict[str, Any] = {"log_to_driver": False}
    if not os.environ.get(_CLUSTER):
        at_once = min(int(cores / cpus), experiment.clients_per_round)
        if at_once == 0:
            raise experiment.document.error(
                ("calfat", "flower", "client_cpus"),
                f"a client is to have {cpus:g} cores, but this machine has {cores}. Write {cores} or less, or name a "
                f"Ray cluster in {_CLUSTER}.",
            )
        of_ray["num_cpus"] = math.ceil(at_once * cpus)
    return {"client_resources": {"num_cpus": cpus, "num_gpus": gpus}, "init_args": of_ray}
