"""Plugins for tests, made of what they offer."""

from __future__ import annotations

from types import SimpleNamespace

from calfat_plugin.entries import Entry
from calfat_plugin.hookspecs import hookimpl


def offering(*entries: Entry, name: str = "Plugin") -> SimpleNamespace:
    """A plugin that offers these entries, each by the hook of its kind."""
    hooks: dict[str, list[Entry]] = {}
    for entry in entries:
        hooks.setdefault(type(entry).hook, []).append(entry)
    implemented = {hook: hookimpl(lambda offered=offered: offered) for hook, offered in hooks.items()}
    return SimpleNamespace(**implemented, __name__=name)
