"""A suite that gains or loses evaluators: what is measured already stays, and only what is missing is measured."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.cli import suite as command_line
from calfat_plugin.disk import read_json, write_json
from calfat_plugin.errors import RunError
from calfat_plugin.federation import measurements
from calfat_plugin.federation.worker import Worker
from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.cells import SuiteRun, mark_lost, why_lost
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.processes import command
from calfat_plugin.suites.record import Digests, Recorded, add_to_record, read_record
from calfat_plugin.suites.runner import record_runs
from calfat_plugin.suites.summary import summarise
from calfat_plugin.suites.tables import markdown
from tests.cli.runner import calfat
from tests.recipes import assembled
from tests.suites.fake_run import written
from tests.suites.files import BASE, CHOOSING, begun, write_suite
from tests.suites.test_choices import finish

QUICK_BASE = """\
data_args: {dataset: digits, max_train_examples: 64, max_test_examples: 24}
model_args: {model: cnn_small}
train_args: {comm_round: 1, batch_size: 32, client_num_in_total: 2, client_num_per_round: 2}
calfat:
  threat: {eps: 0.1, step_size: 0.05, steps: 1}
  monitor: {evaluators: [natural]}
  runtime: {threads: 1}
"""
SUITE = """\
title: Two methods
base: base.yaml
set:
  calfat.evaluators: [natural, fgsm]
seeds: [0, 1]
metrics: [natural, fgsm]
axes:
  method:
    Standard: {calfat.trainer: standard}
    FedPGD: {calfat.trainer: fedpgd}
"""
LARGER = (
    SUITE.replace("evaluators: [natural, fgsm]", "evaluators: [natural, fgsm, cw20]")
    .replace("metrics: [natural, fgsm]", "metrics: [natural, fgsm, cw20, worst-case]")
    .replace("seeds: [0, 1]", "seeds: [0, 1, 2]")
)


# --- real runs, in this process ---------------------------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_figures: None) -> list[tuple[str, ...]]:
    """What ``calfat suite`` of this process computes: labels of each final evaluation, and rounds of clients."""
    found: list[tuple[str, ...]] = []
    measure, fit = measurements.measure, Worker.fit

    def measuring(task: Any, evaluators: Any, **how: Any) -> Any:
        ready = list(evaluators)
        if how.get("collector") is not None:
            found.append(tuple(label for label, _ in ready))
        return measure(task, ready, **how)

    def training(worker: Worker, client: int, *arguments: Any) -> Any:
        found.append(("trained", str(client)))
        return fit(worker, client, *arguments)

    def run_all(plan: SuitePlan, jobs: int, observer: object, ended: list[SuiteRun], *how: Any, **also: Any) -> None:
        for run in plan.left:
            done = calfat(*command(plan, run), "--plain", "--no-page")
            ended.append(run.ended("finished" if done.code == 0 else "failed", done.err))
            record_runs(plan.suite, ended[-1:])

    monkeypatch.setattr(measurements, "measure", measuring)
    monkeypatch.setattr(Worker, "fit", training)
    monkeypatch.setattr(command_line, "run_all", run_all)
    monkeypatch.chdir(tmp_path)
    return found


def rows(record: str) -> list[dict[str, str]]:
    with Path(record).open(newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        del row["seconds"]
    return found


def evaluations(folder: str) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for file in sorted(Path("runs/suites", folder).glob("*/*/results.json")):
        found[str(file.parent.relative_to(f"runs/suites/{folder}"))] = read_json(file)["evaluations"]
        for evaluation in found[str(file.parent.relative_to(f"runs/suites/{folder}"))]:
            del evaluation["seconds"]
    return found


def test_a_suite_with_one_more_evaluator_and_one_more_seed_computes_these_alone(
    computed: list[tuple[str, ...]], tmp_path: Path
) -> None:
    write_suite(tmp_path, SUITE, base=QUICK_BASE)
    assert calfat("suite", "tiny.yaml", "--record", "runs.csv").code == 0
    before = evaluations("tiny")
    computed.clear()

    write_suite(tmp_path, LARGER, base=QUICK_BASE)
    table = calfat("suite", "tiny.yaml", "--record", "runs.csv", "--table")
    assert "seeds 0, 1: cw20 is not measured yet; run the suite again" in table.out
    assert len(rows("runs.csv")) == 4
    again = calfat("suite", "tiny.yaml", "--record", "runs.csv")
    assert again.code == 0
    assert "6 of 6 runs to do" in again.out
    whole_run = [("trained", "0"), ("trained", "1"), ("natural", "fgsm", "cw20")]
    assert computed == [("cw20",)] * 4 + whole_run * 2
    computed.clear()
    assert calfat("suite", "tiny.yaml", "--record", "runs.csv").code == 0
    assert computed == []

    write_suite(tmp_path, LARGER, name="fresh", base=QUICK_BASE)
    assert calfat("suite", "fresh.yaml", "--record", "fresh.csv").code == 0
    after = evaluations("tiny")
    assert after == evaluations("fresh")
    assert {run: measured[:2] for run, measured in after.items() if run in before} == before
    assert rows("runs.csv") == rows("fresh.csv")
    assert [row["worst-case"] != "" for row in rows("runs.csv")] == [True] * 6
    for name in ("table.md", "table.tex", "table.csv"):
        tiny, fresh = (Path("runs/suites", folder, name).read_text() for folder in ("tiny", "fresh"))
        assert tiny.replace("tiny", "fresh") == fresh
        assert "cw20" in tiny
    assert "cw20" in Path("runs/suites/tiny/report.html").read_text()
    for run in Path("runs/suites/tiny").glob("*/seed-*/"):
        if run.is_dir():
            assert calfat("replay", run).code == 0
            fresh_run = Path("runs/suites/fresh", *run.parts[-2:])
            assert (run / "evidence.safetensors").read_bytes() == (fresh_run / "evidence.safetensors").read_bytes()


def test_a_failed_addition_costs_no_number(computed: list[tuple[str, ...]], tmp_path: Path) -> None:
    """Clients whose models were not kept cannot be measured."""
    write_suite(tmp_path, SUITE, base=QUICK_BASE)
    assert calfat("suite", "tiny.yaml", "--seeds", "0").code == 0
    numbers = Path("runs/suites/tiny/table.csv").read_text()
    more = SUITE.replace("[natural, fgsm]\nseeds", "[natural, fgsm, personalised]\nseeds")
    write_suite(tmp_path, more, base=QUICK_BASE)
    ended = calfat("suite", "tiny.yaml", "--seeds", "0")
    assert ended.code == 1
    assert "whose models the checkpoint does not have" in ended.out
    cells = read_json(Path("runs/suites/tiny/suite.json"))["cells"]
    assert [cell["scores"]["fgsm"]["n"] for cell in cells] == [1, 1]
    write_suite(tmp_path, SUITE, base=QUICK_BASE)
    assert calfat("suite", "tiny.yaml", "--seeds", "0").code == 0
    assert Path("runs/suites/tiny/table.csv").read_text() == numbers


# --- states, without any run ------------------------------------------------------------------------------------------


def results_of(run: SuiteRun, **accuracies: float) -> None:
    """Leave the directory of a finished run."""
    directory = begun(run)
    found = [written(label, value) for label, value in accuracies.items()]
    for evaluation in found:
        if evaluation["label"] == "worst":
            attacks = [label for label in accuracies if label not in ("natural", "worst")]
            evaluation |= {"label": "worst-case", "settings": {"attacks": attacks}}
    write_json(directory.results, {"seconds": 1.0, "evaluations": found})


def scores(plan: SuitePlan, label: str) -> list[dict[int, float]]:
    return [cell.scores[label].by_seed for cell in summarise(plan).cells]


@pytest.fixture
def finished_plan(plan_of: Callable[..., SuitePlan]) -> Callable[..., SuitePlan]:
    """A suite whose runs have all finished with the evaluators that it has first, then with another text."""
    for run in plan_of(SUITE_WITH_WORST).runs:
        results_of(run, natural=0.8, pgd20=0.4, fgsm=0.5, worst=0.3)
    return plan_of


SUITE_WITH_WORST = """\
base: base.yaml
set:
  calfat.evaluators: [natural, pgd20, fgsm]
seeds: [0, 1]
metrics: [natural, pgd20, worst-case]
axes:
  method:
    CalFAT: {}
    FedPGD: {calfat.trainer: fedpgd}
"""


def test_runs_that_lack_an_evaluator_are_to_do_and_keep_their_numbers(finished_plan: Callable[..., SuitePlan]) -> None:
    more = SUITE_WITH_WORST.replace("pgd20, fgsm]", "pgd20, fgsm, cw20]").replace("worst-case]", "worst-case, cw20]")
    plan = finished_plan(more)
    assert [(run.state, run.lacks) for run in plan.runs] == [("unmeasured", ("cw20",))] * 4
    assert len(plan.left) == 4
    assert command(plan, plan.left[0])[-1] == "--resume"
    assert scores(plan, "pgd20") == [{0: 0.4, 1: 0.4}] * 2
    assert scores(plan, "cw20") == [{}, {}]
    assert scores(plan, "worst-case") == [{}, {}]  # those on disk are over fewer attacks
    cells = summarise(plan).cells
    assert [cell.ended for cell in cells] == [2, 2]
    assert "seeds 0, 1: cw20 is not measured yet; run the suite again" in cells[0].notes
    assert cells[0].left == [0, 1]


def test_fewer_evaluators_leave_runs_finished(
    finished_plan: Callable[..., SuitePlan],
) -> None:
    plan = finished_plan(SUITE_WITH_WORST.replace("[natural, pgd20, fgsm]", "[natural, pgd20, cw20]"))
    assert {run.lacks for run in plan.runs} == {("cw20",)}
    fewer = finished_plan(
        SUITE_WITH_WORST.replace("[natural, pgd20, fgsm]", "[natural, fgsm]").replace("pgd20, worst-case", "fgsm")
    )
    assert {run.state for run in fewer.runs} == {"finished"}
    assert scores(fewer, "natural") == [{0: 0.8, 1: 0.8}] * 2


def test_a_worst_case_over_an_attack_that_was_removed_is_not_the_suite_s(plan_of: Callable[..., SuitePlan]) -> None:
    three = SUITE_WITH_WORST.replace("pgd20, fgsm]", "pgd20, fgsm, cw20]")
    for run in plan_of(three).runs[:2]:
        results_of(run, natural=0.8, pgd20=0.4, fgsm=0.5, cw20=0.35, worst=0.3)
    assert scores(plan_of(three), "worst-case") == [{0: 0.3}, {0: 0.3}]
    plan = plan_of(SUITE_WITH_WORST)
    assert [run.state for run in plan.runs] == ["finished", "finished", "new", "new"]
    assert scores(plan, "pgd20") == [{0: 0.4}, {0: 0.4}]
    assert scores(plan, "worst-case") == [{}, {}]
    assert "seed 0: the worst case in the results is of other attacks" in markdown(summarise(plan))


def test_other_options_under_one_label_are_refused_with_what_to_do(finished_plan: Callable[..., SuitePlan]) -> None:
    other = SUITE_WITH_WORST.replace("fgsm]", "{name: pgd, label: fgsm, steps: 3}]")
    with pytest.raises(RunError, match=r"calfat\.evaluators\.fgsm\.name: 'fgsm' then, 'pgd' now"):
        finished_plan(other)


def test_a_run_that_was_lost_stays_so(plan_of: Callable[..., SuitePlan]) -> None:
    run = plan_of(SUITE_WITH_WORST).runs[0]
    run.lost.parent.mkdir(parents=True)
    mark_lost(run, "round 1: it diverged")
    more = plan_of(SUITE_WITH_WORST.replace("fgsm]", "fgsm, cw20]").replace("worst-case]", "worst-case, cw20]"))
    assert (more.runs[0].state, why_lost(more.runs[0])) == ("lost", "round 1: it diverged")
    assert scores(more, "cw20")[0] == {0: 0.0}
    other = plan_of(SUITE_WITH_WORST.replace("fgsm]", "fgsm]\n  train_args.comm_round: 3"))
    assert other.runs[0].state == "new"


def test_choice_runs_do_not_hear_of_it(plan_of: Callable[..., SuitePlan]) -> None:
    for run in plan_of(CHOOSING).choosing.runs:
        finish(run, {"pgd20": 0.3})
    plan = plan_of(CHOOSING.replace("set: {", "set: {calfat.evaluators: [natural, pgd20, cw20], "))
    assert {run.state for run in plan.choosing.runs} == {"finished"}
    assert plan.waiting == ()


# --- rows of a record whose run directories are elsewhere -------------------------------------------------------------


@pytest.fixture
def elsewhere(plan_of: Callable[..., SuitePlan], tmp_path: Path, registry: Registry) -> Callable[..., SuitePlan]:
    """Four rows of a record, and nothing else; gives the plan of a suite's text."""
    values = {"natural": 0.8, "pgd20": 0.4, "worst-case": 0.3, "cw20": 0.9}  # the last of another suite, long ago
    rows = {
        run.key: Recorded("finished", Digests.of(run.experiment).now, values) for run in plan_of(SUITE_WITH_WORST).runs
    }
    add_to_record(Path("runs.csv"), rows)

    def plan(text: str) -> SuitePlan:
        from calfat_plugin.suites.plan import make_plan

        return make_plan(load_suite(write_suite(tmp_path, text), record=Path("runs.csv")), registry)

    return plan


def test_a_row_stays_and_the_table_says_what_it_lacks_and_how_to_get_it(elsewhere: Callable[..., SuitePlan]) -> None:
    before = Path("runs.csv").read_bytes()
    more = SUITE_WITH_WORST.replace("fgsm]", "cw20, fgsm]").replace("worst-case]", "worst-case, cw20]")
    plan = elsewhere(more)
    assert {(run.state, run.lacks) for run in plan.runs} == {("finished", ("cw20",))}
    assert plan.left == ()
    assert scores(plan, "pgd20") == [{0: 0.4, 1: 0.4}] * 2
    assert scores(plan, "cw20") == scores(plan, "worst-case") == [{}, {}]
    assert (
        "the record has no cw20 of seeds 0, 1: its mean is over the others. Run the suite with this record where the "
        "directories of these runs are, or remove their rows to run them again"
    ) in summarise(plan).cells[0].notes
    record_runs(plan.suite, plan.runs)
    assert Path("runs.csv").read_bytes() == before


def test_a_row_without_an_evaluator_the_suite_has_had_is_refused(elsewhere: Callable[..., SuitePlan]) -> None:
    """A digest does not say what else there was."""
    with pytest.raises(RunError, match="recorded with another recipe"):
        elsewhere(SUITE_WITH_WORST.replace("fgsm]", "{name: pgd, label: fgsm, steps: 3}]"))
    with pytest.raises(RunError, match="recorded with another recipe"):
        elsewhere(SUITE_WITH_WORST.replace("[natural, pgd20, fgsm]", "[natural, pgd20, cw20]"))


def test_a_row_is_written_anew_once_the_run_has_measured(elsewhere: Callable[..., SuitePlan]) -> None:
    plan = elsewhere(SUITE_WITH_WORST)
    results_of(plan.runs[0], natural=0.8, pgd20=0.4, fgsm=0.5, worst=0.3)
    more = SUITE_WITH_WORST.replace("fgsm]", "fgsm, cw20]").replace("worst-case]", "worst-case, cw20]")
    plan = elsewhere(more)
    assert [run.state for run in plan.left] == ["unmeasured"]
    record_runs(plan.suite, plan.runs)
    key = plan.left[0].key
    assert read_record(Path("runs.csv"))[key].values["cw20"] == 0.9  # not yet
    shutil.rmtree(plan.left[0].directory)
    results_of(plan.left[0], natural=0.8, pgd20=0.4, fgsm=0.5, cw20=0.35, worst=0.3)
    record_runs(plan.suite, plan.runs)
    row = read_record(Path("runs.csv"))[key]
    assert row.values == {"natural": 0.8, "pgd20": 0.4, "worst-case": 0.3, "cw20": 0.35}
    assert row.recipe == Digests.of(plan.left[0].experiment).now


LABELS = ("natural", "pgd20", "fgsm", "cw20")


@pytest.mark.parametrize(
    "then",
    [(), ("natural",), ("natural", "cw20"), ("pgd20", "fgsm"), LABELS],
    ids=lambda labels: "+".join(labels) or "none",
)
def test_a_digest_is_known_again_whatever_evaluators_were_added(then: Sequence[str]) -> None:
    digests = Digests.of(assembled(BASE, f"calfat.evaluators=[{', '.join(LABELS)}]"))
    before = Digests.of(assembled(BASE, f"calfat.evaluators=[{', '.join(then)}]")).now
    assert digests.added_since(before) == tuple(label for label in LABELS if label not in then)
    other = Digests.of(assembled(BASE, f"calfat.evaluators=[{', '.join(then)}]", "train_args.comm_round=3")).now
    assert digests.added_since(other) is None


def test_options_of_an_added_evaluator_do_not_hide_a_change_of_another() -> None:
    now = "calfat.evaluators=[natural, {name: pgd, steps: 5}, {name: pgd, label: pgd.long, steps: 50}]"
    digests = Digests.of(assembled(BASE, now))
    same = Digests.of(assembled(BASE, "calfat.evaluators=[natural, {name: pgd, steps: 5}]")).now
    other = Digests.of(assembled(BASE, "calfat.evaluators=[natural, {name: pgd, steps: 6}]")).now
    long_only = Digests.of(assembled(BASE, "calfat.evaluators=[natural, {name: pgd, label: pgd.long, steps: 50}]")).now
    other_long = Digests.of(assembled(BASE, "calfat.evaluators=[natural, {name: pgd, label: pgd.long}]")).now
    assert digests.added_since(same) == ("pgd.long",)
    assert digests.added_since(long_only) == ("pgd",)
    assert digests.added_since(other) is None
    assert digests.added_since(other_long) is None
