"""``calfat suite FILE --versus LABEL``: every row beside the one that the user names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from calfat_plugin.cli.main import main
from calfat_plugin.suites.runner import RunOutcome
from calfat_plugin.suites.summary import SuiteSummary, summarise
from calfat_plugin.suites.tables import versus_markdown
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
    """Measured accuracies, in percent: cell to seed to (natural, PGD-20)."""

    def make(text: str, values: dict[str, dict[int, tuple[float, float]]]) -> SuiteSummary:
        plan, outcomes = plan_of(text), []
        for run in plan.runs:
            found = values[run.cell.name].get(run.seed)
            if found is None:
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


def test_each_seed_is_compared_with_the_same_seed(summary):
    """Seeds 1 and 2: 90 - 72 and 93 - 74, t interval 18.5 ± 12.706 x 0.5; by their order it would be 20.5."""
    found = summary(
        ROWS,
        {"CalFAT": {1: (90, 20), 2: (93, 21)}, "Normalised": {}, "FedPGD": {0: (70, 50), 1: (72, 51), 2: (74, 52)}},
    )
    assert "|   2 | +18.50 [+12.15, +24.85] | -31.00 [-31.00, -31.00] |" in versus_markdown(found, "FedPGD")


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
    assert "| -10.00 [-10.00, -10.00] | +20.00 [+20.00, +20.00] |" in lines[3]
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
