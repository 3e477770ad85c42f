"""Keys of a recipe that hold more than a single value: sections and plugins.

A key is declared once, as a field of the class of its section: ``option`` for a single value, :func:`key` for these.
Parser, recipe as run, JSON schema and reference go by that declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from calfat_plugin import entries
from calfat_plugin.options import OptionInfo, describe_options, no_option, options_to_plain, other_fields, to_plain
from calfat_plugin.recipe.document import KeyPath

E = TypeVar("E", bound=entries.Entry)


@dataclass(frozen=True)
class Plugin(Generic[E]):
    """A plugin that a recipe names: its entry and its typed options."""

    entry: E
    options: Any  #: typed; a mapping in the recipe of a finished run whose plugin is not installed
    name: str  #: as the recipe spells it: ``pgd20``
    label: str  #: what its results are called
    path: KeyPath
    loss: Plugin[entries.ModifierEntry] | None = None  #: the loss modifier of a local trainer; None: not a trainer
    additions: Any = None  #: ``Additions`` of a local trainer; None: not a trainer

    def as_run(self) -> dict[str, Any]:
        """The plugin as a recipe writes it in full."""
        plain = {"name": self.name, **self.plain_options()}
        if self.label != self.name:
            plain["label"] = self.label
        if self.loss is not None and isinstance(self.entry, entries.TrainerEntry) and self.entry.modifiers:
            plain["loss"] = self.loss.as_run()
        if self.additions is not None:
            plain |= self.additions.as_run()
        return plain

    def plain_options(self) -> dict[str, Any]:
        """The options as a recipe writes them."""
        if isinstance(self.options, Mapping):
            return dict(self.options)
        return options_to_plain(self.options)


@dataclass(frozen=True)
class Key:
    """A key that holds more than a single value; ``help`` is empty where the section has a table of its own."""

    help: str = ""


@dataclass(frozen=True)
class Section(Key):
    """A section with the keys of the class ``config``; with ``may_lack``, it is None where the recipe leaves it out."""

    config: type = object
    may_lack: bool = False


@dataclass(frozen=True)
class Sections(Key):
    """Sections under names that users choose, each with the keys of ``config``; ``named``: what a name stands for."""

    config: type = object
    named: str = ""


@dataclass(frozen=True)
class Groups(Key):
    """A list of groups of clients, each with the keys of an options class and with plugins of its own."""

    config: type = object


@dataclass(frozen=True)
class Others(Key):
    """Every further key of a section, each with a value that ``info`` describes."""

    info: OptionInfo = dataclasses.field(kw_only=True)


@dataclass(frozen=True)
class OnePlugin(Key):
    """A plugin by name, or with its options; ``written``: whether a recipe in full has it where it is the default."""

    kind: type[entries.Entry] = entries.Entry
    default: str = ""
    written: bool = True


@dataclass(frozen=True)
class Plugins(Key):
    """A list of plugins, each with a label of its own."""

    kind: type[entries.Entry] = entries.Entry
    default: tuple[str, ...] = ()
    example: str = ""


@dataclass(frozen=True)
class OptionsOf(Key):
    """The options of a plugin that the key at ``named_by`` names; ``configs``: options of it that have tags."""

    kind: type[entries.Entry] = entries.Entry
    named_by: tuple[str, str] = ("", "")
    configs: tuple[type, ...] = ()


def key(what: Key, default_factory: Callable[[], Any] | None = None) -> Any:
    """Declare a field of a section's class that holds ``what``."""
    if default_factory is None:
        return no_option(meta=what, kw_only=True)
    return no_option(meta=what, kw_only=True, default_factory=default_factory)


def keys_of(config: type) -> dict[str, Key]:
    """The fields of a section's class that :func:`key` declares, by name."""
    return other_fields(config, Key)


def as_plain(section: Any, config: type) -> dict[str, Any]:
    """A section with the keys of ``config`` as a recipe writes it in full: its options, then its other keys."""
    plain = {}
    for info in describe_options(config):
        plain[info.name] = to_plain(getattr(section, info.name))
    for name, declared in keys_of(config).items():
        value = getattr(section, name)
        match declared:
            case Others():
                plain |= value
            case Section():
                if value is not None:
                    plain[name] = as_plain(value, declared.config)
            case Sections():
                plain[name] = {name_below: below.as_run() for name_below, below in value.items()}
            case Plugins() | Groups():
                plain[name] = [item.as_run() for item in value]
            case OptionsOf():
                plain[name] = value.plain_options()
            case OnePlugin():
                if declared.written or value.name != declared.default:
                    plain[name] = value.as_run()
    return plain
