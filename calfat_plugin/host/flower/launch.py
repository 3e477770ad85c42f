"""How Flower is started: imported in silence, nothing sent to its vendor or to Ray's, its engine in a thread.

Flower calls a ``ServerApp`` from a thread of its engine. Ours hands its grid, which is all that a round needs, to the
thread that started the run. There Ctrl-C, progress bars and the threads of torch work as with FedML.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from queue import Empty, Queue
from typing import Any
from unittest import mock

#: Variables for Flower, Ray and what they start: no telemetry, no look for newer versions, no warning of hidden GPUs.
SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

logging.getLogger("alembic").setLevel(logging.WARNING)  # Flower's data base says what it imports
with mock.patch.dict(os.environ, SILENT):  # Flower reads its variables when it is imported
    import ray
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.server.superlink.fleet.vce.backend import raybackend
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from flwr.supercore import telemetry

from calfat_plugin.errors import HostError  # noqa: E402

__all__ = ["SILENT", "Engine", "Grid", "silently"]

_engine = import_module("flwr.simulation.run_simulation")  # the package has a function of this name
telemetry.FLWR_TELEMETRY_ENABLED = SILENT["FLWR_TELEMETRY_ENABLED"]  # for processes of Flower, which has imported it

_GRACE = 60.0  # seconds that the engine has to end
_INTERVAL = 0.2  # seconds between two looks whether the run is over


class Engine:
    """Flower's engine while it simulates; ``grid`` carries messages to its nodes."""

    grid: Grid

    def __init__(self, client_app: ClientApp, num_nodes: int, resources: dict[str, Any]) -> None:
        self._grids: Queue[Grid | None] = Queue()
        self._over = threading.Event()
        self._error: BaseException | None = None
        arguments = (client_app, num_nodes, resources)
        self._thread = threading.Thread(target=self._run, args=arguments, name="flower", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        try:
            grid = self._grids.get()
        except BaseException as error:  # Ctrl-C; Flower's thread would wait for ever
            self.__exit__(type(error), error, error.__traceback__)
            raise
        if grid is None:
            self._thread.join()
            self.check()
        assert grid is not None
        self.grid = grid
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        self._thread.join(_GRACE)  # it shuts Ray down itself; doing that here, too, would leave it waiting for clients

    def check(self) -> None:
        """Raise an error if the engine has ended."""
        if not self._thread.is_alive():
            raise HostError(f"Flower's engine has ended: {self._error}. log.txt of the run says more.") from self._error

    def _run(self, client_app: ClientApp, num_nodes: int, resources: dict[str, Any]) -> None:
        def main(grid: Grid, context: Context) -> None:
            self._grids.put(grid)
            self._over.wait()

        server_app = ServerApp()
        server_app.main()(main)
        try:
            with (
                mock.patch.object(_engine, "warn_deprecated_feature"),  # `flwr run` instead: users have typed something
                mock.patch.object(raybackend, "BasicActorPool", pool_until(self._over)),
            ):
                _engine.run_simulation(server_app, client_app, num_nodes, backend_config=resources)
        except BaseException as error:  # Flower ends a process by SystemExit
            self._error = error
        finally:
            self._over.set()
            self._grids.put(None)


def pool_until(over: threading.Event) -> type[BasicActorPool]:
    """Flower's pool of Ray's processes; but once the run is over, also by Ctrl-C, it starts none and waits for none."""

    class Pool(BasicActorPool):
        def add_actors_to_pool(self, num_actors: int) -> None:
            if over.is_set():
                num_actors = 0
            super().add_actors_to_pool(num_actors)

        def fetch_result_and_return_actor_to_pool(self, future: Any) -> Any:
            while not ray.wait([future], timeout=_INTERVAL)[0]:
                if over.is_set():
                    raise Empty  # which Flower's thread does not take for an error
            return super().fetch_result_and_return_actor_to_pool(future)

    return Pool


@contextmanager
def silently() -> Iterator[None]:
    """Let Flower and Ray send and print nothing for a while; what they log goes where the run's log goes."""
    logger = logging.getLogger("flwr")
    handlers = logger.handlers
    propagate = logger.propagate
    level = logger.level
    logger.handlers = []
    logger.propagate = True
    logger.setLevel(logging.INFO)
    try:
        with mock.patch.dict(os.environ, SILENT):
            yield
    finally:
        logger.handlers = handlers
        logger.propagate = propagate
        logger.setLevel(level)
