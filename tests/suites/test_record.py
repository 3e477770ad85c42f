"""``calfat suite --record``: finished runs in one file, which another machine continues."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin import PartitionEntry, Registry, __version__, option
from calfat_plugin.disk import write_json
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites import load_suite, runner
from calfat_plugin.suites.cells import SuiteRun, look_again, mark_lost, why_lost
from calfat_plugin.suites.plan import SuitePlan, make_plan, registry_of, seconds_left
from calfat_plugin.suites.record import Recorded, add_to_record, digest, read_record
from calfat_plugin.suites.summary import summarise
from tests.cli.runner import calfat
from tests.plugins import offering
from tests.suites.files import CHOOSING, SUITE, recorded, write_suite

RECORD = Path("runs.csv")
TWO_TRIES = CHOOSING.replace("[0.02, 0.05, 0.1]", "[0.02, 0.05]").replace("[100, 101]", "[100]")
ROW = Recorded("finished", "0123456789ab", {"natural": 0.5}, "1.0", "a processor", "0.1.0")


def test_a_row_without_an_evaluator_has_no_worst_case_either() -> None:
    """It is to be over the examples of the evaluator that is added, too."""
    values = {"natural": 0.9, "pgd": 0.4, "pgd:worst-class": 0.1, "cw": 0.3, "cw:release": 0.5, "cw/queries": 7.0}
    row = dataclasses.replace(ROW, values={**values, "worst-case": 0.2, "worst-case:tail": 0.1})
    assert row.without(["cw"]).values == {"natural": 0.9, "pgd": 0.4, "pgd:worst-class": 0.1}
    assert row.without([]) is row


@pytest.fixture
def planned(registry: Registry) -> Callable[[], SuitePlan]:
    return lambda: make_plan(load_suite("tiny.yaml", record=RECORD), registry)


def rows() -> list[dict[str, str]]:
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("stand_in")
def test_another_machine_continues_from_the_record(planned: Callable[[], SuitePlan]) -> None:
    """Choice runs and runs of the table: what was measured is the same, and nothing is run again."""
    write_suite(Path(), TWO_TRIES)
    assert calfat("suite", "tiny.yaml", "--seeds", "0", "--record", "runs.csv").code == 0
    first = json.loads(Path("runs/suites/tiny/suite.json").read_text())
    assert len(rows()) == 2 * 2 + 2
    assert {(row["tried"] != "", row["choice"] != "", row["pgd20"] != "") for row in rows()} == {
        (True, True, False),
        (False, False, True),
    }
    shutil.rmtree("runs")
    before = RECORD.read_text()
    ended = calfat("suite", "tiny.yaml", "--seeds", "0", "--record", "runs.csv")
    assert ended.code == 0
    assert RECORD.read_text() == before
    again = json.loads(Path("runs/suites/tiny/suite.json").read_text())
    for one, other in zip(first["cells"], again["cells"], strict=True):
        for name in ("values", "mean"):
            assert one["scores"]["pgd20"][name] == other["scores"]["pgd20"][name]
        assert one["choice"]["chosen"] == other["choice"]["chosen"]
        assert [each["mean"] for each in one["choice"]["tries"]] == [each["mean"] for each in other["choice"]["tries"]]
    assert list(Path("runs").rglob("results.json")) == []
    assert calfat("suite", "tiny.yaml", "--record", "runs.csv").code == 0
    assert len(list(Path("runs").rglob("results.json"))) == 2  # seed 1 of both cells alone
    assert planned().left == ()


@pytest.mark.usefixtures("stand_in")
def test_the_table_of_a_record_is_shown_without_a_run() -> None:
    write_suite(Path(), SUITE)
    assert calfat("suite", "tiny.yaml", "--only", "FedPGD", "--record", "runs.csv").code == 0
    shutil.rmtree("runs")
    ended = calfat("suite", "tiny.yaml", "--table", "--record", "runs.csv", "--json")
    assert (ended.code, "warning" in ended.err) == (0, False)
    assert {cell["name"]: cell["scores"]["pgd20"]["n"] for cell in json.loads(ended.out)["cells"]} == {
        "CalFAT": 0,
        "FedPGD": 2,
    }
    assert "| FedPGD |   2 |" in Path("runs/suites/tiny/table.md").read_text()
    assert sorted(path.name for path in Path("runs").rglob("*") if path.is_dir()) == ["suites", "tiny"]


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_another_machine_has_just_recorded_has_its_numbers(
    tmp_path: Path, planned: Callable[[], SuitePlan]
) -> None:
    write_suite(tmp_path)
    plan = planned()
    (run, *_) = plan.runs
    add_to_record(RECORD, {run.key: dataclasses.replace(ROW, recipe=digest(run.experiment))})
    (found,) = look_again(RECORD, run)
    summary = summarise(plan, [found.ended("finished")])
    assert summary.cells[0].scores["natural"].by_seed == {run.seed: 0.5}
    assert seconds_left(planned()) is None  # what it took on that machine says nothing of this one


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_is_here_counts_as_it_is_here(tmp_path: Path, planned: Callable[[], SuitePlan]) -> None:
    """Although another machine has recorded it, which may be ahead or behind."""
    write_suite(tmp_path)
    (run, *_) = planned().runs
    add_to_record(RECORD, {run.key: dataclasses.replace(ROW, recipe=digest(run.experiment))})
    directory = RunDirectory.create(run.experiment, run.directory)
    directory.last_checkpoint.touch()
    (found,) = look_again(RECORD, run)
    assert (found.state, found.recorded) == ("unfinished", None)


@pytest.mark.usefixtures("finished")
def test_what_ended_without_a_row_gets_it_later() -> None:
    assert calfat("suite", "tiny.yaml", "--record", "runs.csv").code == 0
    assert [(row["cell"], row["tried"], row["seed"], row["state"]) for row in rows()] == [
        (cell, "", seed, "finished") for cell in ("CalFAT", "FedPGD") for seed in ("0", "1")
    ]
    measured = json.loads(Path("runs/suites/tiny/calfat/seed-1/results.json").read_text())
    assert [float(rows()[1][name]) for name in ("natural", "pgd20")] == [
        each["accuracy"] for each in measured["evaluations"]
    ]


@pytest.mark.usefixtures("finished")
def test_who_looks_at_a_finished_run_is_not_who_ran_it(
    monkeypatch: pytest.MonkeyPatch, planned: Callable[[], SuitePlan]
) -> None:
    """What its files do not say is as in its row; a lost run may have no files."""
    lost = planned().runs[0]
    shutil.rmtree(lost.directory)
    mark_lost(lost, "round 1: it diverged")
    directory = RunDirectory(planned().runs[1].directory)
    write_json(directory.environment, {"processor": "its own", "gpu": None, "precision": "fp32"})
    write_json(directory.results, {**json.loads(directory.results.read_text()), "calfat_plugin": "0.0.7"})

    directory = RunDirectory(planned().runs[3].directory)
    write_json(directory.environment, {"processor": "its own", "gpu": "a card", "precision": "bf16"})

    def of(*columns: str) -> list[tuple[str, ...]]:
        runner.record_runs(planned().suite, planned().runs)
        return [tuple(row[column] for column in columns) for row in rows()]

    monkeypatch.setattr(runner, "processor", lambda: "first")
    found = of("cell", "seed", "state", "processor", "calfat_plugin")
    assert found == [
        ("CalFAT", "0", "lost", "first", __version__),
        ("CalFAT", "1", "finished", "first", __version__),
        ("FedPGD", "0", "finished", "its own", "0.0.7"),
        ("FedPGD", "1", "finished", "a card, bf16", __version__),
    ]
    RECORD.write_text(RECORD.read_text().replace(__version__, "0.0.8"))
    before = RECORD.read_text()
    monkeypatch.setattr(runner, "processor", lambda: "second")
    of()
    assert RECORD.read_text() == before


@pytest.mark.usefixtures("finished")
def test_a_changed_recipe_is_refused_by_name_and_loses_nothing() -> None:
    assert calfat("suite", "tiny.yaml", "--record", "runs.csv").code == 0
    shutil.rmtree("runs")
    before, then = RECORD.read_text(), rows()[0]["recipe"]
    write_suite(Path(), SUITE.replace("train_args.comm_round: 1", "train_args.comm_round: 1, train_args.momentum: 0.8"))
    ended = calfat("suite", "tiny.yaml", "--record", "runs.csv")
    assert (ended.code, RECORD.read_text()) == (2, before)
    said = "error: runs.csv: CalFAT seed 0 is recorded with another recipe than the suite has now"
    assert ended.err.startswith(f"{said} (recipe {then} then, ")


@pytest.mark.usefixtures("stand_in")
def test_lost_choice_runs_are_recorded_and_tried_again_where_all_were(planned: Callable[[], SuitePlan]) -> None:
    write_suite(Path(), TWO_TRIES)
    keys = [("CalFAT", f"learning_rate {rate}", 100) for rate in (0.02, 0.05)]
    recipes = {run.key: digest(run.experiment) for run in planned().choosing.runs}
    lost = {key: dataclasses.replace(ROW, state="lost", recipe=recipes[key], values={"choice": 0.0}) for key in keys}
    add_to_record(RECORD, lost)
    assert planned().choices["CalFAT"].hopeless
    assert calfat("suite", "tiny.yaml", "--record", "runs.csv", "--only", "CalFAT").code == 0
    assert {row["state"] for row in rows()} == {"finished"}


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_was_lost_with_another_recipe_is_a_new_one(planned: Callable[[], SuitePlan]) -> None:
    """So is one with a mark of an early version, which does not say of which recipe it is; and the new run removes the
    mark, which would count again if the recipe were changed back."""
    write_suite(Path(), SUITE)
    run, *_ = planned().runs
    run.lost.parent.mkdir(parents=True)
    mark_lost(run, "round 1: it diverged")
    runner.record_runs(planned().suite, planned().runs)
    (lost, *_) = planned().runs
    assert (lost.state, lost.recorded, why_lost(lost)) == ("lost", None, "round 1: it diverged")

    slower = SUITE.replace("comm_round: 1", "comm_round: 1, train_args.learning_rate: 0.01")
    write_suite(Path(), slower)
    with pytest.raises(RunError, match=f"{RECORD}: CalFAT seed 0 is recorded with another recipe than the suite has"):
        planned()
    RECORD.unlink()
    assert {run.state for run in planned().runs} == {"new"}
    runner.run_all(dataclasses.replace(planned(), selected=frozenset(["CalFAT"])), 1, runner.SuiteObserver(), [])
    assert [row["state"] for row in rows()] == ["finished"] * 2
    assert not run.lost.exists()

    other = planned().runs[1]
    other.lost.parent.mkdir(parents=True)
    other.lost.write_text("round 1: it diverged\n")
    assert planned().runs[1].state == "new"


def digest_of(*overrides: str) -> str:
    """The digest of the first run of :data:`SUITE` in this folder, by a registry that was asked nothing before."""
    registry = Registry.load(entry_points=False, plugins=[PLUGIN])
    (run, *_) = make_plan(load_suite(write_suite(Path())), registry, overrides=overrides).runs
    return digest(run.experiment)


@dataclass(frozen=True)
class NeedsOne:
    share: float = option(help="an option without a default")


PLUGIN = offering(PartitionEntry("needs", build=dict, config=NeedsOne, summary="of a test"))


@pytest.mark.usefixtures("in_a_folder")
def test_the_digest_follows_what_is_run_and_nothing_else() -> None:
    same = ["data_args.data_cache_dir=/elsewhere", "train_args.momentum=0.9"]
    other = [
        *("train_args.epochs=2", "data_args.partition_alpha=0.3", "calfat.threat.steps=3", "calfat.partition.seed=1"),
        *("calfat.partition.seed=2021", "calfat.evaluators=[natural, {name: pgd20, batch_size: 7}]"),
        *("calfat.model.norm=batch", "train_args.comm_round=3", "calfat.aggregator=fedprox"),
        "calfat.runtime.precision=bf16",
    ]
    assert {digest_of(override) for override in same} == {digest_of()}
    found = [digest_of(override) for override in other]
    assert len({digest_of(), *found}) == len(other) + 1


SEVEN = ("train_args.client_num_in_total=7", "train_args.client_num_per_round=7", "calfat.aggregator={name: bulyan}")
TRANSFER = "calfat.evaluators=[natural, pgd20, {name: transfer, source: other.safetensors}]"


NEEDS = ("data_args.partition_method=needs", "calfat.partition.share=0.5")


@pytest.mark.parametrize("overrides", [(), SEVEN, (TRANSFER,), NEEDS])
@pytest.mark.usefixtures("in_a_folder")
def test_a_key_that_a_later_version_adds_changes_no_digest(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """Not even where names alone are no recipe: Bulyan asks for more clients than the default, transfer for a model."""
    before, as_run = digest_of(*overrides), Experiment.as_run

    def with_key(experiment: Experiment) -> dict[str, Any]:
        recipe = as_run(experiment)
        recipe["calfat"]["evaluation"]["new"] = 3
        return recipe

    monkeypatch.setattr(Experiment, "as_run", with_key)
    assert digest_of(*overrides) == before


@pytest.mark.usefixtures("in_a_folder")
def test_options_without_a_default_count_in_the_digest() -> None:
    found = [digest_of(*SEVEN), digest_of(*SEVEN[:2], "calfat.aggregator={name: bulyan, f: 0}"), digest_of(TRANSFER)]
    found += [digest_of(TRANSFER.replace("other", "another")), digest_of(*NEEDS), digest_of(NEEDS[0], f"{NEEDS[1]}1")]
    assert len(set(found)) == len(found)
    assert found[0] == digest_of(*SEVEN[:2], "calfat.aggregator={name: bulyan, f: 1}")


@pytest.mark.usefixtures("in_a_folder")
def test_a_row_is_of_the_plugin_that_was_run() -> None:
    """Of its content, wherever it lies: another machine has it elsewhere."""

    def planned(file: str) -> SuitePlan:
        text = SUITE.replace("set: {", f"set: {{calfat.plugins: {{mine: {{file: {file}}}}}, ")
        suite = load_suite(write_suite(Path(), text), record=RECORD)
        return make_plan(suite, registry_of(suite, ()))

    Path("mine.py").write_text("WHAT = 1\n")
    (run, *_) = planned("mine.py").runs
    add_to_record(RECORD, {run.key: dataclasses.replace(ROW, recipe=digest(run.experiment))})
    Path("elsewhere").mkdir()
    moved = Path("mine.py").rename("elsewhere/mine.py")
    assert planned(str(moved)).runs[0].state == "finished"
    moved.write_text("WHAT = 2\n")
    with pytest.raises(RunError, match=r"runs\.csv: CalFAT seed 0 is recorded with another recipe"):
        planned(str(moved))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("finished", "done"), "the state 'done'"),
        (lambda text: text + text.splitlines()[1] + "\n", "a second row of its run"),
        (lambda text: text.replace(",7,", ",seven,"), "invalid literal for int() with base 10: 'seven'"),
        (lambda text: text.replace("0.5", "half"), "could not convert string to float: 'half'"),
        (lambda text: text.replace("recipe", "digest"), "'recipe'"),
        (lambda text: text.replace("0.5", "nan"), "a value that is not finite"),
        (lambda text: text.replace("0.5", "inf"), "a value that is not finite"),
        (lambda text: text.replace("CalFAT,,", "CalFAT,a try,"), "a choice run without a value of 'choice'"),
        (lambda text: text.replace(",2,,", ",1,,"), "its format is 1, and this version's is 2"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, change: Callable[[str], str], problem: str) -> None:
    path = tmp_path / "runs.csv"
    add_to_record(path, {("CalFAT", "", 7): ROW})
    damaged = change(path.read_text())
    path.write_text(damaged)
    start = f"{path}:{3 if 'second' in problem else 2}: {'' if 'format' in problem else 'damaged row: '}{problem}"
    with pytest.raises(RunError, match=f"^{re.escape(start)}"):
        read_record(path)
    with pytest.raises(RunError):
        add_to_record(path, {("FedPGD", "", 7): ROW})
    assert path.read_text() == damaged


@pytest.mark.parametrize("text", ["name,mark\nAda,1\n", "name,mark\n", "\n", "cell,note\n", '"' * 9])
def test_a_file_of_something_else_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "marks.csv"
    path.write_text(text)
    with pytest.raises(RunError, match=r"marks\.csv: is there already, and calfat suite did not write it"):
        add_to_record(path, {("CalFAT", "", 7): ROW})
    assert path.read_text() == text


def test_a_file_system_without_locks_takes_rows_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without the mount option flock, for one: nothing is wrong with its room."""

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    add_to_record(tmp_path / "runs.csv", {("CalFAT", "", 7): ROW})
    assert [*read_record(tmp_path / "runs.csv")] == [("CalFAT", "", 7)]


def test_many_write_at_once_and_no_row_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    wanted = {(f"cell {number}", "", number): ROW for number in range(40)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: add_to_record(path, {key: wanted[key]}), wanted))
    assert read_record(path) == wanted
    assert [each.name for each in tmp_path.iterdir()] == ["runs.csv"]


@pytest.mark.usefixtures("stand_in")
def test_a_record_that_cannot_be_written_is_refused_before_the_first_run() -> None:
    write_suite(Path())
    ended = calfat("suite", "tiny.yaml", "--record", "/proc/runs.csv")
    assert ended.code == 2
    assert ended.err.startswith("error: /proc: cannot be written to (")
    assert ended.err.endswith("; name another file with --record.\n")
    assert not Path("runs").exists()
    assert calfat("suite", "tiny.yaml", "--record", "/proc/runs.csv", "--table").code == 0


def test_a_link_to_a_record_stays_one(tmp_path: Path) -> None:
    """A record on a disk that machines share: what went to a file in the link's place would be missing there."""
    (tmp_path / "shared").mkdir()
    shared, link = tmp_path / "shared" / "runs.csv", tmp_path / "runs.csv"
    link.symlink_to(shared)  # also before there is one
    for seed in (7, 8):
        add_to_record(link, {("CalFAT", "", seed): ROW})
        assert link.is_symlink()
    assert len(read_record(shared)) == 2


@pytest.mark.usefixtures("in_a_folder")
def test_a_metric_that_rows_of_a_record_lack_is_said(registry: Registry) -> None:
    """As where a suite has one more since they were recorded: its mean is not over the n of the row."""

    def row(run: SuiteRun) -> Recorded:
        values = {"natural": 0.5} if run.seed else {"natural": 0.5, "pgd20": 0.2}
        return Recorded("finished", digest(run.experiment), values)

    summary = recorded(Path(), SUITE, registry, row)
    note = (
        "the record has no pgd20 of seed 1: its mean is over the others. Run the suite with this record where the "
        "directories of these runs are, or remove their rows to run them again"
    )
    assert [cell.notes for cell in summary.cells] == [[note], [note]]
