"""How Flower is started: what is kept quiet, and a pool whose waiting the end of the run ends."""

from __future__ import annotations

import logging
import os
import threading
from queue import Empty
from typing import Any

import pytest
import ray
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from flwr.supercore import telemetry

from calfat_plugin.host.flower import launch


def test_nothing_reports_home() -> None:
    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    before = dict(os.environ)
    with launch.silently():
        inside = dict(os.environ)
    assert {name: value for name, value in inside.items() if before.get(name) != value} == {
        name: value for name, value in launch.SILENT.items() if before.get(name) != value
    }
    assert inside.items() >= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}.items()
    assert dict(os.environ) == before


def test_flowers_log_goes_where_the_runs_goes_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr")
    before = logger.handlers, logger.propagate, logger.level
    with launch.silently():
        assert logger.handlers == []
        logger.info("from Flower")
    assert caplog.messages == ["from Flower"]
    assert (logger.handlers, logger.propagate, logger.level) == before


class TestPool:
    """With Ray's answers made up."""

    @pytest.fixture
    def over(self) -> threading.Event:
        return threading.Event()

    @pytest.fixture
    def pool(self, over: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(launch, "_INTERVAL", 0.001)
        made = launch.pool_until(over)
        monkeypatch.setattr(made, "__init__", lambda self: None)
        return made()

    def test_it_waits_while_the_run_lasts(self, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = iter([([], ["it"]), ([], ["it"]), (["it"], [])])
        monkeypatch.setattr(ray, "wait", lambda futures, timeout: next(looks))
        monkeypatch.setattr(BasicActorPool, "fetch_result_and_return_actor_to_pool", lambda self, future: future)
        assert pool.fetch_result_and_return_actor_to_pool("it") == "it"
        assert next(looks, None) is None

    def test_it_waits_no_longer_when_the_run_is_over(
        self, pool: Any, over: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def look(futures: list[str], timeout: float) -> tuple[list[str], list[str]]:
            assert not over.is_set(), "it looks again"
            over.set()
            return [], futures

        monkeypatch.setattr(ray, "wait", look)
        with pytest.raises(Empty):
            pool.fetch_result_and_return_actor_to_pool("it")

    def test_it_starts_no_process_when_the_run_is_over(
        self, pool: Any, over: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[int] = []
        monkeypatch.setattr(BasicActorPool, "add_actors_to_pool", lambda self, number: started.append(number))
        pool.add_actors_to_pool(2)
        over.set()
        pool.add_actors_to_pool(2)
        assert started == [2, 0]
