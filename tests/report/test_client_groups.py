"""Groups of clients on pages: who they are, what differs, their means; comparisons know that they differ."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.progress import Lines, ShownProgress
from calfat_plugin.report import write_run_report
from calfat_plugin.report.comparison import group_runs
from calfat_plugin.report.labels import difference, highlights, problem_names
from calfat_plugin.report.run_page import run_page
from calfat_plugin.report.run_tables import groups_table, members, ranges, with_groups
from calfat_plugin.report.scores import problem_of
from calfat_plugin.results import RunInfo, evaluation_as_json
from calfat_plugin.stored_run import Run
from tests.cli.runner import calfat
from tests.report.made import COUNTS, RECIPE, change_json, experiment, made_run
from tests.snapshot import TextSnapshot

GROUPS = (
    "train_args.client_num_in_total=6",
    "calfat.clients=[{name: liars, ids: [1, 4], attacker: {name: sign_flip, scale: 5}}, "
    "{name: weak, share: 0.34, trainer: {name: fedpgd, loss: logitadj}, threat: {eps: 0.05}, epochs: 2}]",
)
MEANS = {
    "group/liars/loss": 2.5,
    "group/liars/update_norm": 7.0,
    "group/liars/update_cosine": -0.75,
    "group/weak/loss": 1.25,
    "group/others/loss": 0.5,
    "group/others/update_norm": 0.125,
}


def grouped(folder: Path, *overrides: str, **how: Any) -> Run:
    path = made_run(
        folder / "run", *GROUPS, *overrides, final={"natural": 0.5}, counts=[COUNTS[0]] * 6, metrics=MEANS, **how
    )
    change_json(path / "partition.json", groups={"liars": [1, 4], "weak": [2, 3]}, attackers=[1, 4])
    return Run.load(path)


def test_the_table_has_who_differs_in_what(tmp_path: Path) -> None:
    run = grouped(tmp_path)
    assert members(run) == {"liars": [1, 4], "weak": [2, 3], "others": [0, 5]}
    found = [
        (name.text, *name.beside, [number.text for number in numbers]) for name, *numbers in groups_table(run).cells
    ]
    assert found == [
        ("liars, attackers", "ids [1, 4] · attacker sign_flip · attacker.scale 5.0", ["1, 4", "2.5", "7", "-0.75"]),
        (
            "weak",
            "share 0.34 · epochs 2 · trainer fedpgd · trainer.loss logitadj · trainer.loss.tau 1.0 · "
            "trainer.loss.calibrate_inner false · threat.eps 0.05",
            ["2-3", "1.25", "", ""],
        ),
        ("others", "as the recipe says", ["0, 5", "0.5", "0.125", ""]),
    ]
    assert with_groups(run) == ("0", "1 (liars)", "2 (weak)", "3 (weak)", "4 (liars)", "5")


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3"), (range(9), "0-8")]
)
def test_ids_are_ranges_as_in_recipes(ids: Any, text: str) -> None:
    assert ranges(ids) == text


@pytest.mark.usefixtures("no_figures")
def test_the_page_marks_attackers_and_the_groups_of_the_worst_clients(tmp_path: Path) -> None:
    run = grouped(tmp_path)
    results = evaluation_as_json(run.evaluations[0]) | {"worst_clients": {"accuracy": 0.25, "ids": [2, 5]}}
    change_json(run.directory / "results.json", evaluations=[results])
    (tmp_path / "figures").mkdir()
    page = run_page(Run.load(run.directory), tmp_path / "figures")
    own = "ids [1, 4] · attacker sign_flip · attacker.scale 5.0"
    assert f'<th scope="row">liars, attackers<span class="beside">{own}</span></th>' in page
    assert '<td class="number">2 (weak), 5</td>' in page
    assert "Attackers (clients 1, 4) are left out." in page


@pytest.mark.usefixtures("no_figures")
def test_a_run_without_groups_has_no_such_rows(tmp_path: Path) -> None:
    run = Run.load(made_run(tmp_path / "run", final={"natural": 0.5}))
    assert (members(run), groups_table(run).rows, with_groups(run)) == ({}, [], ())
    page = (write_run_report(run.directory)).read_text()
    assert "Groups of clients" not in page
    assert "are left out" not in page
    assert "calfat.clients" not in highlights(run)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("{ids: 0, batch_size: 8, learning_rate: 0.5}", "batch_size 8 · learning_rate 0.5 · ids [0]"),
        ("{ids: 0, local_steps: 3}", "local_steps 3 · ids [0]"),
        ("{ids: 0, trainer: standard}", "ids [0] · trainer standard · trainer.loss plain"),
        (
            "{ids: 0, attacker: ipm, trainer: fedpgd}",
            "ids [0] · trainer fedpgd · trainer.loss plain · attacker ipm · attacker.epsilon 0.5",
        ),
        ("{ids: 0, threat: {eps: 4/255, steps: 7}}", "ids [0] · threat.eps 4/255 · threat.steps 7"),
        ("{ids: 0, threat: {inner: pgd, eps: 0.05}}", "ids [0] · threat.eps 0.05"),
        (
            "{ids: 0, threat: {inner: n-fgsm}}",
            "ids [0] · threat.inner n-fgsm · threat.inner.noise 2.0 · threat.inner.step 1.0",
        ),
    ],
)
def test_differences_are_keys_of_the_group(group: str, words: str) -> None:
    run = experiment(f"calfat.clients=[{group}]")
    assert difference(run.clients[0], run) == words


def test_runs_of_other_groups_are_told_apart_and_do_not_compare(tmp_path: Path) -> None:
    clients = (
        "[]",
        "[{ids: 0, attacker: ipm}]",
        "[{ids: 0, attacker: alie}]",
        "[{ids: 0, threat: {eps: 0.05}}]",
        "[{ids: 0, trainer: standard}]",
    )
    runs = [
        Run.load(made_run(tmp_path / str(index), f"calfat.clients={each}", final={"natural": 0.5}))
        for index, each in enumerate(clients)
    ]
    problems = problem_names([problem_of(run.settings) for run in runs])
    assert problems == [
        "calfat.clients null",
        "calfat.clients [{name: group1, ids: [0], attacker: {name: ipm, epsilon: 0.5}}]",
        "calfat.clients [{name: group1, ids: [0], attacker: {name: alie, z: null}}]",
        "calfat.clients [{name: group1, ids: [0], threat: {norm: linf, eps: 0.05, step_size: eps/2, steps: 2}}]",
        "calfat.clients null",  # by what a group trains is a method
    ]
    names = [group.name for group in group_runs(runs)]
    assert len(set(names)) == len(clients)
    assert names[0] == "calfat.clients []"
    assert names[-1] == "calfat.clients [{name: group1, ids: [0], trainer: {name: standard, loss: {name: plain}}}]"


def test_check_and_the_console_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    changes = [word for override in GROUPS for word in ("--set", override)]
    ended = calfat("check", "r.yaml", *changes)
    snapshot(ended.out)
    assert "Groups" not in calfat("check", "r.yaml").out
    said = io.StringIO()
    with ShownProgress(Lines(said, io.StringIO())) as progress:
        progress.run_started(RunInfo("r", Path("run"), experiment(*GROUPS).as_run(), num_rounds=4, start_round=1))
    assert said.getvalue() == "r: running 4 rounds in run; groups of clients: liars (attackers), weak\n"
