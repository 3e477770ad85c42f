"""The apps that `flwr run` starts: the module in `examples/flower_app` names them, and the recipe lies beside it.

Flower decides where they run. In its simulation the clients are trained by processes of Ray, as in `calfat run --host
flower`. Between SuperNodes each node is a party: its ``--node-config`` says which client it is (``partition-id``) and
where it keeps what never leaves it (``folder``), and may say where its data are (``data``).
"""

from __future__ import annotations

import logging
import os
import pickle
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid
from rich.console import Console

from calfat_plugin.disk import expanded
from calfat_plugin.errors import CalfatError, RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.flower.messages import MODEL, Answer, any_client, app_that, fields_of, tensors_of
from calfat_plugin.host.runtimes import runtime_on
from calfat_plugin.host.tasks import fingerprint
from calfat_plugin.progress import choose_progress
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.document import Document
from calfat_plugin.runs import session
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.party import any_clients_worker, train_round
from calfat_plugin.runs.request import Request, checked_experiment

CLIENT, FOLDER, DATA = "partition-id", "folder", "data"  # keys of a node's configuration
_COMMAND = ["flwr", "run"]


def server_app(folder: Path) -> ServerApp:
    """Ours, for the recipe in ``folder`` that the run's configuration names."""

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        simulated = isinstance(grid, InMemoryGrid)
        experiment = checked_experiment(_document(folder, config, simulated=simulated))
        run_dir = expanded(str(config["run-dir"])) if config["run-dir"] else None
        request = Request(experiment, run_dir, bool(config["resume"]), _COMMAND)
        directory = RunDirectory.open(request, expanded(str(config["runs"])))
        with choose_progress(Console(file=sys.stdout), plain=True) as progress:
            runtime = runtime_on(request.experiment, grid)
            session.run(request, directory, progress, runtime)
        print(f"results: {directory.path.absolute()}", flush=True)

    app = ServerApp()
    app.main()(main)
    logging.getLogger("flwr").addFilter(_without_traceback)
    return app


def _without_traceback(record: logging.LogRecord) -> bool:
    """A filter of Flower's log: the traceback of a :class:`CalfatError` is left out, and its text is kept."""
    error = (record.exc_info or sys.exc_info())[1]
    while error is not None and not isinstance(error, CalfatError):
        error = error.__cause__
    if error is None:
        return True
    if record.exc_info:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return not record.getMessage().startswith("Traceback ")


def client_app(folder: Path) -> ClientApp:
    """Ours, for the recipe in ``folder`` that the run's configuration names."""

    def train(message: Message, context: Context) -> Answer:
        node = context.node_config
        if FOLDER in node:
            return _own_round(folder, message, context)
        fields = fields_of(message)
        document = _document(folder, context.run_config, simulated=True)
        document = document.with_value(("calfat", "runtime", "precision"), fields["precision"], "the server")
        start = partial(any_clients_worker, document, fields["threads"], Path(os.devnull))
        return any_client(pickle.dumps(start), message)

    def says(context: Context) -> Mapping[str, Any]:
        experiment, client = _party(folder, context)
        return {"client": client, "recipe": fingerprint(experiment)}

    return app_that(train, says)


def _own_round(folder: Path, message: Message, context: Context) -> Answer:
    """Train this node's client on its own data."""
    experiment, client = _party(folder, context)
    fields = fields_of(message)
    own_folder = expanded(str(context.node_config[FOLDER]))
    if fields["client"] != client:
        raise RunError(f"the server asks for client {fields['client']}, and this SuperNode is client {client}.")
    request = Request(experiment, None, False, _COMMAND)
    downlink = tensors_of(message, MODEL)
    num_examples, wire = train_round(request, client + 1, own_folder, fields["round"], fields["used"], downlink)
    return Answer(num_examples, wire, {})


def _party(folder: Path, context: Context) -> tuple[Experiment, int]:
    """The experiment as this node runs it, and its client."""
    node = context.node_config
    if type(node.get(CLIENT)) is not int or FOLDER not in node:
        raise RunError(
            f"start it with --node-config '{CLIENT}=K {FOLDER}=\"/path\"': which client it is, counted from 0, and "
            f'where it keeps what never leaves it; {DATA}="/path" where its data are elsewhere than the recipe says.'
        )
    document = _document(folder, context.run_config, simulated=False)
    if DATA in node:
        place = f"{DATA} of --node-config"
        document = document.with_value(("data_args", "data_cache_dir"), str(node[DATA]), place)
    return Request(checked_experiment(document), None, False, _COMMAND).experiment, int(node[CLIENT])


def _document(folder: Path, config: Mapping[str, Any], *, simulated: bool) -> Document:
    """The recipe with the run's overrides; Flower decides on host and training type."""
    document = read_document(str(folder / str(config["recipe"])))
    try:
        overrides = shlex.split(str(config["set"]))
    except ValueError as error:
        raise RunError(f"set of the app's configuration, {config['set']}: {error}.") from None
    document = document.with_overrides(overrides)
    document = document.with_value(("common_args", "host"), "flower", "flwr run")
    kind = "simulation" if simulated else "cross_silo"
    return document.with_value(("common_args", "training_type"), kind, "flwr run")
