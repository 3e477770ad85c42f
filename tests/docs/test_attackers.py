"""The tables of docs/attackers.md are made of the committed records; the suite trains at the rates that these chose."""

from __future__ import annotations

import pytest

from calfat_plugin.suites.record import Recorded
from tests.docs import attackers
from tests.docs.blocks import check_tables


def test_the_tables_are_what_the_records_say(request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-snapshots")
    check_tables(attackers.PAGE, "attackers", attackers.TABLES, update=update)


@pytest.mark.parametrize("method", attackers.METHODS)
def test_a_method_trains_at_the_rate_that_its_choice_runs_chose(method: str) -> None:
    rate = attackers.SUITE["axes"]["method"][method]["train_args.learning_rate"]
    head, *rows = attackers.rates("")
    (of_method,) = (row for row in rows if row[0] == method)
    assert [head[index] for index, cell in enumerate(of_method) if cell.startswith("**")] == [f"{rate:g}"]


def test_both_suites_train_alike() -> None:
    """But for the attackers, rules and rates that their axes set."""
    other = attackers.RATES_SUITE
    assert other["set"] == attackers.SUITE["set"]
    assert other["axes"]["beta"] == attackers.SUITE["axes"]["beta"]
    chosen = {name: values["calfat.trainer"] for name, values in attackers.SUITE["axes"]["method"].items()}
    assert {name: values["calfat.trainer"] for name, values in other["axes"]["method"].items()} == chosen
    assert not set(other["choose"]["seeds"]) & set(attackers.SEEDS)


def test_the_mean_over_methods_and_the_change_to_no_attack() -> None:
    """Of hand-made values: a seed's value is the mean over the methods that both sides have."""
    one = {("A", 0): 0.5, ("B", 0): 0.7, ("A", 1): 0.4, ("B", 1): 0.9}
    other = {("A", 0): 0.6, ("B", 0): 0.8, ("A", 1): 0.6}
    assert attackers.means(4, [*one.values()]) == "62.5"
    assert attackers.means(4, [*other.values()], [0.25, 0.5, 0.0]) == "66.7 / 25.0 (3 of 4)"
    assert attackers.change(one, other) == "-15.0 [-78.5, 48.5]"  # -10 and -20; t of one degree is 12.7
    assert attackers.change(one, {}) == "-"


def test_a_run_that_diverged_counts_as_nothing_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says nothing about who was named."""
    place = (attackers.BETAS[0], attackers.NONE, attackers.RULES[0])
    row = Recorded("lost", "0123456789ab", {})
    monkeypatch.setattr(attackers, "RUNS", {(f"{place[0]}/CalFAT/{place[1]}/{place[2]}", "", 1): row})
    assert attackers.values("pgd20", *place) == {("CalFAT", 1): 0.0}
    assert attackers.values("others_named", *place) == {}
