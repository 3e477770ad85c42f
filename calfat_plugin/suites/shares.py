"""How a suite shares the machine: how many runs at a time, and the cores and GPUs of each."""

from __future__ import annotations

import os

from calfat_plugin.runs.workers import AUTO, asked_workers
from calfat_plugin.suites.plan import Plan


def default_jobs(plan: Plan, workers: str | None = None) -> int:
    """One run a core; where runs want a GPU, one a visible GPU when CUDA_VISIBLE_DEVICES lists them, else one.

    With workers, one run for as many cores as it has workers; where they want GPUs, or fill the machine, one.
    """
    if workers == AUTO:
        return 1
    if any(cell.experiment is not None and cell.experiment.recipe.device.using_gpu for cell in plan.cells):
        return 1 if workers else max(1, len(_gpus()))
    return max(1, cores() // processes(workers))


def processes(workers: str | None) -> int:
    """How many processes of a run compute at a time, where it is known before the run starts; else 1."""
    return (asked_workers(workers) if workers else None) or 1


def cores() -> int:
    """CPU cores of this process; an OMP_NUM_THREADS that is set says how many it may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in listed if name.strip() not in ("", "-1")]


def threads(jobs: int, workers: str | None = None) -> int:
    """The share of the cores that each process has, with so many runs at a time and so many workers each."""
    return max(1, cores() // (jobs * processes(workers)))


def environment(slot: int, jobs: int, workers: str | None = None) -> dict[str, str]:
    """Environment of a run: its share of the cores, and one of the GPUs where several are listed.

    Args:
        slot: which of the runs at a time it is, 0-based.
        jobs: how many run at a time.
        workers: ``--workers`` of each run.
    """
    changed = {"OMP_NUM_THREADS": str(threads(jobs, workers))}
    gpus = _gpus()
    if len(gpus) > 1 and jobs > 1:
        changed["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return {**os.environ, **changed}
