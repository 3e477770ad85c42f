"""Statistics that the studies share, against the package's own and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.maths import intervals
from studies import pages
from studies.records import difference, holm, rates, read, runs, student


@pytest.mark.parametrize("values", [(0.5,), (0.5, 0.5, 0.5), (0.5, 0.75), (0.5,) * 4, (0.1, -0.2, 0.3, 0.0)])
def test_intervals_and_p_values_are_the_packages(values: tuple[float, ...]) -> None:
    ours = intervals.student(values)
    assert student(values) == (ours if ours is None else pytest.approx(tuple(ours)))
    by_seed = dict(enumerate(values))
    p_value = intervals.paired_p_value(by_seed, dict.fromkeys(by_seed, 0.0))
    assert difference(values).p_value == (p_value if p_value is None else pytest.approx(p_value))


def test_p_values_are_corrected_for_all_that_were_planned() -> None:
    p_values = [0.04, None, 0.01, 0.03]
    assert holm(p_values) == pytest.approx([0.09, None, 0.04, 0.09])
    assert holm(p_values) == pytest.approx(intervals.holm(p_values))


def test_a_record_as_it_is_read(tmp_path: Path) -> None:
    """A run that was lost has no right answers; of a choice, the best mean over seeds counts."""
    path = tmp_path / "record.csv"
    rows = (
        "cell,tried,seed,state,recipe,seconds,processor,calfat_plugin,format,verdict,natural,natural:worst-class,passes,choice",
        "a,,1,finished,x,1.0,cpu,0.1.0,2,holds,0.5,0.25,10,",
        "a,,2,lost,x,1.0,cpu,0.1.0,2,,,,,",
        "a,learning_rate 0.1,3,finished,x,1.0,cpu,0.1.0,2,,,,,0.5",
        "a,learning_rate 0.1,4,lost,x,1.0,cpu,0.1.0,2,,,,,",
        "a,learning_rate 0.2,3,finished,x,1.0,cpu,0.1.0,2,,,,,0.3",
        "a,learning_rate 0.2,4,finished,x,1.0,cpu,0.1.0,2,,,,,0.3",
    )
    path.write_text("\n".join(rows) + "\n")
    found = runs(path)
    assert found["natural"].to_dict() == {("a", 1): 0.5, ("a", 2): 0.0}
    assert found["natural:worst-class"].to_dict() == {("a", 1): 0.25, ("a", 2): 0.0}
    assert found["passes"].isna().tolist() == [False, True]
    assert found["verdict"].tolist() == ["holds", ""]
    assert (rates(path), len(read(path))) == ({"a": "0.2"}, 6)


def test_only_the_tables_of_a_study_are_written() -> None:
    page = "a\n<!-- x: one -->\n\n| old |\n\n<!-- end -->\nb\n<!-- y: one -->\n\n| old |\n\n<!-- end -->\n"
    found = pages.with_tables(page, "x", {"one": lambda _: (1, [["text", "number"], ["a", "1"]])})
    new = "| text | number |\n| --- | --: |\n| a | 1 |"
    assert found == page.replace("| old |", new, 1)
