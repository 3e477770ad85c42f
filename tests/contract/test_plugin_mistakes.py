"""Every mistake of the table in docs/plugin_mistakes.md is an error, a warning or an alarm in a run, or harmless."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import pytest

from calfat_plugin import CalfatError
from calfat_plugin.federation.side_effects import stateless
from tests.contract import plugin_mistakes
from tests.contract.plugin_mistakes import MISTAKES, PAGE, on_page, play, trainer

EVERY = [(kind, what) for kind, mistakes in MISTAKES.items() for what in mistakes]


@pytest.mark.parametrize(("kind", "what"), EVERY, ids=map(": ".join, EVERY))
def test_a_mistake_comes_to_what_the_page_says(kind: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    mistake = MISTAKES[kind][what]
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
    else:  # but that a model has learned nothing in so few rounds
        learned_nothing = ("guessing", "one-answer")
        assert not [text for text in said if not text.startswith(learned_nothing)]


def test_the_page_has_the_table(request: pytest.FixtureRequest) -> None:
    """``--update-snapshots`` writes it."""
    if request.config.getoption("--update-snapshots"):
        PAGE.write_text(on_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == on_page()
    assert "| local trainer | `train_loss` gives a loss for each example | error |" in on_page()


def test_what_torch_refuses_is_said_with_the_line_of_the_plugin() -> None:
    with pytest.raises(CalfatError) as raised:
        list(play(trainer(take_steps=plugin_mistakes.takes_steps_twice))())
    code = plugin_mistakes.takes_steps_twice.__code__
    where = f"{code.co_filename}:{code.co_firstlineno + 2}, in takes_steps_twice: "
    assert str(raised.value).startswith(f"local trainer 'wrong' (passed in wrong): {where}Trying to backward through")


def test_any_other_exception_keeps_its_traceback() -> None:
    def failing(self: Any, batch: Any) -> Any:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match=r"^disk full$"):
        list(play(trainer(train_loss=failing))())


class Plugin:
    """What keeps state, and what does not."""

    def __init__(self) -> None:
        self.options, self.seen, self.count = (1, 2), list[int](), 300

    @cached_property
    def factor(self) -> int:
        return self.options[0]

    def works(self) -> None:
        self.options, _ = self.options, self.factor

    def keeps(self, item: int) -> None:
        self.seen.append(item)

    def counts(self) -> None:
        self.count += 1


def test_state_in_attributes_is_warned_of_once_for_each_plugin(caplog: pytest.LogCaptureFixture) -> None:
    plugin, reported = Plugin(), set[str]()

    def said(who: str, act: Any, *arguments: Any) -> list[str]:
        caplog.clear()
        with stateless(plugin, who, reported):
            act(*arguments)
        return [record.getMessage().partition(". ")[0] for record in caplog.records]

    assert said("x", plugin.works) == []
    assert said("x", plugin.keeps, 1) == ["x changes its attributes while it works (seen)"]
    assert said("x", plugin.counts) == []
    assert said("y", plugin.counts) == ["y changes its attributes while it works (count)"]
