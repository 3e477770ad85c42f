from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from calfat_plugin.errors import RunError
from calfat_plugin.maths.intervals import Score
from calfat_plugin.registry import Registry
from calfat_plugin.report.scores import score_cell
from calfat_plugin.report.table import Cell
from calfat_plugin.run_files import Results
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.suite import Reported
from calfat_plugin.suites.summary import summarise
from calfat_plugin.suites.tables import as_csv, as_json, caption, latex, markdown, write_tables
from calfat_plugin.typed_json import from_json
from tests.suites.fake_run import written
from tests.suites.files import SUITE, write_suite

TEXT = (
    SUITE.replace(
        "axes:\n",
        "axes:\n  data_set:\n    A&B: {data_args.partition_alpha: 0.1}\n    C|D: {data_args.partition_alpha: 0.3}\n",
    )
    + """\
skip: {C|D/FedPGD: too slow}
reported:
  source: arXiv:2205.14926, Table 1
  tolerance: {natural: 3, pgd20: 2}
  percent:
    A&B/CalFAT: {natural: 80, pgd20: 31.12}
    C|D/CalFAT: {natural: 50.5}
"""
)


@pytest.fixture
def summary(tmp_path, monkeypatch):
    """A&B/CalFAT finished twice, A&B/FedPGD once and failed once, C|D/CalFAT not run, C|D/FedPGD skipped."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load_suite(write_suite(tmp_path, TEXT)), Registry.load(entry_points=False))
    results = {
        ("A&B/CalFAT", 0): (0.80, 0.40),
        ("A&B/CalFAT", 1): (0.84, 0.41),
        ("A&B/FedPGD", 0): (0.6, 0.255),
    }
    outcomes = []
    for run in plan.runs:
        accuracy = results.get((run.cell.name, run.seed))
        if accuracy is not None:
            run.directory.mkdir(parents=True)
            evaluations = [
                written(label, a, accuracy_release=a + more)
                for label, a, more in zip(("natural", "pgd20"), accuracy, (0, 0.01), strict=True)
            ]
            content = {"format": 2, "seconds": 9.5, "evaluations": evaluations}
            (run.directory / "results.json").write_text(json.dumps(content))
            outcomes.append(run.ended("finished"))
    outcomes.append(next(run for run in plan.runs if run.name == "A&B/FedPGD seed 1").ended("failed", "no data"))
    return summarise(plan, outcomes)


def test_the_table_in_each_language(summary, snapshot):
    for write in (markdown, latex, as_csv):
        snapshot(write(summary))


ONE = "One partition, seeds of training alone{}: intervals say nothing of other partitions."
FIXED = SUITE.replace("set: {", "set: {calfat.partition.seed: 2021, ")


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        (FIXED, ""),
        (SUITE.replace("FedPGD: {", "FedPGD: {calfat.partition.seed: 2021, "), " (FedPGD)"),
        (FIXED.replace("[0, 1]", "[0]"), None),
        (SUITE, None),
    ],
)
def test_seeds_that_share_a_partition_are_said_to(text, whose, tmp_path, monkeypatch):
    """Else an interval would claim to be about other partitions, too; of one seed there is no such interval."""
    monkeypatch.chdir(tmp_path)
    planned = make_plan(load_suite(write_suite(tmp_path, text)), Registry.load(entry_points=False))
    found = summarise(planned)
    short = next(line for line in latex(found).splitlines() if "\\caption" in line)
    for said in (short, caption(found)):
        assert said.count("One partition") == (whose is not None)
        assert whose is None or ONE.format(whose) in said


NASTY = """<script>alert(1)</script> *b* _c_ `d` [e](f) ~~g~~ &lt; a|b
# h"""
ESCAPED = r"\<script>alert(1)\</script> \*b\* \_c\_ \`d\` \[e\](f) \~~g\~~ \&lt; a|b # h"


def test_texts_of_a_suite_are_no_html_and_no_markdown(summary):
    """A title, an axis, a label, a heading, a source and what a run printed."""
    first = summary.cells[0]
    nasty = replace(
        summary,
        plan=replace(
            summary.plan,
            suite=summary.suite.model_copy(
                update={
                    "title": NASTY,
                    "metrics": {"natural": NASTY},
                    "reported": Reported(),
                    "axes": {NASTY: {}, "method": {}},
                }
            ),
        ),
        cells=(
            replace(
                first,
                cell=replace(first.cell, labels=(NASTY, "CalFAT")),
                scores={"natural": first.scores["natural"]},
                source=NASTY,
                runs=(replace(first.runs[0], state="failed", message=NASTY),),
            ),
        ),
    )
    text = markdown(nasty)
    lines = text.splitlines()
    assert len(lines) == 9  # title, table of three lines, caption, remark, and empty lines between
    assert lines[0] == f"# {ESCAPED}"
    assert text.replace("\\|", "|").count(ESCAPED) == text.count("<script>") == 7
    assert "<script" not in text.replace("\\<", "")
    assert [line for line in latex(nasty).splitlines() if line.startswith("# h")] == []


def test_a_column_says_what_was_measured_on_fewer_examples(summary):
    first = summary.cells[0]
    evaluations = [written("natural", 0.9, num_examples=1359), written("pgd20", 0.5, num_examples=32)]
    results = from_json(Results, {"evaluations": evaluations})
    runs = tuple(replace(run, results=results) for run in first.runs)
    fewer = replace(summary, cells=(replace(first, runs=runs),))
    assert "natural | PGD-20 (32 of 1,359 images) |" in " ".join(markdown(fewer).split())
    assert "natural & PGD-20 (32 of 1,359 images)" in latex(fewer)


def test_json_holds_everything(summary):
    content = json.loads(json.dumps(as_json(summary), allow_nan=False))
    cell = content["cells"][0]
    assert cell["settings"] == {
        "train_args.comm_round": 1,
        "data_args.partition_alpha": 0.1,
        "calfat.reported": {"source": "arXiv:2205.14926, Table 1", "natural": 80.0, "pgd20": 31.12},
    }
    scored = cell["scores"]["pgd20"]
    assert scored == {
        "n": 2,
        "values": [0.40, 0.41],
        "mean": pytest.approx(0.405),
        "std": pytest.approx(0.0070710678),
        "release_mean": pytest.approx(0.415),
        "reported": pytest.approx(0.3112),
        "difference": pytest.approx(0.1038),
        "beyond_tolerance": True,
        "interval": [pytest.approx(0.341468976), pytest.approx(0.468531024)],
        "rival": {"name": "A&B/FedPGD", "difference": pytest.approx(0.145), "interval": None, "seeds": 1},
        "clear_best": False,
    }
    assert cell["source"] == "arXiv:2205.14926, Table 1"
    assert [run["status"] for run in content["cells"][1]["runs"]] == ["finished", "failed"]
    assert content["cells"][1]["runs"][0]["directory"] == "runs/suites/tiny/a-b_fedpgd/seed-0"
    evaluation = content["cells"][1]["runs"][0]["evaluations"][0]
    assert {name: evaluation[name] for name in ("label", "accuracy", "accuracy_release")} == {
        "label": "natural",
        "accuracy": 0.6,
        "accuracy_release": 0.6,
    }
    assert content["cells"][3]["skipped"] == "too slow"


def test_tables_are_written_to_the_suite_or_it_is_said_why_not(summary):
    folder = write_tables(summary)
    assert folder == summary.suite.directory
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert names == ["suite.json", "table.csv", "table.md", "table.tex"]
    assert (folder / "table.tex").read_text(encoding="utf-8") == latex(summary)
    (folder / "table.md").unlink()
    (folder / "table.md").mkdir()
    with pytest.raises(RunError, match=r"table\.md"):
        write_tables(summary)


@pytest.mark.parametrize("content", ["[1]", '{"format": 3}', '{"evaluations": [{"label": "natural"}]}'])
def test_a_damaged_results_file_is_reported(content, summary, snapshot):
    run = summary.plan.runs[0]
    path = run.directory / "results.json"
    path.write_text(content)
    plan = replace(summary.plan, runs=(replace(run, state="finished"),))
    with snapshot.raises(RunError, f"{path}: "):
        summarise(plan)


# --- maths ------------------------------------------------------------------------------------------------------------


def test_scores_by_hand():
    """81, 84, 87: mean 84, sample standard deviation 3 (the population's would be 2.449)."""
    three = Score({0: 0.81, 1: 0.84, 2: 0.87}, reported=0.80, release=(0.82, 0.85, 0.88), tolerance=0.03)
    assert (three.mean, three.std) == (pytest.approx(0.84), pytest.approx(0.03))
    assert three.difference == pytest.approx(0.05)  # both by the release's count
    assert three.beyond is True
    assert score_cell(three) == Cell("84.00", "3.00", ("[76.5, 91.5]", "(80.00, +5.00!)"), False, True)


@pytest.mark.parametrize(
    ("mean", "beyond"), [(0.2912, False), (0.2911, True), (0.3312, False), (0.3313, True), (0.3112, False)]
)
def test_a_difference_of_just_the_tolerance_passes(mean, beyond):
    """0.3112 - 0.2912 is 0.020000000000000018 in floating point."""
    assert Score({0: 0.0}, reported=0.3112, release=(mean,), tolerance=0.02).beyond is beyond


def with_results(tmp_path, monkeypatch, results):
    """The summary of two methods and two seeds; (cell, seed) to evaluations and alarms of a finished run."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load_suite(write_suite(tmp_path, SUITE)), Registry.load(entry_points=False))
    outcomes = []
    for run in plan.runs:
        if (run.cell.name, run.seed) in results:
            evaluations, alarms = results[run.cell.name, run.seed]
            run.directory.mkdir(parents=True)
            content = {"format": 2, "seconds": 9.5, "evaluations": evaluations, "alarms": alarms}
            (run.directory / "results.json").write_text(json.dumps(content))
            outcomes.append(run.ended("finished"))
    return summarise(plan, outcomes)


def measured(label, accuracy):
    return written(label, accuracy)


IDLE = written("pgd20", None, num_examples=0, not_run="it wants more")
SAID = {"code": "not-run", "text": "pgd20 did not run, so it has no number: it wants more.", "labels": ["pgd20"]}
FLAT = {"code": "zero-gradients", "text": "pgd20 began at nothing.", "labels": ["pgd20"]}


def test_an_attack_that_did_not_run_has_no_number_in_any_table(tmp_path, monkeypatch):
    both = {("CalFAT", seed): ([measured("natural", 0.9), IDLE], [SAID]) for seed in (0, 1)}
    summary = with_results(tmp_path, monkeypatch, both)
    note = "pgd20 did not run with seeds 0, 1, so it has no number: it wants more"
    assert f"- CalFAT: {note}\n" in markdown(summary)
    assert "| not run |" in markdown(summary)
    assert "finding" not in markdown(summary)  # the note has said it
    assert f"% CalFAT: {note}\n" in latex(summary)
    assert "& not run \\\\" in latex(summary)
    row = next(csv.DictReader(as_csv(summary).splitlines()[:1] + as_csv(summary).splitlines()[2:3]))
    assert (row["metric"], row["n"], row["mean_percent"], row["note"]) == ("pgd20", "0", "", note)
    cell = as_json(summary)["cells"][0]
    assert (cell["scores"]["pgd20"]["mean"], cell["scores"]["pgd20"]["n"], cell["notes"]) == (None, 0, [note])
    assert cell["runs"][0]["alarms"] == [SAID]


def test_an_attack_that_ran_with_some_seeds_has_their_mean(tmp_path, monkeypatch):
    some = {
        ("CalFAT", 0): ([measured("natural", 0.9), IDLE], [SAID]),
        ("CalFAT", 1): ([measured("natural", 0.9), measured("pgd20", 0.4)], []),
    }
    summary = with_results(tmp_path, monkeypatch, some)
    assert summary.cells[0].scores["pgd20"].values == (0.4,)
    assert summary.cells[0].notes == [
        "pgd20 did not run with seed 0, so it has no number, and its mean is over the others: it wants more"
    ]


def test_a_suite_shows_what_its_runs_found(tmp_path, monkeypatch):
    whole = [measured("natural", 0.9), measured("pgd20", 0.4)]
    summary = with_results(
        tmp_path,
        monkeypatch,
        {("CalFAT", 0): (whole, [FLAT]), ("CalFAT", 1): (whole, [FLAT]), ("FedPGD", 0): (whole, [])},
    )
    note = "finding zero-gradients (seeds 0, 1): pgd20 began at nothing."
    assert [cell.notes for cell in summary.cells] == [[note], []]
    assert f"- CalFAT: {note}\n" in markdown(summary)
    assert note in as_csv(summary)
    assert f"% CalFAT: {note}\n" in latex(summary)
    assert [run["alarms"] for run in as_json(summary)["cells"][0]["runs"]] == [[FLAT], [FLAT]]
