"""``train_args.patience``: a run ends when the validation accuracy no longer rises, in the same round everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import calfat_plugin
from calfat_plugin.errors import RecipeError, RunError
from calfat_plugin.experiment import Experiment, same_but_rounds
from calfat_plugin.federation.early_stopping import Patience, is_more_patient
from calfat_plugin.federation.server import Server
from calfat_plugin.host.executors import Workers
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe import read_document
from calfat_plugin.results import EarlyStop, RoundRecord
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request, checked_experiment
from calfat_plugin.runs.session import run
from calfat_plugin.testing import builtin_registry
from calfat_plugin.testing.tiny import tiny_experiment
from tests.cli.runner import calfat
from tests.runs.remains import rows

#: An evaluator whose accuracy over the rounds is written in it; in the final evaluation, whose round is 0, it is 0.3.
SCRIPTED = """
from calfat_plugin import EvaluatorEntry, Evaluator, hookimpl
from calfat_plugin.results import EvaluationResult

COURSE = [0.3, 0.4, 0.6, 0.5, 0.6, 0.2, 0.7, 0.1, 0.1, 0.1]

class Scripted(Evaluator):
    has_budget = gives_examples = False

    def __init__(self, options):
        pass

    def evaluate(self, task, label):
        accuracy = COURSE[task.round]
        found = [None] * task.num_classes
        return EvaluationResult(label, len(task.data), accuracy, accuracy, found, found, {}, "a test", 0.0)

@hookimpl
def calfat_evaluators():
    yield EvaluatorEntry("scripted", build=Scripted)
"""
RECIPE = {
    "common_args": {"training_type": "simulation", "random_seed": 0},
    "data_args": {"dataset": "digits", "validation_share": 0.1, "max_train_examples": 60, "max_test_examples": 20},
    "model_args": {"model": "cnn_small"},
    "train_args": {"client_num_in_total": 2, "comm_round": 8, "batch_size": 64, "learning_rate": 0.05, "patience": 3},
    "calfat": {
        "trainer": "standard",
        "evaluators": ["natural"],
        "monitor": {"evaluators": ["natural", "scripted"]},
        "evaluation": {"evidence_mb": 0},
        "runtime": {"threads": 1},
    },
}
STOP = EarlyStop(round=5, patience=3, evaluator="scripted", best_round=2, accuracy=0.6)
SAID = (
    "stopped early after round 5: 3 evaluations in a row had no higher validation accuracy of scripted than round 2 "
    "with 60.0 % (train_args.patience)"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/scripted.py").write_text(SCRIPTED)
    Path("short.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


class Seen(RunObserver):
    def __init__(self) -> None:
        self.rounds: list[int] = []

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)


def asked(*sets: str) -> Experiment:
    return checked_experiment(read_document("short.yaml"), sets, plugins=[Path("mine/scripted.py")])


def go(run_dir: str, *sets: str, workers: int = 0, resume: bool = False) -> tuple[Path, list[int]]:
    """Run the recipe; returns (directory, the rounds that were done now)."""
    request = Request(asked(*sets), Path(run_dir), resume, [], workers=workers, page=False)
    seen = Seen()
    run(request, RunDirectory.open(request), seen)
    return Path(run_dir), seen.rounds


def weights(directory: Path) -> bytes:
    return (directory / "checkpoints" / "last.safetensors").read_bytes()


def results(directory: Path) -> dict[str, object]:
    read: dict[str, object] = json.loads((directory / "results.json").read_text())
    return read


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("course", "patience", "every", "rounds", "stops_after"),
    [
        ([0.4, 0.6, 0.5, 0.6, 0.2, 0.7], 3, 1, 20, 5),  # as good as the best is no better
        ([0.4, 0.6, 0.5, 0.6, 0.7, 0.2], 3, 1, 20, None),
        ([0.4, 0.3], 1, 1, 20, 2),
        ([0.0, 0.0, 0.0], 2, 1, 20, 3),  # the first evaluation is the best so far, whatever it is
        ([0.6, 0.7, 0.6, 0.1, 0.5, 0.1], 2, 2, 20, 6),  # of rounds that are evaluated, 2 is the best
        ([0.9, 0.6, 0.8, 0.5], 2, 2, 20, None),  # rounds 1 and 3 do not count, nor are they two evaluations
        ([0.4, 0.3], 1, 1, 2, None),  # the last round ends training anyway
        ([0.4, 0.3], None, 1, 20, None),
    ],
)
def test_it_stops_when_so_many_evaluations_are_no_higher(
    course: Sequence[float], patience: int | None, every: int, rounds: int, stops_after: int | None
) -> None:
    experiment = tiny_experiment(
        builtin_registry(),
        data_args={"validation_share": 0.2},
        train_args={"patience": patience, "comm_round": rounds},
        monitor={"every": every, "evaluators": ["natural"]},
    )
    patient = Patience(experiment)
    decided = []
    for number, accuracy in enumerate(course, 1):
        may_end = patient.may_end_with(number)
        patient.add(number, accuracy)
        decided += [number] if patient.stop is not None else []
        assert may_end or patient.stop is None or patient.stop.round < number
    assert decided[:1] == ([] if stops_after is None else [stops_after])
    assert (patient.stop and patient.stop.round) == stops_after


def test_who_is_more_patient() -> None:
    asked = [is_more_patient(*pair) for pair in [(4, 3), (None, 3), (3, 3), (2, 3), (5, None), (None, None)]]
    assert asked == [True, True, False, False, False, False]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_that_stops_early_says_so_and_is_that_of_as_many_rounds(folder: Path) -> None:
    stopped, rounds = go("stopped")
    assert rounds == [1, 2, 3, 4, 5]
    whole, _ = go("whole", "train_args.patience=null", "train_args.comm_round=5")
    assert weights(stopped) == weights(whole)
    found, other = results(stopped), results(whole)
    assert found["stopped_early"] == vars(STOP)
    assert (found["rounds"], other["rounds"], "stopped_early" in other) == (5, 5, False)
    assert found["model"] == "global model after the final round, with which training stopped early: round 5"
    assert found["validation_selected"]["best-robust"]["round"] == 2  # type: ignore[index]
    measured = [found["evaluations"], other["evaluations"]]
    assert measured[0][0]["accuracy"] == measured[1][0]["accuracy"]  # type: ignore[index]  # of the last model
    loaded = calfat_plugin.load_run(stopped)
    assert (loaded.stopped_early, str(loaded.stopped_early)) == (STOP, SAID)
    assert SAID in repr(loaded)
    assert calfat_plugin.load_run(whole).stopped_early is None


def test_workers_stop_in_the_same_round_and_train_no_further_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[int] = []
    submit = Workers.submit

    def noted(self: Workers, round: int, *rest: object) -> None:
        submitted.append(round)
        submit(self, round, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Workers, "submit", noted)
    parallel, rounds = go("parallel", workers=2)
    alone, _ = go("alone")
    assert (rounds, submitted) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert weights(parallel) == weights(alone)


def test_a_run_that_stopped_early_does_nothing_more_and_goes_on_with_more_patience(folder: Path) -> None:
    go("run")
    with pytest.raises(RunError, match=rf"this run is finished: it {SAID[:60]}.*--set train_args.patience=8"):
        go("run", resume=True)
    with pytest.raises(RunError, match=r"5 rounds are done, and with train_args.patience=1 .* after round 3"):
        go("run", "train_args.patience=1", resume=True)
    assert results(Path("run"))["rounds"] == 5
    _, rounds = go("run", "train_args.patience=4", resume=True)
    assert rounds == [6, 7, 8]
    whole, _ = go("whole", "train_args.patience=4")
    assert (weights(Path("run")), len(rows(Path("run")))) == (weights(whole), 8)
    assert "stopped_early" not in results(Path("run"))


def test_the_newest_run_is_resumed_only_with_more_patience(folder: Path) -> None:
    experiments = [
        checked_experiment(
            read_document("short.yaml"), [f"train_args.patience={patience}"], plugins=["mine/scripted.py"]
        )
        for patience in ("3", "4", "null")
    ]
    go("runs/short/0-1")
    with pytest.raises(RunError, match="no unfinished run with seed 0"):
        RunDirectory.latest_unfinished(experiments[0])
    for experiment in experiments[1:]:
        assert RunDirectory.latest_unfinished(experiment).path == Path("runs/short/0-1")


def test_a_run_that_is_killed_in_its_final_evaluation_only_evaluates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def killed(self: Server, scratch: Path | None = None) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Server, "final_evaluation", killed)
        with pytest.raises(KilledError):
            go("run")
    at_end, rounds = go("run", resume=True)
    assert (rounds, results(at_end)["stopped_early"]) == ([], vars(STOP))


def test_console_and_page_say_it(folder: Path) -> None:
    done = calfat("run", "short.yaml", "--plugin", "mine/scripted.py", "--run-dir", "run", "--plain")
    assert done.code == 0, done.out + done.err
    assert f"\n{SAID}\n" in done.out
    assert "model after round 5, where training stopped early, test split" in done.out
    assert "round 6/8" not in done.out
    page = Path("run/report.html").read_text()
    assert f"Training {SAID}" in page
    assert "Global model after round 5, where training stopped early." in page


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (
            ["data_args.validation_share=0"],
            r"got 3, but there is no validation split, .* Set data_args.validation_share",
        ),
        (["calfat.monitor.evaluators=[]"], r"got 3, but nothing is measured during the run .*Name an evaluator there"),
        (["train_args.patience=0"], r"got 0 \(int\), expected a whole number, >= 1"),
    ],
)
def test_a_patience_that_cannot_be(folder: Path, sets: list[str], told: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"^(short\.yaml:28|--set train_args\.patience=0): train_args\.patience: {told}"
    ):
        asked(*sets)


def test_a_patience_that_outlasts_the_rounds_draws_a_warning(folder: Path) -> None:
    for patience, number in ((6, 0), (7, 1)):
        experiment = asked(f"train_args.patience={patience}")
        assert len([text for text in experiment.warnings if "train_args.patience: no effect" in text]) == number


def test_another_patience_leaves_the_finished_rounds_as_they_are(folder: Path) -> None:
    """Also with a schedule: it goes by ``comm_round``, however early the run stops."""
    made = [asked("train_args.lr_schedule=cosine", f"train_args.patience={patience}") for patience in (3, 5)]
    assert same_but_rounds(*(experiment.as_run() for experiment in made)) == []
    assert [experiment.train_settings(4).num_rounds for experiment in made] == [8, 8]
    assert made[0].train_settings(4).learning_rate == made[1].train_settings(4).learning_rate
