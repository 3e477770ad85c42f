"""Methods beyond two losses, from outside the package and without a ``fit``; one is docs/beyond_two_losses.md's."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from calfat_plugin.observer import RunObserver
from calfat_plugin.report import write_run_report
from tests.contract.distributions import install
from tests.runs.mortals import MORTAL, go, outcome
from tests.runs.mortals import RECIPE as BASE
from tests.runs.processes import ROOT
from tests.snapshot import TextSnapshot

PAGE = (ROOT / "docs" / "beyond_two_losses.md").read_text(encoding="utf-8")
_BESIDE = Path(__file__).parent / "beyond"
RECIPE = BASE.replace("trainer: {name: calfat, preset: release}", "trainer: teacher-fat")


def sources() -> dict[str, str]:
    """Module to source: the page's file, and two more."""
    found = re.search(r"^`teacher_fat.py`:\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return {"teacher_fat": found[1], **{path.stem: path.read_text() for path in sorted(_BESIDE.glob("*.py"))}}


def install_methods(folder: Path) -> None:
    """As one distribution, ``beyond 1.0``."""
    folder.mkdir()
    install(folder, "beyond", "1.0", sources(), **{module: module for module in sources()})


METHODS = {"teacher-fat": ["train/gap"], "adamw-fat": [], "memory-fat": ["train/hardest", "train/remembered"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_page: None) -> Path:
    """The current folder: the recipe, and the methods to be found."""
    install_methods(tmp_path / "site")
    monkeypatch.syspath_prepend(str(MORTAL))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mortal.yaml").write_text(RECIPE)
    return tmp_path


class Stopping(RunObserver):
    """Ctrl-C in the third round."""

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        if round == 3:
            raise KeyboardInterrupt


def stopped(run_dir: str, *sets: str) -> None:
    """A run of two rounds of three; the recipe knows of the third, as a schedule over the run does."""
    with pytest.raises(KeyboardInterrupt):
        go(run_dir, 0, *sets, observer=Stopping())


@pytest.mark.parametrize("method", METHODS)
def test_resumed_it_ends_with_the_same_bits(folder: Path, method: str) -> None:
    chosen = f"calfat.trainer={method}"
    alone, _ = go("alone", 0, chosen)
    stopped("resumed", chosen)
    resumed, _ = go("resumed", 0, chosen, resume=True)
    assert outcome(resumed) == outcome(alone)
    rows = list(csv.DictReader((alone / "rounds.csv").open()))
    assert [name for name in rows[0] if "/" in name] == METHODS[method]
    for name in METHODS[method]:
        assert all(float(row[name]) > 0 for row in rows)
        assert len({row[name] for row in rows}) == len(rows)


@pytest.mark.usefixtures("no_figures")
def test_page_and_results_show_what_was_measured(folder: Path, snapshot: TextSnapshot) -> None:
    (folder / "site" / "measuring.py").write_text(MEASURING)
    info = next((folder / "site").glob("*.dist-info"))
    points = (info / "entry_points.txt").read_text()
    (info / "entry_points.txt").write_text(f"{points}measuring = measuring\n")
    evaluators = "calfat.evaluators=[natural, fog]"
    monitored = "calfat.monitor.evaluators=[natural, fog]"
    run, _ = go(str(folder / "run"), 0, "calfat.aggregator=watching", evaluators, monitored)
    rows = list(csv.DictReader((run / "rounds.csv").open()))
    assert [name for name in rows[0] if "/" in name] == ["train/gap", "server/best", "fog/change"]
    assert all(0 < float(row["server/best"]) <= 1 for row in rows)
    assert {row["fog/change"] for row in rows} == {rows[0]["fog/change"]}
    assert 0 < float(rows[0]["fog/change"]) < 1

    results = json.loads((run / "results.json").read_text())
    last = {name: float(rows[-1][name]) for name in ("train/gap", "server/best", "others_named")}
    found = last | {
        name: sum(float(row[name]) for row in rows) for name in ("bytes_down", "bytes_up", "passes", "overfitted")
    }
    assert results["metrics"] == found
    natural, fog = results["evaluations"]
    assert "metrics" not in natural
    assert list(fog["metrics"]) == ["change"]
    assert "eps" not in fog["settings"]
    snapshot({alarm["code"]: alarm["text"] for alarm in results["alarms"]}["test-images-used"])
    (run / "results.json").unlink()  # as if killed in the final evaluation: no round is left to this process
    go(str(folder / "run"), 0, "calfat.aggregator=watching", evaluators, monitored, resume=True)
    assert json.loads((run / "results.json").read_text())["metrics"] == found
    page = write_run_report(run).read_text()
    for shown in ("train/gap", "server/best", "fog/change", f"change {fog['metrics']['change']:.4g}"):
        assert shown in page


MEASURING = """
from calfat_plugin import Aggregate, Aggregator, AggregatorEntry, AttackEvaluator, EvaluatorEntry, hookimpl
from calfat_plugin import weighted_average


class Watching(Aggregator):
    def __init__(self, options):
        pass

    def combine(self, task):
        held = task.monitored()
        assert len(held.data) == 100  # calfat.monitor.max_examples
        states = [update.state for update in task.updates.values()]
        right = [float((held.logits(state).argmax(dim=1) == held.data.y.cpu()).float().mean()) for state in states]
        return Aggregate(weighted_average(states, [1.0] * len(states)), metrics={"best": max(right)})


class Fog(AttackEvaluator):
    has_budget = False

    def settings(self, task):
        return {"attack": "fog"}

    def craft(self, task, x, y, noise):
        fogged = 0.5 * x + 0.5
        task.record("change", (fogged - x).flatten(1).mean(dim=1))
        return fogged


@hookimpl
def calfat_aggregators():
    yield AggregatorEntry("watching", build=Watching, metrics={"best": "of a test"}, uses_monitored_data=True)


@hookimpl
def calfat_evaluators():
    yield EvaluatorEntry("fog", build=Fog, metrics={"change": "mean change of a pixel"})
"""
