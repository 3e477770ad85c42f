"""MPI's receiving thread by itself: what is too large is told, and a bug of ours leaves nobody waiting."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("mpi4py")

import calfat_plugin.host.launch  # noqa: F401 (prepares the import of fedml)

# isort: split
from calfat_plugin.host.transports import mpi_job
from calfat_plugin.host.transports.mpi import MPITransport
from tests.silo.federation import wait_for


def test_what_is_too_large_is_reported_with_its_sender(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arrived = [(1, b"x" * 11)]
    monkeypatch.setattr(mpi_job, "take", lambda: arrived.pop() if arrived else None)
    caplog.set_level(logging.WARNING)
    transport = MPITransport(0, 2, max_message=10)
    try:
        wait_for(lambda: caplog.messages, "the warning")
        assert caplog.messages == ["message from rank 1 refused: 11 bytes, 10 are allowed"]
    finally:
        transport.stop_receive_message()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_receiving_thread_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(mpi_job, "take", broken)
    monkeypatch.setattr(mpi_job, "end", lambda status, last_words: ended.append((status, last_words)))
    transport = MPITransport(0, 2, max_message=10)
    transport.stop_receive_message()
    (status, last_words) = ended[0]
    assert status == 1
    assert last_words.endswith("ZeroDivisionError: a bug\n")
