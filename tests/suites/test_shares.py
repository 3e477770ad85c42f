"""How a suite shares the machine between its runs and their workers."""

from __future__ import annotations

from typing import Any

import pytest

from calfat_plugin.suites.processes import default_jobs, environment
from tests.suites.files import SUITE


def test_threads_are_shared_and_gpus_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [environment(slot, 3)["OMP_NUM_THREADS"] for slot in range(3)] == ["2", "2", "2"]
    assert [environment(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["3", "5", "3"]
    assert environment(0, 1)["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert environment(0, 16)["OMP_NUM_THREADS"] == "1"
    for jobs, workers, threads in ((1, "4", "2"), (2, "4", "1"), (2, "1", "4"), (3, "4", "1"), (1, "auto", "8")):
        assert environment(0, jobs, workers)["OMP_NUM_THREADS"] == threads  # for all workers of a run


@pytest.mark.parametrize(
    ("gpu", "visible", "workers", "jobs"),
    [
        *(("false", "", None, 8), ("true", "", None, 1), ("true", "0,1", None, 2)),
        *(("false", "", "1", 8), ("false", "", "3", 2), ("false", "", "9", 1), ("false", "", "auto", 1)),
        *(("true", "0,1", "2", 1), ("true", "0,1", "auto", 1)),
    ],
)
def test_the_default_number_of_jobs(
    plan_of: Any, monkeypatch: pytest.MonkeyPatch, gpu: str, visible: str, workers: str | None, jobs: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = SUITE.replace("train_args.comm_round: 1", f"device_args.using_gpu: {gpu}")
    assert default_jobs(plan_of(text), workers) == jobs
