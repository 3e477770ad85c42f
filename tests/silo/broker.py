"""A real MQTT broker and a real S3-compatible store on this machine's loopback, for tests: mosquitto and moto's server.

mosquitto is a system package; ``tests/programs.py`` says what happens to the tests without it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.programs import MOSQUITTO
from tests.silo.federation import PATIENCE, free_ports, wait_for
from tests.silo.silo_party import CREDENTIALS

needs_mosquitto = pytest.mark.needs("mosquitto")
BUCKET = "calfat"


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that listens on ``port``; ended on exit."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: process.poll() is not None or _listens(port), f"someone listens on port {port}")
            assert process.poll() is None, f"it ended at once; was port {port} taken?\n{log.read_text()}"
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)


@contextmanager
def shut_port() -> Iterator[int]:
    """A port where nobody listens, nor can begin to: one that is merely free may be another's a minute later."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def broker(folder: Path, port: int, config: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """mosquitto on ``port``; by default it lets in all of this machine."""
    assert MOSQUITTO is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "broker.conf"
    path.write_text(config or f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    with running([MOSQUITTO, "-c", str(path)], port, folder / "broker.log") as process:
        yield process


@contextmanager
def store(folder: Path, port: int) -> Iterator[Any]:
    """moto's S3 on ``port``, with the bucket; gives a boto3 client."""
    import boto3

    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, folder / "store.log"):
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=BUCKET)
        yield client


@contextmanager
def broker_and_store(folder: Path) -> Iterator[dict[str, Any]]:
    """Both; gives what belongs below ``calfat.silo`` in the recipe, but a ``run`` for each federation."""
    at_broker, at_store = free_ports(2)
    with broker(folder, at_broker), store(folder, at_store):
        yield {
            "mqtt": {"broker": f"127.0.0.1:{at_broker}"},
            "s3": {"endpoint": f"http://127.0.0.1:{at_store}", "bucket": BUCKET},
        }
