"""How a suite shares the machine between its runs and their workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.registry import Registry
from calfat_plugin.suites.parse import load_suite
from calfat_plugin.suites.plan import SuitePlan, make_plan
from calfat_plugin.suites.runner import default_jobs, environment
from tests.suites.files import SUITE, write_suite


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    return tmp_path


def plan_of(folder: Path, text: str = SUITE) -> SuitePlan:
    return make_plan(load_suite(write_suite(folder, text)), Registry.load(entry_points=False))


def test_threads_are_shared_and_gpus_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [environment(slot, 3)["OMP_NUM_THREADS"] for slot in range(3)] == ["2", "2", "2"]
    assert [environment(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["3", "5", "3"]
    assert environment(0, 1)["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert environment(0, 16)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("jobs", "workers", "threads"), [(1, "4", "2"), (2, "4", "1"), (2, "1", "4"), (3, "4", "1"), (1, "auto", "8")]
)
def test_the_threads_of_a_run_are_for_all_of_its_workers(folder: Path, jobs: int, workers: str, threads: str) -> None:
    assert environment(0, jobs, workers)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("gpu", "visible", "workers", "jobs"),
    [
        *(("false", "", None, 8), ("true", "", None, 1), ("true", "0,1", None, 2)),
        *(("false", "", "1", 8), ("false", "", "3", 2), ("false", "", "9", 1), ("false", "", "auto", 1)),
        *(("true", "0,1", "2", 1), ("true", "0,1", "auto", 1)),
    ],
)
def test_the_default_number_of_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, visible: str, workers: str | None, jobs: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = SUITE.replace("train_args.comm_round: 1", f"device_args.using_gpu: {gpu}")
    assert default_jobs(plan_of(folder, text), workers) == jobs
