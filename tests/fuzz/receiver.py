"""A server in the middle of a round, with one good update, that is handed the bytes of another one.

Imported by path in the process that ``worker.py`` forks for each case.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import calfat_plugin.host.silo.server  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.experiment import assemble
from calfat_plugin.federation.server import Server
from calfat_plugin.host.transports.base import MODEL, RefusedError, decode, read_envelope
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry

REFUSED = 2
RECIPE, GOOD = "recipe.yaml", "good.bin"


@cache
def waiting() -> tuple[Server, int, Any]:
    """A server after its first round began, and its number of examples and tensors of client 0's update.

    Reads the captured run in the folder of the worker, before the first case.
    """
    experiment = assemble(parse_document(Path(RECIPE).read_text(), RECIPE), Registry.load(entry_points=False))
    server = Server(experiment, experiment.load_dataset(), torch.device("cpu"), RunObserver())
    data = Path(GOOD).read_bytes()
    message = decode(data, read_envelope(data))
    return server, message.get("num_samples"), message.get(MODEL)


def receive(path: str) -> None:
    """Take a message as a cross-silo server does: refuse it, or finish the round with it.

    The model must stay finite, whatever came, and client 0's update must count.
    """
    server, number, model = waiting()
    data = Path(path).read_bytes()
    try:
        envelope = read_envelope(data)
        if envelope.get("num_samples") is None:
            raise RefusedError("an update without number of examples")
        message = decode(data, envelope)
    except RefusedError as error:
        print(f"error: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        sys.exit(REFUSED)
    server.start_round(1)
    record = server.finish_round(1, {0: (number, model), 1: (message.get("num_samples"), message.get(MODEL))})
    assert 0 in record.clients, "the good update does not count"
    assert (1 in record.clients) != (1 in record.refused), "neither used nor refused"
    assert all(bool(tensor.isfinite().all()) for tensor in server.state.values()), "the global model is not finite"


waiting()
