"""``calfat run --profile``: where the time goes, on the console, on the page and on disk; results are those without."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from calfat_plugin.profiling import Profile, begin_part, profiling, timed, timed_each
from calfat_plugin.report.run_tables import ELSE, spending, spending_text
from calfat_plugin.run_files import Spending
from calfat_plugin.typed_json import from_json
from tests.cli.runner import Ended
from tests.runs.processes import RECIPE, WarmServer, sabotage
from tests.runs.remains import everything

ARGUMENTS = ("run", "tiny.yaml", "--set", "train_args.comm_round=2", "--set", "train_args.epochs=2")

# Every span of a round of CalFAT, in the order of the table: a border that is lost, or moves, is seen here.
SPANS = [
    ("training",),
    ("training", "data"),
    ("training", "attack"),
    ("training", "attack", "forward"),
    ("training", "attack", "backward"),
    ("training", "alignment"),
    ("training", "alignment", "backward"),
    ("training", "outer step"),
    ("aggregation",),
    ("evaluation",),
    ("evaluation", "clean examples"),
    ("evaluation", "natural"),
    ("evaluation", "fgsm"),
    ("evaluation", "fgsm", "forward"),
    ("evaluation", "fgsm", "backward"),
    ("checkpoint",),
    ("loggers",),
]


@pytest.fixture(scope="module")
def runs(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended, Ended]:
    """(a folder with the run ``plain`` and the run ``profiled``, what each showed)."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "tiny.yaml").write_text(RECIPE)
    plain = warm.run(*ARGUMENTS, "--run-dir", "plain", cwd=folder)
    profiled = warm.run(*ARGUMENTS, "--run-dir", "profiled", "--profile", cwd=folder)
    assert (plain.code, profiled.code) == (0, 0)
    return folder, plain, profiled


def test_a_profile_changes_no_result(runs: tuple[Path, Ended, Ended]) -> None:
    folder, plain, _ = runs
    kept = [everything(folder / name) for name in ("plain", "profiled")]
    assert kept[1].pop("profile.json")
    assert kept[0] == kept[1]
    assert "seconds    share" not in plain.out


def test_each_border_of_a_round_is_measured(runs: tuple[Path, Ended, Ended]) -> None:
    content = json.loads((runs[0] / "profiled" / "profile.json").read_text())
    assert content["method"] == "calfat"
    assert [part["name"] for part in content["parts"]] == ["round 1", "round 2", "final evaluation"]
    for part in content["parts"][:2]:
        seconds = {tuple(span["path"]): span["seconds"] for span in part["spans"]}
        calls = {tuple(span["path"]): span["calls"] for span in part["spans"]}
        assert set(seconds) == set(SPANS)
        for path in SPANS:
            inner = [seconds[other] for other in SPANS if other[:-1] == path]
            assert sum(inner) <= seconds[path]
        assert 0 < sum(seconds[path] for path in SPANS if len(path) == 1) <= part["seconds"]
        batches = calls["training", "data"]
        assert calls["training",] == 5
        assert batches == calls["training", "attack"] == calls["training", "outer step"] > 2 * 5
        # Two steps of the attack; a method may attack a batch in pieces.
        assert calls["training", "attack", "forward"] == calls["training", "attack", "backward"] >= 2 * batches
    final = content["parts"][2]
    assert [span["path"] for span in final["spans"] if len(span["path"]) == 1] == [["evaluation"]]


def test_a_stopped_run_keeps_what_it_measured(warm: WarmServer, recipe: Path) -> None:
    arguments = ("run", "tiny.yaml", "--run-dir", "run", "--profile")
    assert warm.run(*arguments, cwd=recipe.parent, **sabotage("training", 2, "SIGTERM")).code == 130
    parts = json.loads((recipe.parent / "run" / "profile.json").read_text())["parts"]
    assert [part["name"] for part in parts] == ["round 1", "round 2"]


# --- the timers -------------------------------------------------------------------------------------------------------


def count() -> Iterator[int]:
    yield from (1, 2)


def test_spans_nest_and_count_and_wait_for_the_device() -> None:
    waits: list[float] = []
    profile = Profile(lambda: waits.append(time.perf_counter()))
    with profiling(profile):
        with timed("before any part"):
            pass
        begin_part("round 1")
        for _ in timed_each("data", count()):
            with timed("attack"), timed("forward"):
                time.sleep(0.01)
        begin_part("round 2")
        with pytest.raises(KeyError), timed("attack"):
            raise KeyError
        thread = threading.Thread(target=lambda: timed("elsewhere").__enter__())
        thread.start()
        thread.join()
    one, two = profile.as_json()
    assert (one["name"], two["name"]) == ("round 1", "round 2")
    assert one["seconds"] >= 0.02
    assert {tuple(span["path"]): span["calls"] for span in one["spans"]} == {
        ("data",): 2,
        ("attack", "forward"): 2,
        ("attack",): 2,
    }
    assert min(span["seconds"] for span in one["spans"] if "attack" in span["path"]) >= 0.02
    assert [(span["path"], span["calls"]) for span in two["spans"]] == [(["attack"], 0)]
    assert len(waits) == 1 + 3 + 2 + 2 + 1
    assert timed("after") is timed("it")


def test_rounds_are_averaged_and_what_no_span_covers_is_shown() -> None:
    def part(name: str, seconds: float, attack: float, forward: float) -> dict[str, object]:
        spans = [
            {"path": ["attack", "forward"], "seconds": forward, "calls": 4},
            {"path": ["attack"], "seconds": attack, "calls": 2},
        ]
        return {"name": name, "seconds": seconds, "spans": spans}

    parts = [part("round 7", 10.0, 8.0, 6.0), part("round 8", 6.0, 4.0, 1.0)]
    profile = from_json(Spending, {"method": "fedpgd", "parts": parts})
    (table,) = spending(profile)
    assert table.name == "a round of fedpgd, mean of 2 rounds"
    assert table.rows == [
        ["attack", "6.0000", "75.0 %", "2"],
        ["attack / forward", "3.5000", "43.8 %", "4"],
        ["attack / other", "2.5000", "31.2 %", ""],
        [ELSE, "2.0000", "25.0 %", ""],
        ["in all", "8.0000", "100.0 %", ""],
    ]
    text = spending_text(profile).splitlines()
    assert text[0] == "| a round of fedpgd, mean of 2 rounds      | seconds |   share | calls |"
    assert text[3] == "| attack / forward                         |  3.5000 |  43.8 % |     4 |"
    assert spending(Spending(())) == []
    assert spending_text(Spending(())) == ""
