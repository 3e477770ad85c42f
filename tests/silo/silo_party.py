"""A party's process in the tests of cross-silo runs: ``calfat run`` with its output in a file."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: moto's store lets anyone in, but boto3 wants to sign with something.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
_LONGEST = 300.0  # seconds that a hanging party waits to be let go


def be_party(
    words: Sequence[str],
    output: str,
    hang_in: int | None,
    lies: bool = False,
    reports: bool = True,
    files: int = 0,
    dies_at_the_end: bool = False,
) -> None:
    """A party's process.

    Args:
        words: the command line.
        output: file for what it prints.
        hang_in: stop in the middle of this round's training until there is a file ``go`` beside ``output``.
        lies: be a client whose updates no server should use; another lie each round.
        reports: whether the run ends with its report, which takes longer than a small run.
        files: the system's limit of open files and connections; 0: as it is.
        dies_at_the_end: be a client that kills itself when it has acknowledged that the run is over.
    """
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))
    folder = Path(output).parent
    os.chdir(folder)
    os.environ.update(CREDENTIALS)  # a fork server's environment is that of its own start
    stream = open(output, "a", buffering=1)  # noqa: SIM115 (open as long as the process)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    if hang_in is not None:
        _hang(folder, hang_in)
    if lies:
        _lie()
    if dies_at_the_end:
        _die_at_the_end()
    _record(folder / f"sent-{words[words.index('--rank') + 1]}" if "--rank" in words else folder / "sent")
    if not reports:
        without_report()
    from calfat_plugin.cli.main import main

    main(args=list(words), prog_name="calfat")


def _die_at_the_end() -> None:
    from calfat_plugin.host.silo.client import SiloClient

    SiloClient.handle_message_finish = lambda self, message: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def without_report() -> None:
    """Let this process's runs end without ``report.html``."""
    import calfat_plugin.report

    calfat_plugin.report.write_run_report = lambda directory: directory


def _hang(folder: Path, hang_in: int) -> None:
    from calfat_plugin.federation.worker import Worker

    fit = Worker.fit

    def hanging(self: Worker, client: int, round: int, downlink: Any) -> Any:
        wire = fit(self, client, round, downlink)
        if round == hang_in and not (folder / "go").exists():
            (folder / f"hanging-{client + 1}").touch()
            until = time.monotonic() + _LONGEST
            while not (folder / "go").exists() and time.monotonic() < until:
                time.sleep(0.02)
        return wire

    Worker.fit = hanging  # type: ignore[method-assign]


def _record(sent: Path) -> None:
    """Keep a copy of each message that carries tensors, as it goes out."""
    from calfat_plugin.host.transports import base as transport

    encode = transport.encode

    def recording(message: Any) -> bytes:
        data = encode(message)
        if message.get("model_params"):
            sent.mkdir(exist_ok=True)
            (sent / f"{len(list(sent.iterdir()))}.safetensors").write_bytes(data)
        return data

    transport.encode = recording


def _lie() -> None:
    from hostile import LIES

    from calfat_plugin.federation.worker import Worker

    fit = Worker.fit

    def lying(self: Worker, client: int, round: int, downlink: Any) -> Any:
        wire = fit(self, client, round, downlink)
        LIES[round - 1](wire)
        return wire

    Worker.fit = lying  # type: ignore[method-assign]
