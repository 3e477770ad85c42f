"""A run needs no network and no home directory, and tries neither."""

from __future__ import annotations

from pathlib import Path

from tests.runs.processes import cold, environment

GUARD = Path(__file__).parent / "guard"


def test_a_run_tries_no_connection_and_leaves_the_home_directory_empty(recipe: Path) -> None:
    record = recipe.parent / "record.txt"
    home = recipe.parent / "home"
    env = environment(home, GUARD, SOCKET_RECORD=str(record), WITHOUT_REPORT="")
    done = cold("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--run-dir", "run", cwd=recipe.parent, env=env)
    assert (done.code, done.err) == (0, "")
    assert (recipe.parent / "run" / "results.json").exists()
    assert set(record.read_text().splitlines()) == {"the guard is up"}
    assert [str(path.relative_to(home)) for path in home.rglob("*")] == []
