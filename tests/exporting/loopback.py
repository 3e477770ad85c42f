"""Services on this machine, for as long as a test asks them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def serving(command: Sequence[str], cwd: Path, **environment: str) -> Iterator[str]:
    """The address of a service; the word ``PORT`` of its command is replaced by a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(port) if word == "PORT" else word for word in command]
    process = subprocess.Popen(words, cwd=cwd, env={**os.environ, **environment})
    try:
        for _ in range(6000):
            assert process.poll() is None, "the service ended"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def ask(address: str, body: bytes) -> tuple[int, Any]:
    """Status and content of the answer to a POST."""
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
