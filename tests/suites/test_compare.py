"""The section ``compare`` of a suite: planned comparisons, their correction, and the words that they allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from calfat_plugin.errors import RecipeError
from calfat_plugin.maths.intervals import Difference
from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.cells import SuiteRun
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import Recorded, add_to_record, digest
from calfat_plugin.suites.summary import Compared, SuiteSummary, comparisons, summarise
from calfat_plugin.suites.tables import as_json, markdown
from tests.snapshot import TextSnapshot
from tests.suites.files import recorded, write_suite

STUDY = """\
base: base.yaml
seeds: [1, 2, 3, 4]
metrics: [natural, "natural:worst-class", pgd20]
compare:
  row: CalFAT
  metrics: ["natural:worst-class", pgd20]
  robust: pgd20
  level: 3
axes:
  beta:
    "0.1": {data_args.partition_alpha: 0.1}
    "0.5": {data_args.partition_alpha: 0.5}
  method:
    CalFAT: {}
    FedPGD: {calfat.trainer: fedpgd}
    FedMART: {calfat.trainer: fedmart}
"""
METRICS = ("natural", "natural:worst-class", "pgd20")
#: Cell to natural, worst class and PGD-20 accuracy of the four seeds.
VALUES = {
    "0.1/CalFAT": ((0.80, 0.82, 0.78, 0.81), (0.50, 0.52, 0.48, 0.51), (0.50, 0.51, 0.49, 0.50)),
    "0.1/FedPGD": ((0.70, 0.73, 0.10, 0.71), (0.20, 0.21, 0.00, 0.19), (0.50, 0.52, 0.10, 0.51)),
    "0.1/FedMART": ((0.70, 0.72, 0.69, 0.70), (0.20, 0.23, 0.17, 0.22), (0.50, 0.52, 0.48, 0.51)),
    "0.5/CalFAT": ((0.85, 0.86, 0.84, 0.85), (0.60, 0.61, 0.60, 0.62), (0.55, 0.56, 0.54, 0.55)),
    "0.5/FedPGD": ((0.84, 0.86, 0.83, 0.85), (0.60, 0.59, 0.60, 0.60), (0.56, 0.57, 0.56, 0.55)),
    "0.5/FedMART": ((0.84, 0.85, 0.83), (0.60, 0.59, 0.60), (0.56, 0.57, 0.56)),
}


Values = Mapping[str, tuple[tuple[float, ...], ...]]
Measure = Callable[[str, Values], SuiteSummary]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry) -> Measure:
    """A suite whose runs are all in its record, as far as there are values."""
    monkeypatch.chdir(tmp_path)

    def make(text: str, values: Values) -> SuiteSummary:
        def row(run: SuiteRun) -> Recorded | None:
            of = values[run.cell.name]
            if run.seed > len(of[0]):
                return None
            measured = {metric: each[run.seed - 1] for metric, each in zip(METRICS, of, strict=True)}
            return Recorded("finished", digest(run.experiment), measured)

        return recorded(tmp_path, text, registry, row)

    return make


@pytest.fixture
def summary(measure: Measure) -> SuiteSummary:
    """All but seed 4 of 0.5/FedMART."""
    return measure(STUDY, VALUES)


def families(summary: SuiteSummary) -> tuple[dict[tuple[str, str], Compared], ...]:
    return tuple({(each.row.cell.name, each.endpoint): each for each in family} for family in comparisons(summary))


def test_two_seeds_with_equal_differences_are_no_evidence(measure: Measure) -> None:
    """Whatever the difference: natural accuracy of the worst class 0.5 and 0.6 against 0.49 and 0.59."""
    values = dict.fromkeys(VALUES, ((0.8, 0.9), (0.5, 0.6), (0.5, 0.6)))
    values["0.1/FedMART"] = ((0.79, 0.89), (0.49, 0.59), (0.49, 0.59))
    (found, _) = families(measure(STUDY.replace("[1, 2, 3, 4]", "[1, 2]"), values))
    for endpoint in ("natural:worst-class", "pgd20"):
        each = found["0.1/FedMART", endpoint]
        assert (each.difference, each.word) == (Difference(pytest.approx(0.01), None, 2), "too few seeds")  # type: ignore[arg-type]


def test_a_family_is_corrected_for_all_that_was_planned_in_it(summary: SuiteSummary) -> None:
    """Four comparisons under skew; with an even split two of the four cannot be made yet, and count all the same."""
    for family in families(summary):
        known = sorted((each.p_value, each.adjusted) for each in family.values() if each.p_value is not None)
        expected, highest = [], 0.0
        for rank, (p_value, _) in enumerate(known):
            highest = max(highest, min(1.0, (4 - rank) * p_value))
            expected.append(highest)
        assert [adjusted for _, adjusted in known] == pytest.approx(expected)
    assert len(known) == 2


def test_a_row_that_is_never_run_is_no_part_of_its_family(measure: Measure, summary: SuiteSummary) -> None:
    """Else each of its comparisons would raise all other p-values of the family for ever. The other family is as it
    was, with a row that is not there yet."""
    skewed, even = families(measure(f"{STUDY}skip: {{0.1/FedMART: too slow}}\n", VALUES))
    before = families(summary)
    assert {name for name, _ in skewed} == {"0.1/FedPGD"}
    assert {key: each.p_value for key, each in skewed.items()}.items() <= {
        key: each.p_value for key, each in before[0].items()
    }.items()
    known = sorted((each.p_value, each.adjusted) for each in skewed.values())
    assert known[0][1] == pytest.approx(2 * known[0][0])
    assert [each.adjusted for each in even.values()] == [each.adjusted for each in before[1].values()]


def test_a_family_without_what_is_compared_is_left_out(measure: Measure) -> None:
    """The named row is skipped in one of them."""
    (even,) = families(measure(f"{STUDY}skip: {{0.1/CalFAT: slow}}\n", VALUES))
    assert {name for name, _ in even} == {"0.5/FedPGD", "0.5/FedMART"}


def test_a_run_that_the_machine_ended_has_no_value(summary: SuiteSummary) -> None:
    """Its comparisons wait, in this session as in the next; the same run lost is 0 everywhere."""
    plan = summary.plan
    run = next(run for run in plan.runs if run.cell.name == "0.5/FedMART" and run.seed == 4)
    found = {}
    for status in ("failed", "lost"):
        _, even = families(summarise(plan, [run.ended(status, "no memory")]))
        found[status] = {endpoint: each for (name, endpoint), each in even.items() if name == run.cell.name}
    assert {each.word for each in found["failed"].values()} == {""}
    lost = found["lost"]["pgd20"].difference
    assert lost is not None
    assert (lost.mean, lost.seeds) == (pytest.approx((-0.04 + 0.55) / 4), 4)


def test_further_seeds_of_a_call_change_no_planned_comparison(summary: SuiteSummary, registry: Registry) -> None:
    """A fifth seed is in the table, and would make its differences clearer; fewer seeds leave the tests undone."""

    def with_seeds(*seeds: int) -> SuiteSummary:
        return summarise(make_plan(summary.suite, registry, seeds=seeds))

    rows = {
        run.key: Recorded("finished", digest(run.experiment), dict.fromkeys(METRICS, value))
        for run, value in zip(with_seeds(5).plan.runs[:2], (0.9, 0.1), strict=True)
    }
    add_to_record(Path("runs.csv"), rows)
    more = with_seeds(1, 2, 3, 4, 5)
    assert [len(cell.scores["pgd20"].values) for cell in more.cells[:2]] == [5, 5]

    def numbers(of: SuiteSummary) -> list[object]:
        return [(key, each.difference, each.p_value) for family in families(of) for key, each in family.items()]

    assert numbers(more) == numbers(summary)
    assert {each.p_value for family in families(with_seeds(1, 2, 3, 5)) for each in family.values()} == {None}


def test_words(summary: SuiteSummary) -> None:
    skewed, even = families(summary)
    assert skewed["0.1/FedMART", "natural:worst-class"].word == "clear"
    assert skewed["0.1/FedMART", "pgd20"].word == "level"  # by 90 % intervals within 3 points
    assert skewed["0.1/FedPGD", "pgd20"].word == "not clear"  # a collapse makes the interval wide
    assert even["0.5/FedPGD", "natural:worst-class"].word == "not clear"  # level is of robust alone
    assert {each.word for (name, _), each in even.items() if name == "0.5/FedMART"} == {""}  # three seeds of four


BAD: Mapping[str, tuple[tuple[str, str], str]] = {
    "no such row": (("row: CalFAT", "row: CalFATT"), "row"),
    "row of two axes": (('    "0.1":', '    CalFAT: {}\n    "0.1":'), "row"),
    "no such metric": (('metrics: ["natural:worst-class", pgd20]', "metrics: [pgd10]"), "metrics"),
    "one metric twice": (('metrics: ["natural:worst-class", pgd20]', "metrics: [pgd20, pgd20]"), "metrics"),
    "level of no metric": (("robust: pgd20", "robust: aa"), "level"),
    "level of what is not compared": (('metrics: ["natural:worst-class", pgd20]', "metrics: [natural]"), "level"),
    "negative margin": (("level: 3", "level: -3"), "level"),
    "unknown key": (("  level: 3", "  levle: 3"), "levle"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, snapshot: TextSnapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    (old, new), key = BAD[name]
    assert old in STUDY
    changed = STUDY.replace(old, new, 1)
    line = next(number for number, each in enumerate(changed.splitlines(), start=1) if each.startswith(f"  {key}:"))
    with snapshot.raises(RecipeError, f"tiny.yaml:{line}: compare.{key}: "):
        load_suite(write_suite(tmp_path, changed))


def test_the_table_has_a_part_for_each_family(summary: SuiteSummary) -> None:
    text = markdown(summary)
    heads = [re.sub(r"\s+", " ", line) for line in text.splitlines() if line.startswith("| beta")]
    assert [head.startswith("| beta | method | n | ") for head in heads] == [True, True]  # the second one: differences
    _, found = text.split("\nPlanned comparisons: ")
    assert found.startswith(
        "CalFAT minus the other row, in points, paired over seeds, with 95 % intervals (Student's, not corrected) and "
        "p-values (paired t test), corrected after Holm within each family. "
        "Level: within 3 points in pgd20, by two one-sided tests.\n\n| row         | endpoint "
    )
    tables = found.strip().split("\n\n")[1:]
    assert [table.count("\n") - 1 for table in tables] == [4, 4]
    lines = [re.sub(r"\s+", " ", line) for table in tables for line in table.splitlines()]
    assert lines[0] == "| row | endpoint | n | difference | p | p, corrected | result |"
    assert lines[2] == "| 0.1/FedPGD | natural:worst-class | 4 | +35.25 [+21.66, +48.84] | 0.0037 | 0.011 | clear |"
    assert "| 0.5/FedMART | pgd20 | 3 | -1.33 [-2.77, +0.10] | - | - | not all seeds yet |" in lines
    found = [one for family in as_json(summary)["comparisons"] for one in family]
    assert [(one["cell"], one["endpoint"], one["result"]) for one in found[:2]] == [
        ("0.1/FedPGD", "natural:worst-class", "clear"),
        ("0.1/FedPGD", "pgd20", "not clear"),
    ]
    assert found[0]["difference"]["mean"] == pytest.approx(0.3525)
    assert 0.003 < found[0]["p_value"] < found[0]["adjusted"] < 0.012


def test_a_row_without_a_number_says_so_and_not_that_seeds_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    """All seeds of FedMART have finished, and their attack did not run."""
    monkeypatch.chdir(tmp_path)

    def row(run: SuiteRun) -> Recorded | None:
        of = VALUES["0.1/CalFAT"]
        measured = {metric: each[run.seed - 1] for metric, each in zip(METRICS, of, strict=True)}
        if run.cell.labels[1] == "FedMART":
            del measured["pgd20"]
        return Recorded("finished", digest(run.experiment), measured)

    found = families(recorded(tmp_path, STUDY, registry, row))[0]
    assert found["0.1/FedMART", "pgd20"].word == "no number"
    assert found["0.1/FedPGD", "pgd20"].word != "no number"
    assert found["0.1/FedMART", "natural:worst-class"].word != "no number"
