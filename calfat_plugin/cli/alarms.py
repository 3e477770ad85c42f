"""Alarms as the console shows them: findings below the table of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from calfat_plugin.evaluators.alarms import Alarm


def show_alarms(console: Console, alarms: Sequence[Alarm]) -> None:
    """Print each finding with its code; nothing when there is none."""
    if not alarms:
        return
    console.print(Text(f"{len(alarms)} finding{'s' if len(alarms) > 1 else ''} about these numbers:", style="yellow"))
    for alarm in alarms:
        console.print(Text.assemble("  ", (alarm.code, "bold"), f": {alarm.text}"), soft_wrap=True)
