"""The study of attackers: its tables are made of its records, and its suite trains at the rates that these chose."""

from __future__ import annotations

import pandas as pd
import pytest

from studies import pages
from studies.attackers import tables


def test_the_tables_are_what_the_records_say() -> None:
    text = tables.PAGE.read_text(encoding="utf-8")
    found = pages.with_tables(text, "attackers", tables.TABLES)
    assert found == text, "python -m studies.attackers.tables writes them anew"
    assert all(f"<!-- attackers: {name}" in text for name in tables.TABLES)


@pytest.mark.parametrize("method", tables.METHODS)
def test_a_method_trains_at_the_rate_that_its_choice_runs_chose(method: str) -> None:
    rate = tables.SUITE["axes"]["method"][method]["train_args.learning_rate"]
    _, (head, *rows) = tables.rates("")
    (of_method,) = (row for row in rows if row[0] == method)
    assert [head[index] for index, cell in enumerate(of_method) if cell.startswith("**")] == [f"{rate:g}"]


def test_both_suites_train_alike() -> None:
    """But for the attackers, rules and rates that their axes set."""
    other = tables.RATES_SUITE
    assert other["set"] == tables.SUITE["set"]
    assert other["axes"]["beta"] == tables.SUITE["axes"]["beta"]
    chosen = {name: values["calfat.trainer"] for name, values in tables.SUITE["axes"]["method"].items()}
    assert {name: values["calfat.trainer"] for name, values in other["axes"]["method"].items()} == chosen
    assert not set(other["choose"]["seeds"]) & set(tables.SUITE["seeds"])


def made(values: dict[tuple[str, int], float]) -> pd.Series:
    index = pd.MultiIndex.from_tuples(values, names=["method", "seed"])
    return pd.Series(list(values.values()), index=index)


def test_the_mean_over_methods_and_the_change_to_no_attack() -> None:
    """Of hand-made values: a seed's value is the mean over the methods that both sides have."""
    one = made({("A", 0): 0.5, ("B", 0): 0.7, ("A", 1): 0.4, ("B", 1): 0.9})
    other = made({("A", 0): 0.6, ("B", 0): 0.8, ("A", 1): 0.6})
    assert tables.means(4, one) == "62.5"
    assert tables.means(4, other, pd.Series([0.25, 0.5, 0.0])) == "66.7 / 25.0 (3 of 4)"
    assert tables.change(one, other) == "-15.0 [-78.5, 48.5]"  # -10 and -20; t of one degree is 12.7
    assert tables.change(one, made({("C", 0): 0.5})) == "-"
