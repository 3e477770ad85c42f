"""``rounds.jsonl`` and the tables beside it, written and read in this process."""

from __future__ import annotations

import dataclasses
import json
import locale
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.federation.outliers import alarms_of
from calfat_plugin.results import EarlyStop, RoundRecord
from calfat_plugin.rounds import RoundCount, RoundsFile, number_of_rounds, read_rounds
from calfat_plugin.rounds_csv import RoundTables
from tests.report.made import evaluation, idle, record
from tests.runs.remains import read_rows
from tests.snapshot import TextSnapshot

# Of client 0 nothing is known; client 1 has both classes, and client 2 only the better one.
OF_TWO_CLASSES = dataclasses.replace(
    evaluation("natural", 0.5), per_class=(0.5, 0.25), accuracy_release=0.51
).with_worst_clients([[0, 0], [2, 2], [4, 0]])
AGAIN = "Restore the file from a copy, or start the run again in another directory."


@pytest.fixture
def plain_locale() -> Iterator[None]:
    """A system whose own encoding is ASCII."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def of_three_clients(round: int, **changed: object) -> RoundRecord:
    """Client 1 was refused, and client 2 raised two alarms."""
    found: dict[str, object] = {
        "clients": (0, 2),
        "refused": {1: "client 1: 1 <\n \u221e", 7: "lost"},
        "losses": {0: 0.5, 2: 1 / 3},
        "update_norms": {0: 0.25, 2: 2.0},
        "heterogeneity": 0.125,
        "seconds": 2.25,
        "alarms": ("long", "longer"),
        "peak_memory_mb": None,
        **changed,
    }
    return dataclasses.replace(record(round, {"natural": 0.5}), **found)  # type: ignore[arg-type]


def rounds_file(path: Path, *metrics: str, clients: int = 3) -> RoundsFile:
    return RoundsFile(path / "rounds.jsonl", RoundTables(path, ["natural"], clients, metrics))


def written(path: Path, *records: RoundRecord) -> RoundsFile:
    file = rounds_file(path)
    for one in records:
        file.append(one)
    return file


FULL = of_three_clients(
    1,
    peak_memory_mb=812.5,
    learning_rate=0.05,
    evaluations={"natural": OF_TWO_CLASSES, "pgd20": idle("pgd20")},
    num_examples={0: 30, 2: 20},
    weights={0: 0.6, 2: 0.4},
    update_cosines={0: 0.75, 2: -0.5},
    losses={0: math.inf, 2: -1e300},
    metrics={"train/margin": 3.0, "pgd20/ece": 1 / 3},
    stop=EarlyStop(1, 2, "natural", 1, 0.5),
)


@pytest.mark.usefixtures("plain_locale")
def test_a_round_is_read_back_as_the_record_that_it_was(tmp_path: Path) -> None:
    second = of_three_clients(2, evaluations={}, refused={}, alarms=())
    file = written(tmp_path, FULL, second)
    assert read_rounds(file.path) == [FULL, second]
    with file.path.open("a") as end:
        end.write('{"round": 3, "cli')  # half a line, of a round that no checkpoint has
    assert read_rounds(file.path) == [FULL, second]
    assert number_of_rounds(file.path) == 2
    for last in (2, 1, 0):
        file.rewrite([FULL, second][:last])
        assert read_rounds(file.path) == [FULL, second][:last]


def test_rounds_are_counted_while_they_are_written(tmp_path: Path) -> None:
    """A line that was counted is not read again, and one that a resumed run has dropped does not count."""
    path = tmp_path / "rounds.jsonl"
    count = RoundCount(path)
    assert count.now() == 0
    file = written(tmp_path, FULL)
    assert count.now() == 1
    text = path.read_text()
    path.write_text("x" * (len(text) - 1) + "\n")  # read again, it would count as well; what follows is added
    with path.open("a") as end:
        end.write("half a line")
    assert count.now() == 1
    with path.open("a") as end:
        end.write(", and its end\n")
    assert count.now() == 2
    path.write_text("a\nb\nc\n")  # shorter than before
    assert count.now() == 3
    path.unlink()
    assert (count.now(), number_of_rounds(file.path)) == (0, 0)


def test_a_number_that_is_none_is_read_back(tmp_path: Path) -> None:
    file = written(tmp_path, of_three_clients(1, heterogeneity=math.nan))
    assert math.isnan(read_rounds(file.path)[0].heterogeneity)


def test_a_round_of_a_newer_version_is_read(tmp_path: Path) -> None:
    """It has numbers that this version does not know, and lacks those that are new here."""
    file = written(tmp_path, of_three_clients(1))
    content = json.loads(file.path.read_text())
    del content["passes"], content["weights"]
    file.path.write_text(json.dumps({**content, "warmth": 0.5}) + "\n")
    assert read_rounds(file.path) == [of_three_clients(1)]


def test_a_run_of_an_earlier_version_is_refused_with_what_it_needs(tmp_path: Path, snapshot: TextSnapshot) -> None:
    (tmp_path / "rounds.csv").write_text("round,natural\n1,0.5\n")
    with snapshot.raises(RunError):
        read_rounds(tmp_path / "rounds.jsonl")
    (tmp_path / "environment.json").write_text('{"versions": {"calfat-plugin": "0.1.0"}}')
    with snapshot.raises(RunError):
        read_rounds(tmp_path / "rounds.jsonl")


@pytest.mark.usefixtures("plain_locale")
def test_a_row_holds_all_that_a_round_found_on_one_line(tmp_path: Path, snapshot: TextSnapshot) -> None:
    natural_alone = {"natural": OF_TWO_CLASSES}
    losses = {0: 0.5, 2: 1 / 3}
    first = dataclasses.replace(FULL, evaluations=natural_alone, losses=losses, metrics={}, stop=None)
    written(tmp_path, first, of_three_clients(2, evaluations={}, refused={}, alarms=()))
    table = tmp_path / "rounds.csv"
    snapshot(table.read_bytes().decode())
    one, other = read_rows(table)
    assert (one["refused"], one["natural"], other["natural"]) == ("1: client 1: 1 < \u221e; 7: lost", "0.5", "")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"seconds": 2.25', '"seconds": NaN', "seconds is nan"),
        ('"seconds": 2.25', '"seconds": -1', "seconds is -1"),
        ('"seconds": 2.25', '"seconds": 1e308', "seconds is 1e+308"),
        ('"seconds": 2.25', '"seconds": "2.2s"', "seconds is '2.2s' (text), expected a number"),
        ('"seconds": 2.25, ', "", "the file has no 'seconds'"),
        ('"update_norms": {"0": 0.25', '"update_norms": {"0": true', "update_norms.0 is true (true/false), expected a"),
        ('"update_norms": {"0": 0.25', '"update_norms": {"zero": 0.25', "update_norms.zero is named by a text, expec"),
        ('"clients": [0, 2]', '"clients": [0, "two"]', "clients[1] is 'two' (text), expected a whole number"),
        ('"clients": [0, 2]', '"clients": 2', "clients is 2 (int), expected a list"),
        (
            '"accuracy": 0.5,',
            '"accuracy": "half",',
            "evaluations.natural.accuracy is 'half' (text), expected a number",
        ),
        ('{"round": 2', '{"round": 2.5', "round is 2.5 (float), expected a whole number"),
        ('{"round": 2', '["round"', "Expecting ',' delimiter"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, old: str, new: str, reason: str) -> None:
    file = written(tmp_path, *(of_three_clients(number) for number in (1, 2, 3)))
    first, second, third = file.path.read_text().splitlines(keepends=True)
    assert old in second
    file.path.write_text(first + second.replace(old, new, 1) + third)
    with pytest.raises(RunError) as error:
        read_rounds(file.path)
    assert str(error.value).startswith(f"{file.path}: line 2 is damaged ({reason}")
    assert str(error.value).endswith(AGAIN)


def test_a_resumed_run_writes_its_tables_anew(tmp_path: Path) -> None:
    """Whatever columns they had, and whether or not they are there."""
    file = written(tmp_path, of_three_clients(1))
    table = tmp_path / "rounds.csv"
    before = table.read_text(encoding="utf-8")
    table.write_text(before.replace("loss_1", "other"), encoding="utf-8")
    file.rewrite(read_rounds(file.path))
    assert table.read_text(encoding="utf-8") == before
    table.unlink()
    rounds_file(tmp_path).rewrite(read_rounds(file.path))
    assert table.read_text(encoding="utf-8") == before


def test_a_table_that_somebody_changed_is_written_anew(tmp_path: Path) -> None:
    file = written(tmp_path, of_three_clients(1))
    table = tmp_path / "rounds.csv"
    for number, change in ((2, Path.unlink), (3, lambda path: path.write_text("mine"))):
        change(table)
        file.append(of_three_clients(number))
        assert [row["round"] for row in read_rows(table)] == [str(round) for round in range(1, number + 1)]


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{}\n")], ids=["removed", "cut"])
def test_no_round_is_added_to_a_file_without_the_rounds_before_it(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Somebody may tidy up while a run lasts; its first rounds would be missing, and nobody would know."""
    file = written(tmp_path, of_three_clients(1))
    file.append(of_three_clients(2))
    assert number_of_rounds(file.path) == 2
    change(file.path)
    assert number_of_rounds(file.path) < 2
    with pytest.raises(
        RunError, match=r"rounds\.jsonl: was removed or changed while the run writes it: it has [03] bytes"
    ):
        file.append(of_three_clients(3))


def test_what_plugins_measure_has_its_columns(tmp_path: Path) -> None:
    file = rounds_file(tmp_path, "distance", "kept")
    file.append(of_three_clients(1, metrics={"distance": 1 / 3, "kept": 2.0}))
    file.append(of_three_clients(2))
    rows = read_rows(tmp_path / "rounds.csv")
    assert [(row["distance"], row["kept"]) for row in rows] == [("0.3333333333333333", "2.0"), ("", "")]


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, snapshot: TextSnapshot) -> None:
    path = written(tmp_path, of_three_clients(1)).path
    path.write_bytes(b"round,\xff\n")
    with pytest.raises(RunError, match=r"rounds\.jsonl: cannot be read \('utf-8' codec can't decode byte 0xff"):
        read_rounds(path)
    path.unlink()
    path.mkdir()
    with snapshot.raises(RunError):
        read_rounds(path)


def test_alarms_of_all_rounds_are_one_finding() -> None:
    assert alarms_of([]) == ()
    advice = "Such an update can replace the model: look at that client's data, learning rate and intentions."
    rounds = [of_three_clients(1, alarms=())]
    assert alarms_of(rounds) == ()
    rounds += [
        of_three_clients(2, alarms=("large-update: that of client 1 is 2", "large-update: that of client 12 is 3")),
        of_three_clients(3, alarms=("large-update: that of client 1 is 4",)),
    ]
    quoted = "2 rounds, the last of them 3: that of client 1 is 4; round 2: that of client 12 is 3"
    assert alarms_of(rounds) == (Alarm("large-update", f"{quoted}. {advice}", ()),)
    rounds.append(of_three_clients(4, alarms=tuple(f"large-update: that of client {who} is 5" for who in range(2, 7))))
    (alarm,) = alarms_of(rounds)
    assert alarm.text.startswith(f"{quoted}; round 4: that of client 2 is 5; ")
    assert alarm.text.endswith(f"round 4: that of client 4 is 5 (and 2 more in rounds.csv). {advice}")


def test_alarms_of_each_kind_are_one_finding() -> None:
    large, dominant = "large-update: the update of client 1", "dominant-client: client 1 has all"
    rounds = [of_three_clients(1, alarms=(large, dominant)), of_three_clients(2, alarms=(dominant,))]
    assert [(alarm.code, alarm.text.partition(". ")[0]) for alarm in alarms_of(rounds)] == [
        ("large-update", "round 1: the update of client 1"),
        ("dominant-client", "2 rounds, the last of them 2: client 1 has all"),
    ]


# --- more than ten clients --------------------------------------------------------------------------------------------


def of_many(path: Path, *, clients: int = 11) -> RoundsFile:
    """Three rounds of clients 0 and 10, but the second, of client 2."""
    file = rounds_file(path, clients=clients)
    both = {0: 0.5, 10: 1 / 3}
    some = {"losses": both, "update_norms": both, "clients": (0, 10), "refused": {}, "alarms": ()}
    file.append(of_three_clients(1, **some, num_examples={0: 30, 10: 7}, weights={10: 1.0}))
    file.append(of_three_clients(2, clients=(2,), losses={2: math.nan}, update_norms={2: 2.0}, refused={}))
    file.append(of_three_clients(3, **some))
    return file


def test_many_clients_have_a_file_of_their_own(tmp_path: Path, snapshot: TextSnapshot) -> None:
    file = of_many(tmp_path)
    assert file.paths == [tmp_path / name for name in ("rounds.jsonl", "clients.csv", "rounds.csv")]
    snapshot("".join(path.read_text() for path in file.tables.paths))


@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("torn", ["", "4,0,loss,0.5\n4,0,update_", "4,0,lo\n"])
def test_the_file_of_clients_ends_with_the_round_of_the_checkpoint(tmp_path: Path, last: int, torn: str) -> None:
    """A crash before the row leaves what its clients have, or half of it."""
    file = of_many(tmp_path)
    clients, _ = file.tables.paths
    whole = clients.read_text()
    with clients.open("a") as end:
        end.write(torn)
    file.rewrite(read_rounds(file.path)[:last])
    assert clients.read_text() == "".join(
        line for line in whole.splitlines(True) if not line[0].isdigit() or int(line[0]) <= last
    )
    assert number_of_rounds(file.path) == last
    file.append(of_three_clients(last + 1))
    row = read_rows(tmp_path / "rounds.csv")[last]
    assert (row["round"], row["loss_0"], row["loss_2"]) == (str(last + 1), "0.5", "0.3333333333333333")
