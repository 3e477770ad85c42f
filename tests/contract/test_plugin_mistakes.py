"""Every mistake of the table is an error, a warning or an alarm in a run, or harmless; docs/hooks.md has the table."""

from __future__ import annotations

import logging

import pytest

from calfat_plugin import CalfatError
from tests.contract.plugin_mistakes import MISTAKES, PAGE, Mistake, on_page


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.kind}: {mistake.what}")
def test_a_mistake_comes_to_what_the_page_says(mistake: Mistake, caplog: pytest.LogCaptureFixture) -> None:
    if mistake.outcome == "error":
        with pytest.raises(CalfatError) as raised:
            list(mistake.act())
        assert mistake.says in str(raised.value)
        return
    with caplog.at_level(logging.WARNING, logger="calfat_plugin"):
        alarms = list(mistake.act())
    said = [*alarms, *(record.getMessage() for record in caplog.records)]
    if mistake.outcome == "alarm":
        assert mistake.says in {alarm.partition(":")[0] for alarm in alarms}
    elif mistake.outcome == "warning":
        assert any(mistake.says in text for text in said), said
    else:
        assert not said


def test_there_are_fifty_of_every_kind() -> None:
    assert len(MISTAKES) >= 50
    assert len({mistake.kind for mistake in MISTAKES}) == 11
    assert len({(mistake.kind, mistake.what) for mistake in MISTAKES}) == len(MISTAKES)


def test_the_page_has_the_table(request: pytest.FixtureRequest) -> None:
    """``--update-snapshots`` writes it."""
    if request.config.getoption("--update-snapshots"):
        PAGE.write_text(on_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == on_page()
    assert "| local trainer | `train_loss` gives a loss for each example | error |" in on_page()
