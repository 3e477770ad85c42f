"""The tables of docs/passes.md are made of the committed records, by the rules of its plan."""

from __future__ import annotations

import pytest

from tests.docs import passes
from tests.docs.blocks import check_tables


def test_the_tables_are_what_the_records_say(request: pytest.FixtureRequest) -> None:
    check_tables(passes.PAGE, "passes", passes.TABLES, update=request.config.getoption("--update-snapshots"))


def test_every_row_of_the_front_is_beaten_by_nothing_cheaper() -> None:
    rows = {row.cell.name: row.scores for row in passes.rows("digits").values()}
    _, (head, *table) = passes.results("digits")
    for line in table:
        cells = dict(zip(head, line, strict=True))
        own = rows[f"{cells['method']}/{cells['attack']}/{cells['rounds']} rounds"]
        beaten = any(
            other["passes"].mean <= own["passes"].mean and other["autoattack"].mean > own["autoattack"].mean
            for other in rows.values()
        )
        assert (cells["front"] == "•") is not beaten
