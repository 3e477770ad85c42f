"""What a run looks like on the console, live and plain."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from rich.cells import cell_len
from rich.console import Console

from calfat_plugin.cli import run
from calfat_plugin.cli.party import ResumeHint
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.observer import BatchProgress
from calfat_plugin.progress import Bars, Lines, ShownProgress
from calfat_plugin.report.run_tables import show_evaluations, show_final
from calfat_plugin.results import EvaluationResult, RoundRecord, RunInfo, RunResult
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request
from tests.report import made
from tests.report.made import experiment, idle
from tests.snapshot import TextSnapshot

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FakeTime:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("calfat_plugin.progress.time", SimpleNamespace(perf_counter=fake.perf_counter))
    return fake


def info(num_rounds: int = 40, start_round: int = 1) -> RunInfo:
    return RunInfo("digits", Path("runs/digits/0-1"), {}, num_rounds, start_round)


def result(label: str, accuracy: float, **settings: object) -> EvaluationResult:
    return EvaluationResult(label, 359, accuracy, accuracy / 2, (), (), settings, "ours", 1.25)


def record(round: int, *, refused: dict[int, str] | None = None, **accuracies: float) -> RoundRecord:
    return RoundRecord(
        round=round,
        clients=(0, 1),
        refused=refused or {},
        losses={0: 1.0, 1: 0.5},
        update_norms={},
        heterogeneity=0.0,
        evaluations={label: result(label, accuracy) for label, accuracy in accuracies.items()},
        seconds=2.0,
        bytes_down=0,
        bytes_up=0,
    )


def live(events: Callable[[ShownProgress], None], columns: int = 80) -> tuple[list[str], list[str]]:
    """(lines printed for good, lines of the last picture that was shown)."""
    stream = io.StringIO()
    # The file is no terminal, so say that it is one; nothing here depends on the machine's own.
    console = Console(file=stream, force_terminal=True, width=columns, height=24, _environ={}, highlight=False)
    # Without the thread that draws ten times a second: on a busy machine it may draw between a line and its end.
    with patch("rich.live._RefreshThread"), ShownProgress(Bars(console)) as progress:
        events(progress)
    until_end = stream.getvalue().rpartition("\x1b[?25h")[0]  # then come the cursor, and the bars are wiped away
    pictures = [ANSI.sub("", part).split("\n") for part in re.split(r"\x1b\[2K", until_end)]
    printed = [line for part in pictures for line in part if "━" not in line and not line.startswith("after round")]
    return [line.rstrip() for line in printed if line.strip()], [line.rstrip() for line in pictures[-1] if line.strip()]


def in_round_28(progress: ShownProgress, seconds: FakeTime) -> None:
    progress.run_started(info())
    for round in range(1, 28):
        progress.round_started(round, (0, 1, 2))
        seconds.now += 2.0
        progress.round_finished(record(round, natural=0.941, pgd20=0.708))
    progress.round_started(28, (0, 2, 4))
    progress.client_progress(BatchProgress(client=0, batch=5, num_batches=5, loss=0.5))
    progress.client_progress(BatchProgress(client=2, batch=1, num_batches=2, loss=1.1119))
    seconds.now += 0.5


def test_a_picture_of_a_round(seconds: FakeTime) -> None:
    _, picture = live(lambda progress: in_round_28(progress, seconds))
    bar = "━" * 24
    drawn = [re.sub("[━╸╺]{24}", bar, line) for line in picture]
    assert drawn == [
        f"run      {bar} 27/40 rounds  0:54  ETA 0:26",  # 13 rounds of 2 s, half a second into the first of them
        f"round 28 {bar} client 2 (2 of 3)  loss 1.112",
        "after round 27:  natural 94.1 %  pgd20 70.8 %  loss 0.750",
    ]
    filled = picture[1].split()[2].partition("╺")[0].rstrip("╸")
    assert len(filled) == 12  # one and a half of three clients
    seconds.now = 100.0
    _, picture = live(lambda progress: in_round_28(progress, seconds), columns=40)  # on a narrow one the figures stay
    assert picture == [
        "run      27/40 rounds  0:54  ETA 0:26",
        "round 28 client 2 (2 of 3)  loss 1.112",
        "after round 27:  natural 94.1 %  pgd20 …",
    ]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns: int, seconds: FakeTime) -> None:
    def events(progress: ShownProgress) -> None:
        progress.run_started(info(num_rounds=1500))
        for label in ("natural", "autoattack-standard-with-a-long-label"):
            progress.evaluation_progress(label, 100, 10_000, 50)
        many = {f"evaluator{number}": 0.5 for number in range(9)}
        progress.round_started(1000, range(100))
        seconds.now += 1e5
        progress.round_finished(record(1000, **many))
        progress.client_progress(BatchProgress(client=99, batch=1, num_batches=2, loss=12345.6789))

    _, picture = live(events, columns)
    assert len(picture) == 3
    assert max(map(cell_len, picture)) <= columns


def test_a_picture_before_the_run_and_at_its_end(seconds: FakeTime) -> None:
    _, picture = live(lambda progress: None)
    assert [line.split() for line in picture] == [["starting", "━" * 24]]

    def events(progress: ShownProgress) -> None:
        progress.run_started(info(num_rounds=1))
        progress.round_finished(record(1, natural=0.5))
        progress.evaluation_progress("pgd20", 100, 200, 31)

    _, picture = live(events)
    assert picture[0].endswith("1/1 rounds  0:00")
    assert picture[1].startswith("final ")
    assert picture[1].endswith(" pgd20 31.0 % right, 50 % done  ETA -:--")


def test_lines_above_the_bars(seconds: FakeTime) -> None:
    def events(progress: ShownProgress) -> None:
        progress.run_started(info(num_rounds=3, start_round=2))
        progress.warn("no GPU here")
        progress.round_finished(record(2, refused={1: "client 1: nan"}, natural=0.5))
        progress.round_finished(record(3))

    printed, _ = live(events)
    assert printed == [
        "digits: resuming at round 2 of 3 rounds in runs/digits/0-1",
        "warning: no GPU here",
        "round 2/3  natural 50.0 %  loss 0.750  refused 1  2.0 s  ETA 0:00",
        "round 2: refused client 1: nan",
        "round 3/3  loss 0.750  2.0 s  ETA 0:00",
    ]


@pytest.mark.parametrize(("num_rounds", "lines"), [(1, 1), (30, 30), (31, 16), (99, 20), (150, 30), (1501, 16)])
def test_a_run_of_any_length_leaves_a_screenful_of_lines(num_rounds: int, lines: int) -> None:
    def events(progress: ShownProgress) -> None:
        progress.run_started(info(num_rounds))
        for round in range(1, num_rounds + 1):
            progress.round_finished(record(round, natural=0.5))

    printed, _ = live(events)
    assert len(printed) == 1 + lines
    assert printed[-1].startswith(f"round {num_rounds}/{num_rounds} ")


def test_plain_lines(seconds: FakeTime, snapshot: TextSnapshot) -> None:
    out, err = io.StringIO(), io.StringIO()
    with ShownProgress(Lines(out, err)) as progress:
        progress.warn("no GPU here")
        progress.run_started(info(num_rounds=10))
        seconds.now += 4.0
        progress.round_finished(record(1, refused={3: "nan", 4: "inf"}, natural=0.8342, pgd20=0.5))
        seconds.now += 2.0
        progress.round_finished(record(2))
    assert err.getvalue() == "warning: no GPU here\n"
    snapshot(out.getvalue())
    for rounds in ((1, 1), (40, 7), (40, 41)):
        ShownProgress(Lines(begun := io.StringIO(), err)).run_started(info(*rounds))
        snapshot(begun.getvalue())


def test_what_takes_long_says_a_plain_line_every_half_minute(seconds: FakeTime, snapshot: TextSnapshot) -> None:
    out = io.StringIO()
    with ShownProgress(Lines(out, out)) as progress:
        progress.run_started(info(num_rounds=2))
        progress.round_started(1, (0, 2, 4))
        for batch in range(1, 6):
            seconds.now += 11.0
            progress.client_progress(BatchProgress(client=2, batch=batch, num_batches=5, loss=1.5))
        seconds.now += 1.0
        progress.evaluation_progress("pgd20", 100, 359, 50)  # not yet half a minute after the last line
        seconds.now += 29.0
        progress.evaluation_progress("autoattack", 718, 1436, 359)
        seconds.now += 31.0
        progress.evaluation_progress("autoattack", 1436, 1436, 359)  # done: the table says so
        progress.round_finished(record(1))
    snapshot(out.getvalue())


def test_results_table_says_how_each_number_was_made() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, _environ={})
    evaluations = (result("natural", 0.9632), result("pgd20", 0.7345, norm="linf", eps="8/255"))
    show_evaluations(console, evaluations, "final")
    table = stream.getvalue()
    rows = [re.split(r"\s*│\s*", line.rstrip()) for line in table.splitlines() if "│" in line]
    assert table.startswith("final")
    assert rows == [
        ["natural", "96.32", "[93.8, 97.8]", "48.16", "359", "1.2"],
        ["pgd20", "73.45", "[68.7, 77.8]", "36.73", "359", "1.2"],
        ["linf, eps 8/255", "", "", "", "", ""],
    ]
    assert max(map(cell_len, table.splitlines())) <= 80


def test_figures_are_lines_below_the_table() -> None:
    attacked = dataclasses.replace(
        result("pgd20", 0.5, norm="linf", eps="8/255"), metrics={"ece": 0.125, "margin_mean": 2.0}
    )
    stream = io.StringIO()
    show_evaluations(Console(file=stream, width=100, _environ={}), [attacked, result("natural", 0.5)])
    assert stream.getvalue().splitlines(keepends=True)[-1] == "pgd20 linf, eps 8/255: ece 0.125, margin mean 2\n"


def test_brackets_in_the_path_of_a_run_and_in_a_label_are_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = RunResult((result("pgd[/x]", 0.5),), 1, 1.0)
    monkeypatch.setattr("calfat_plugin.runs.session.run", lambda *_: done)
    directory = RunDirectory(tmp_path / "with[l2]:dog:")
    run._run(Request(experiment(), None, False, []), directory, True, ResumeHint([], False))
    out = capsys.readouterr().out
    assert "pgd[/x]" in out
    assert f"\nresults: {directory.path}\n" in out


def test_a_final_evaluation_shows_its_table_the_worst_classes_and_clients_and_what_is_suspicious() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, _environ={})
    natural = dataclasses.replace(result("natural", 0.5, attack="none"), per_class=(0.75, 0.25))
    results = [natural, result("pgd20", 0.75, attack="pgd", norm="linf", eps="8/255")]
    show_final(console, results, find_alarms(results))
    title, *rest = stream.getvalue().splitlines()
    assert title.strip() == "model after the final round, test split"
    found = rest.index(next(line for line in rest if "Worst classes and clients" in line))
    natural = next(line for line in rest[found:] if line.startswith("natural"))
    assert re.split(r"\s*│\s*", natural.strip())[:4] == ["natural", "50.00", "25.00", "1"]
    after = rest[[number for number, line in enumerate(rest) if "│" in line][-1] + 1 :]
    assert after[0] == "1 finding about these numbers:"
    assert after[1].startswith("  robust-above-natural: pgd20 (linf 8/255) counts 75.0 % right")
    assert len(after) == 2
    stream.truncate(stream.seek(0))
    show_final(console, [], [])  # such as of a choice run of a suite, which must never see the test split
    assert stream.getvalue() == "no final evaluation: calfat.evaluators is empty\n"


def test_the_accuracy_as_the_release_counts_is_shown_where_it_is_another_one() -> None:
    alike = dataclasses.replace(result("natural", 0.5), accuracy_release=0.5)
    other = result("pgd20", 0.25)
    for results, shown in (([alike], False), ([alike, other], True)):
        stream = io.StringIO()
        show_evaluations(Console(file=stream, width=100, _environ={}), results)
        assert ("release %" in stream.getvalue()) is shown
        assert stream.getvalue().count("50.00") == 1 + shown


def test_an_attack_that_did_not_run_has_a_word_and_no_number() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, _environ={})
    results = [result("natural", 0.9, attack="none"), idle("apgd-t")]
    show_final(console, results, find_alarms(results))
    shown = stream.getvalue()
    row = next(line for line in shown.splitlines() if line.startswith("apgd-t"))
    assert re.split(r"\s*│\s*", row.strip()) == ["apgd-t", "not run", "", "\N{EN DASH}", "0", "0.0"]
    assert "  not-run: apgd-t did not run, so it has no number: its loss needs 4 classes, and there are 3.\n" in shown


def test_the_worst_class_has_its_name() -> None:
    stream = io.StringIO()
    natural = dataclasses.replace(result("natural", 0.5), per_class=(0.75, 0.25))
    show_final(Console(file=stream, width=100, _environ={}), [natural], (), ("cat", "dog"))
    line = [line for line in stream.getvalue().splitlines() if line.startswith("natural")][-1]
    assert re.split(r"\s*│\s*", line.strip())[:4] == ["natural", "50.00", "25.00", "dog"]


def test_a_monitored_attack_that_does_not_run_is_a_warning_once(seconds: FakeTime) -> None:
    out = io.StringIO()
    with ShownProgress(Lines(out, out)) as progress:
        progress.run_started(info(num_rounds=2))
        for number in (1, 2):
            progress.round_finished(made.record(number, {"natural": 0.5, "apgd-t": None}))
    shown = out.getvalue()
    assert shown.count("apgd-t did not run: its loss needs 4 classes, and there are 3") == 1
    assert shown.count("natural 50.0 %  apgd-t not run  loss") == 2
