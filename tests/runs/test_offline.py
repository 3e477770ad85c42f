"""A run needs no network and no home directory, and tries neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.processes import cold, environment

GUARD = Path(__file__).parent / "guard"


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('192.0.2.1', 80), 1)",
        "socket.socket().connect(('192.0.2.1', 80))",
        "socket.socket().connect_ex(('192.0.2.1', 80))",
        "socket.socket(socket.AF_INET6).connect(('2001:db8::1', 80))",
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        "socket.getaddrinfo('example.org', 80)",
        "socket.gethostbyname('example.org')",
        "__import__('urllib.request').request.urlopen('http://example.org')",
        "__import__('requests').get('https://192.0.2.1')",
    ],
)
def test_the_guard_notices(tmp_path: Path, attempt: str) -> None:
    record = tmp_path / "record.txt"
    env = environment(tmp_path / "home", SOCKET_RECORD=str(record)) | {"PYTHONPATH": str(GUARD)}
    done = subprocess.run([sys.executable, "-c", f"import socket; {attempt}"], env=env, capture_output=True, text=True)
    assert "no network in this test" in done.stderr
    assert len(record.read_text().splitlines()) >= 2


def test_a_run_tries_no_connection_and_leaves_the_home_directory_empty(recipe: Path) -> None:
    record = recipe.parent / "record.txt"
    home = recipe.parent / "home"
    env = environment(home, GUARD, SOCKET_RECORD=str(record), WITHOUT_REPORT="")
    done = cold("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--run-dir", "run", cwd=recipe.parent, env=env)
    assert (done.code, done.err) == (0, "")
    assert (recipe.parent / "run" / "results.json").exists()
    assert set(record.read_text().splitlines()) == {"the guard is up"}
    assert [str(path.relative_to(home)) for path in home.rglob("*")] == []
