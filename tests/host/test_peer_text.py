"""Texts of other parties: short, printable, on one line, wherever they go; and a log that nobody can flood."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calfat_plugin.host import launch  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.host.transports.base import RefusalLog
from calfat_plugin.host.transports.message import RefusedError, read_envelope
from calfat_plugin.peer_text import MAX_TEXT, peer_text


@given(st.text(st.characters(), max_size=700))
@example("\x1b]0;title\x07\x9b31m")
@example("\ud800")
def test_any_text_becomes_one_printable_line(text: str) -> None:
    shown = peer_text(text)
    assert len(shown) <= MAX_TEXT
    assert shown.isprintable()
    shown.encode()  # no half of a surrogate pair
    assert len(shown.splitlines()) <= 1


def test_what_is_readable_stays_so() -> None:
    assert peer_text("client 3: tensor 'größe' has\n shape (3,)") == "client 3: tensor 'größe' has  shape (3,)"
    assert peer_text("a\x1b[2Jb\u2028c\ud800d\x00") == "a\ufffd[2Jb c\ufffdd\ufffd"
    assert peer_text("x" * 10**7) == "x" * (MAX_TEXT - 4) + " ..."


@pytest.mark.parametrize("name", ["ticket", "session", "recipe", "client_status"])
@pytest.mark.parametrize("value", ["\ud800", "\x1b[2J", "a\nb", "\u2028", "\x9b", "é"])
def test_a_field_holds_printable_ascii(name: str, value: str) -> None:
    fields = {"msg_type": 3, "sender": 1, "receiver": 0, name: value}
    header = json.dumps({"__metadata__": {"calfat": json.dumps(fields)}}).encode()
    with pytest.raises(RefusedError) as raised:
        read_envelope(len(header).to_bytes(8, "little") + header)
    assert str(raised.value) == f"field '{name}' holds other signs than printable ASCII"


def test_a_flood_of_refusals_is_counted_and_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    clock = [100.0]
    refusals = RefusalLog(lambda: clock[0])
    for port in range(10_000):
        refusals.add(f"10.0.0.1:{port}", "no\x1b[2J")
    assert len(caplog.messages) == 40
    assert caplog.messages[0] == "message from 10.0.0.1:0 refused: no\ufffd[2J"
    refusals.add("10.0.0.2:7", "another party")
    assert caplog.messages[-1] == "message from 10.0.0.2:7 refused: another party"
    for host in range(10_000):
        refusals.add(f"10.1.{host}:1", "many addresses")
    assert len(caplog.messages) == 200
    clock[0] += 60
    refusals.add("10.0.0.1:1", "later")
    assert caplog.messages[-2:] == [
        f"{9_960 + 10_000 - 159} more messages were refused within 60 s, and are not listed",
        "message from 10.0.0.1:1 refused: later",
    ]
    refusals.close()
    assert len(caplog.messages) == 202  # nothing was left out since
