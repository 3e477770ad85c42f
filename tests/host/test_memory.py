"""The peak of memory that a round's record holds."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from calfat_plugin import profiling
from calfat_plugin.profiling import PeakMemory
from tests.host.federation import experiment, run

CPU = torch.device("cpu")
needs_mark = pytest.mark.skipif(not profiling._RESET.exists(), reason="no mark that can be set back")


@needs_mark
def test_a_peak_is_of_the_time_since_it_began() -> None:
    peak = PeakMemory(CPU)
    peak.begin()
    before = peak.of_process()
    with mmap.mmap(-1, 200_000_000) as taken:  # new pages, whatever memory this process has kept
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        high = peak.of_process()
    after = peak.of_process()
    peak.begin()
    again = peak.of_process()
    assert before is not None and high is not None and after is not None and again is not None  # noqa: PT018
    assert 190 < high - before < 250
    assert after > high - 10  # the mark, not what is in use now; the kernel counts in batches of pages
    assert abs(again - before) < 50
    assert peak.of_gpu() is None


def test_there_is_no_number_where_the_mark_cannot_be_set_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peak = PeakMemory(CPU)
    assert peak.of_process() is None  # of the whole life, before a round began
    monkeypatch.setattr(profiling, "_RESET", tmp_path / "none" / "clear_refs")
    peak.begin()
    assert peak.of_process() is None


@needs_mark
def test_each_round_has_its_own() -> None:
    records = run(experiment()).records
    assert len(records) > 1
    assert all(record.peak_memory_mb is not None and record.peak_memory_mb > 10 for record in records)
    assert {record.peak_gpu_memory_mb for record in records} == {None}
