"""MPI's receiving thread by itself: what is too large is told, and a bug of ours leaves nobody waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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


class Sending(list[tuple[Any, bytes]]):
    """What is kept; whoever has looked through it first lets another queue give up a message before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.other = threading.Thread(target=mpi_job.keep, args=(None, b"another queue's"))

    def __iter__(self) -> Iterator[tuple[Any, bytes]]:
        yield from super().__iter__()
        if not self.other.ident:
            self.other.start()
            self.other.join(0.5)  # it ends at once, unless it is made to wait


def test_queues_that_give_up_at_once_all_keep_what_mpi_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Sending()
    monkeypatch.setattr(mpi_job, "_sending", sending)
    mpi_job.keep(SimpleNamespace(Test=lambda: False), b"ours")
    sending.other.join()
    assert [data for _, data in sending] == [b"ours", b"another queue's"]


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
