"""The starter of all processes of a run, when nobody reads what it passes on."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from calfat_plugin.cli import party


class Closed(io.StringIO):
    """A standard output whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_parties_are_still_read_and_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread, a party would wait for ever for room in its pipe."""
    talkative = start("print('line\\n' * 100_000)")
    asleep = start("import time; time.sleep(1000)")
    try:
        monkeypatch.setattr(sys, "stdout", Closed())
        client = party.Party("client 0", talkative, "client 0 | ")
        client.start()
        client.join(300)
        assert talkative.wait(300) == 0
        assert isinstance(client.failure, BrokenPipeError)
        with pytest.raises(BrokenPipeError):
            party._watch([party.Party("server", asleep), client], 0)
    finally:
        for process in (talkative, asleep):
            process.kill()
            process.communicate()
