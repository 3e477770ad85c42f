"""A run needs no network and no home directory, and tries neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.runs.processes import cold, environment

GUARD = Path(__file__).parent / "guard"


ATTEMPTS = (
    "socket.create_connection(('192.0.2.1', 80), 1)",
    "socket.socket().connect_ex(('192.0.2.1', 80))",
    "socket.socket(socket.AF_INET6).connect(('2001:db8::1', 80))",
    "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
    "socket.getaddrinfo('example.org', 80)",
    "socket.gethostbyname('example.org')",
    "__import__('requests').get('https://192.0.2.1')",
)
PROGRAM = """
import socket
for attempt in {attempts!r}:
    try:
        eval(attempt)
    except OSError as error:
        assert "no network in this test" in str(error)
    else:
        raise AssertionError(attempt)
"""


def test_the_guard_notices(tmp_path: Path) -> None:
    record = tmp_path / "record.txt"
    env = environment(tmp_path / "home", SOCKET_RECORD=str(record)) | {"PYTHONPATH": str(GUARD)}
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(attempts=ATTEMPTS)], env=env)
    assert done.returncode == 0
    assert len(record.read_text().splitlines()) >= 1 + len(ATTEMPTS)


def test_a_run_tries_no_connection_and_leaves_the_home_directory_empty(recipe: Path) -> None:
    record = recipe.parent / "record.txt"
    home = recipe.parent / "home"
    env = environment(home, GUARD, SOCKET_RECORD=str(record), WITHOUT_REPORT="")
    done = cold("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--run-dir", "run", cwd=recipe.parent, env=env)
    assert (done.code, done.err) == (0, "")
    assert (recipe.parent / "run" / "results.json").exists()
    assert set(record.read_text().splitlines()) == {"the guard is up"}
    assert [str(path.relative_to(home)) for path in home.rglob("*")] == []
