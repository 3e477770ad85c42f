"""``calfat suite FILE --versus LABEL``: every row beside the one that the user names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from calfat_plugin.cli.main import main
from calfat_plugin.maths.intervals import Rival
from calfat_plugin.report.reading import read_suite
from calfat_plugin.suites.runner import RunOutcome
from calfat_plugin.suites.summary import SuiteSummary, summarise
from calfat_plugin.suites.tables import versus_markdown, write_tables
from tests.suites.files import SUITE

ROWS = SUITE.replace("    FedPGD", "    Normalised: {calfat.model.norm: batch}\n    FedPGD").replace(
    "[0, 1]", "[0, 1, 2]"
)
GRID = SUITE.replace(
    "axes:\n",
    'axes:\n  beta:\n    "0.1": {data_args.partition_alpha: 0.1}\n    "0.3": {data_args.partition_alpha: 0.3}\n',
)


@pytest.fixture
def summary(plan_of):
    """Measured accuracies, in percent: cell to seed to (natural, PGD-20); None: the training diverged."""

    def make(text: str, values: dict[str, dict[int, tuple[float, float] | None]]) -> SuiteSummary:
        plan, outcomes = plan_of(text), []
        for run in plan.runs:
            if run.seed not in values[run.cell.name]:
                continue
            found = values[run.cell.name][run.seed]
            if found is None:
                outcomes.append(RunOutcome(run, "lost", "it diverged"))
                continue
            run.directory.mkdir(parents=True)
            evaluations = [
                {"label": label, "accuracy": value / 100}
                for label, value in zip(("natural", "pgd20"), found, strict=True)
            ]
            (run.directory / "results.json").write_text(json.dumps({"evaluations": evaluations}))
            outcomes.append(RunOutcome(run, "finished"))
        return summarise(plan, outcomes)

    return make


def test_rows_are_compared_with_the_named_one_over_the_seeds_that_both_have(summary, snapshot):
    """CalFAT - FedPGD: natural 10, 12, 14, t interval 12 ± 4.303 x 2 / sqrt 3; Normalised has one seed only."""
    found = summary(
        ROWS,
        {
            "CalFAT": {0: (80, 40), 1: (82, 41), 2: (84, 42)},
            "Normalised": {1: (90, 20)},
            "FedPGD": {0: (70, 50), 1: (70, 51), 2: (70, 52)},
        },
    )
    snapshot(versus_markdown(found, "FedPGD"))


def test_a_method_that_diverges_now_and_then_is_not_shown_by_its_good_runs(summary):
    """60 and 61 of three seeds, the mean of which is 40.33: FedPGD has more, in the table and beside CalFAT."""
    found = summary(
        ROWS.replace("metrics: {", "metrics: {passes: passes, "),
        {
            "CalFAT": {0: (60, 30), 1: None, 2: (61, 31)},
            "Normalised": {0: None},
            "FedPGD": {0: (50, 20), 1: (51, 21), 2: (49, 22)},
        },
    )
    calfat, normalised, _ = found.cells
    score = calfat.scores["natural"]
    assert (score.by_seed, score.mean) == ({0: 0.6, 1: 0.0, 2: 0.61}, pytest.approx(1.21 / 3))
    assert score.rival == Rival("FedPGD", False, score.rival.difference)
    assert score.rival.difference.seeds == 3
    assert (calfat.ended, normalised.ended, calfat.scores["passes"].by_seed) == (3, 1, {})
    assert normalised.scores["natural"].by_seed == {0: 0.0}
    assert calfat.notes == ["seed 1 lost, which counts as 0 in accuracies: it diverged"]
    assert re.search(r"\|   3 \| +- \| -9\.67 \[", versus_markdown(found, "FedPGD"))
    (folder,) = write_tables(found, None)
    assert read_suite(folder).notes == [
        "Left out of the means: 2 runs whose training diverged; they count as 0 in the suite's table."
    ]


def test_the_release_count_of_a_run_that_was_lost_is_0_too(summary):
    text = f"{SUITE}reported: {{source: a paper, percent: {{CalFAT: {{natural: 80}}}}}}\n"
    found = summary(text, {"CalFAT": {0: (60, 30), 1: None}, "FedPGD": {}})
    assert found.cells[0].scores["natural"].release == (0.6, 0.0)


def test_each_seed_is_compared_with_the_same_seed(summary):
    """Seeds 1 and 2: 90 - 72 and 93 - 74, t interval 18.5 ± 12.706 x 0.5; by their order it would be 20.5."""
    found = summary(
        ROWS,
        {"CalFAT": {1: (90, 20), 2: (93, 21)}, "Normalised": {}, "FedPGD": {0: (70, 50), 1: (72, 51), 2: (74, 52)}},
    )
    assert "|   2 | +18.50 [+12.15, +24.85] | -31.00 |" in versus_markdown(found, "FedPGD")


def test_a_row_is_compared_at_its_own_other_labels(summary):
    """0.3/CalFAT with 0.3/FedPGD, whatever 0.1/FedPGD measured."""
    found = summary(
        GRID,
        {
            "0.1/CalFAT": {0: (50, 20), 1: (52, 21)},
            "0.1/FedPGD": {0: (40, 25), 1: (41, 26)},
            "0.3/CalFAT": {0: (60, 30), 1: (60, 30)},
            "0.3/FedPGD": {0: (70, 10), 1: (70, 10)},
        },
    )
    lines = versus_markdown(found, "FedPGD").splitlines()
    assert [line.split("|")[1:3] for line in lines[2:4]] == [[" 0.1  ", " CalFAT "], [" 0.3  ", " CalFAT "]]
    assert "| -10.00 | +20.00 |" in lines[3].replace("  ", "")
    assert len(lines) == 6
    lines = versus_markdown(found, "0.1").splitlines()
    assert [line.split("|")[1:3] for line in lines[2:4]] == [[" 0.3  ", " CalFAT "], [" 0.3  ", " FedPGD "]]
    assert lines[-1].endswith(
        "Measured on another problem: 0.3/CalFAT (data_args.partition_alpha); 0.3/FedPGD (data_args.partition_alpha)."
    )


def test_other_evaluators_are_another_problem(summary):
    text = SUITE.replace("{calfat.trainer: fedpgd}", "{calfat.evaluators: [natural, {name: pgd20, restarts: 2}]}")
    found = summary(text, {"CalFAT": {0: (50, 20)}, "FedPGD": {0: (50, 20)}})
    assert versus_markdown(found, "FedPGD").endswith("Measured on another problem: CalFAT (calfat.evaluators).\n")


def test_a_label_that_no_row_has_is_refused_before_anything_runs(summary):
    summary(SUITE, {"CalFAT": {}, "FedPGD": {}})
    done = CliRunner().invoke(main, ["suite", "tiny.yaml", "--versus", "FedPDG"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: --versus 'FedPDG': no row of tiny.yaml has this label. Did you mean 'FedPGD'?\n"
    done = CliRunner().invoke(main, ["suite", "tiny.yaml", "--versus", "x"])
    assert done.stderr == "error: --versus 'x': no row of tiny.yaml has this label. Labels: CalFAT, FedPGD.\n"
    assert not Path("runs").exists()
