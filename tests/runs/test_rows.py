"""``rounds.csv``, written and read in this process: whole texts, for people's spreadsheets hold on to them."""

from __future__ import annotations

import dataclasses
import locale
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.federation.outliers import alarms_of
from calfat_plugin.results import RoundRecord
from calfat_plugin.rounds_csv import RoundsFile, last_used, number_of_rows, read_rounds, seconds_of
from tests.report.made import evaluation, record
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


def written(path: Path, *records: RoundRecord) -> RoundsFile:
    file = RoundsFile(path / "rounds.csv", ["natural"], 3)
    for one in records:
        file.append(one)
    return file


@pytest.mark.usefixtures("plain_locale")
def test_a_row_holds_all_that_a_round_found_on_one_line(tmp_path: Path, snapshot: TextSnapshot) -> None:
    file = written(
        tmp_path,
        of_three_clients(
            1,
            peak_memory_mb=812.5,
            learning_rate=0.05,
            evaluations={"natural": OF_TWO_CLASSES},
            num_examples={0: 30, 2: 20},
            weights={0: 0.6, 2: 0.4},
            update_cosines={0: 0.75, 2: -0.5},
        ),
        of_three_clients(2, evaluations={}, refused={}, alarms=()),
    )
    snapshot(file.path.read_bytes().decode())
    first, second = read_rounds(file.path)
    assert (first["refused"], first["natural"], second["natural"]) == ("1: client 1: 1 < \u221e; 7: lost", "0.5", "")
    assert (seconds_of(file.path), last_used(file.path)) == (4.5, {0: 2, 2: 2})
    with file.path.open("a") as end:
        end.write("3,0.")  # half a row, of a round that no checkpoint has
    assert len(read_rounds(file.path)) == 2
    for kept in (2, 1, 0):
        file.keep_until(kept)
        assert [row["round"] for row in read_rounds(file.path)] == ["1", "2"][:kept]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (",2.250,long", ",", "expected 38 values"),
        (",2.250,long", ",2.250,long,longer", "expected 38 values"),
        (",2.250,", ",nan,", "seconds is nan"),
        (",2.250,", ",-1,", "seconds is -1"),
        (",2.250,", ",1e308,", "seconds is 1e308"),
        (",2.250,", ",2.2s,", "could not convert string to float: '2.2s'"),
        (",0.25,", ",a quarter,", "could not convert string to float: 'a quarter'"),
        (",0 2,", ",0 two,", "invalid literal for int() with base 10: 'two'"),
        ("\n2,", "\n2.0,", "invalid literal for int() with base 10: '2.0'"),
        (",long; ", ',"long"; ', "',' expected after '\"'"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, old: str, new: str, reason: str) -> None:
    file = written(tmp_path, of_three_clients(1), of_three_clients(2), of_three_clients(3))
    first, second = file.path.read_text(encoding="utf-8").split("\n2,")
    assert old in f"\n2,{second}"
    file.path.write_text(first + f"\n2,{second}".replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RunError) as error:
        read_rounds(file.path)
    assert str(error.value) == f"{file.path}: row 2 is damaged ({reason}). {AGAIN}"
    with pytest.raises(RunError, match=r"row 2 is damaged|rows of rounds 1 to 3"):
        file.keep_until(3)


def test_a_resumed_file_has_the_columns_of_today_whatever_it_had(tmp_path: Path) -> None:
    file = written(tmp_path, of_three_clients(1))
    before = file.path.read_text(encoding="utf-8")
    file.path.write_text(before.replace("loss_1", "x" * 200_000).replace("num_examples_0", "other"), encoding="utf-8")
    file.keep_until(1)
    assert file.path.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("round\n")], ids=["removed", "cut"])
def test_no_row_is_added_to_a_file_without_the_rows_before_it(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Somebody may tidy up while a run lasts; its first rounds would be missing, and nobody would know."""
    file = written(tmp_path, of_three_clients(1))
    file.append(of_three_clients(2))
    assert number_of_rows(file.path) == 2
    change(file.path)
    assert number_of_rows(file.path) == 0
    with pytest.raises(
        RunError, match=r"rounds\.csv: was removed or changed while the run writes it: it has [06] bytes"
    ):
        file.append(of_three_clients(3))


def test_what_plugins_measure_has_its_columns(tmp_path: Path) -> None:
    file = RoundsFile(tmp_path / "rounds.csv", ["natural"], 3, ["distance", "kept"])
    file.append(of_three_clients(1, metrics={"distance": 1 / 3, "kept": 2.0}))
    file.append(of_three_clients(2))
    rows = read_rounds(file.path)
    assert [(row["distance"], row["kept"]) for row in rows] == [("0.3333333333333333", "2.0"), ("", "")]


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, snapshot: TextSnapshot) -> None:
    path = written(tmp_path, of_three_clients(1)).path
    path.write_text(path.read_text(encoding="utf-8").replace("seconds", "hours"), encoding="utf-8")
    with snapshot.raises(RunError):
        read_rounds(path)
    path.write_bytes(b"round,\xff\n")
    with pytest.raises(RunError, match=r"rounds\.csv: cannot be read \('utf-8' codec can't decode byte 0xff"):
        read_rounds(path)
    path.unlink()
    path.mkdir()
    with snapshot.raises(RunError):
        read_rounds(path)


def test_alarms_of_all_rounds_are_one_finding(tmp_path: Path) -> None:
    nothing = tmp_path / "rounds.csv"
    assert (alarms_of(nothing), seconds_of(nothing), last_used(nothing), read_rounds(nothing)) == ((), 0, {}, [])
    advice = "Such an update can replace the model: look at that client's data, learning rate and intentions."
    file = written(tmp_path, of_three_clients(1, alarms=()))
    assert alarms_of(file.path) == ()
    file.append(
        of_three_clients(2, alarms=("large-update: that of client 1 is 2", "large-update: that of client 12 is 3"))
    )
    file.append(of_three_clients(3, alarms=("large-update: that of client 1 is 4",)))
    quoted = "2 rounds, the last of them 3: that of client 1 is 4; round 2: that of client 12 is 3"
    assert alarms_of(file.path) == (Alarm("large-update", f"{quoted}. {advice}", ()),)
    file.append(of_three_clients(4, alarms=tuple(f"large-update: that of client {who} is 5" for who in range(2, 7))))
    (alarm,) = alarms_of(file.path)
    assert alarm.text.startswith(f"{quoted}; round 4: that of client 2 is 5; ")
    assert alarm.text.endswith(f"round 4: that of client 4 is 5 (and 2 more in rounds.csv). {advice}")


def test_alarms_of_each_kind_are_one_finding(tmp_path: Path) -> None:
    large, dominant = "large-update: the update of client 1", "dominant-client: client 1 has all"
    file = written(tmp_path, of_three_clients(1, alarms=(large, dominant)), of_three_clients(2, alarms=(dominant,)))
    assert [(alarm.code, alarm.text.partition(". ")[0]) for alarm in alarms_of(file.path)] == [
        ("large-update", "round 1: the update of client 1"),
        ("dominant-client", "2 rounds, the last of them 2: client 1 has all"),
    ]


# --- more than ten clients --------------------------------------------------------------------------------------------


def of_many(path: Path, *, clients: int = 11) -> RoundsFile:
    """Three rounds of clients 0 and 10, but the second, of client 2."""
    file = RoundsFile(path / "rounds.csv", ["natural"], clients)
    both = {0: 0.5, 10: 1 / 3}
    some = {"losses": both, "update_norms": both, "clients": (0, 10), "refused": {}, "alarms": ()}
    file.append(of_three_clients(1, **some, num_examples={0: 30, 10: 7}, weights={10: 1.0}))
    file.append(of_three_clients(2, clients=(2,), losses={2: math.nan}, update_norms={2: 2.0}, refused={}))
    file.append(of_three_clients(3, **some))
    return file


def test_many_clients_have_a_file_of_their_own(tmp_path: Path, snapshot: TextSnapshot) -> None:
    file = of_many(tmp_path)
    assert file.paths == [tmp_path / "clients.csv", tmp_path / "rounds.csv"]
    snapshot("".join(path.read_text() for path in file.paths))


def test_whoever_reads_rows_finds_clients_wherever_they_are(tmp_path: Path) -> None:
    """The wide form has empty fields beside."""
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "clients.csv").write_text("1,of somebody else\n")
    long, wide = (read_rounds(of_many(path, clients=n).path) for path, n in ((tmp_path, 11), (tmp_path / "wide", 10)))
    assert [row["loss_0"] for row in long if "loss_0" in row] == ["0.5", "0.5"]
    for one, other in zip(long, wide, strict=True):
        columns = {name for name in other if not name.endswith("_10")}  # of ten clients, the last is 9
        assert {name: one.get(name, "") for name in columns} == {name: other[name] for name in columns}


@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("torn", ["", "4,0,loss,0.5\n4,0,update_", "4,0,lo\n"])
def test_the_file_of_clients_ends_with_the_round_of_the_checkpoint(tmp_path: Path, last: int, torn: str) -> None:
    """A crash before the row leaves what its clients have, or half of it."""
    file = of_many(tmp_path)
    clients, _ = file.paths
    whole = clients.read_text()
    with clients.open("a") as end:
        end.write(torn)
    assert "loss_0" not in read_rounds(file.path)[1]
    file.keep_until(last)
    assert clients.read_text() == "".join(
        line for line in whole.splitlines(True) if not line[0].isdigit() or int(line[0]) <= last
    )
    assert len(read_rounds(file.path)) == last
    file.keep_until(last)
    file.append(of_three_clients(last + 1))
    found = read_rounds(file.path)[last]
    assert (found["round"], found["loss_0"], found["loss_2"]) == (str(last + 1), "0.5", "0.3333333333333333")


def test_a_file_of_clients_that_lacks_some_is_not_continued(tmp_path: Path, snapshot: TextSnapshot) -> None:
    file = of_many(tmp_path)
    clients, _ = file.paths
    text = clients.read_text()
    clients.write_text(text.replace("1,10,loss,", "x,10,loss,"))
    with snapshot.raises(RunError):
        file.keep_until(3)
    clients.unlink()
    assert [row["natural"] for row in read_rounds(file.path)] == ["0.5"] * 3  # a page needs no clients
    with pytest.raises(RunError, match=r"clients\.csv: the rows of rounds 1 to 1"):
        file.keep_until(1)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("1,10,loss\n", "not enough values to unpack (expected 3, got 2)"),
        ("1,10,loss,a,b\n", "too many values to unpack (expected 3)"),
        ("1,ten,loss,0.5\n", "invalid literal for int() with base 10: 'ten'"),
        ("1,10,loss,half\n", "could not convert string to float: 'half'"),
    ],
)
def test_a_damaged_value_of_a_client_is_named(tmp_path: Path, new: str, reason: str) -> None:
    file = of_many(tmp_path)
    clients, _ = file.paths
    header, *lines = clients.read_text().splitlines(keepends=True)
    clients.write_text("".join([header, lines[0], new, *lines[1:]]))
    with pytest.raises(RunError) as error:
        read_rounds(file.path)
    assert str(error.value) == f"{clients}: row 2 is damaged ({reason}). {AGAIN}"
