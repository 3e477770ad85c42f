"""Reference pages made from recipe schema, entries, commands and docstrings: they cannot disagree with the code.

``python reference_pages.py docs`` writes them; a test compares.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from inspect import cleandoc
from pathlib import Path

import click

from calfat_plugin.cli.main import COMMANDS, main
from calfat_plugin.cli.plugins import WHERE, cell, facts_of, meaning_of, option_table, page_of
from calfat_plugin.entries import KINDS, Entry, TrainerEntry
from calfat_plugin.options import OptionInfo, describe_options, yaml_text
from calfat_plugin.recipe.clients import BESIDE, GroupOptions
from calfat_plugin.recipe.keys import Groups, Key, OnePlugin, OptionsOf, Others, Plugins, Section, Sections, keys_of
from calfat_plugin.recipe.schema import HOST_SECTIONS, CalfatSection
from calfat_plugin.recipe.training import Additions
from calfat_plugin.registry import Registry
from reference_python import python_pages

_MADE_BY = "<!-- Made by `python reference_pages.py docs`; change the code it is made from, not this. -->"

_RECIPE_HEAD = """\
# Recipes

A recipe is a FedML configuration file with one additional section, `calfat:`. FedML's own sections keep their names and
meaning. Only the keys listed here act; one warning lists all others of the file. It is an error if a key belongs in
another section, or switches on privacy, a defence or an attack that a run does not have
([host.md](host.md#keys-of-fedml)). The `calfat:` section is strict: an unknown key, name, type or unit is an error.
`calfat check --strict` takes every warning for an error.

Numbers can be written as `0.1`, `1e-3` or `8/255`. Any value can be overridden on the command line:
`--set train_args.comm_round=20 --set "calfat.trainer={name: fedpgd}"`.

Plugins are selected by name (`aggregator: fedavg`) or with options (`aggregator: {name: fedavg, weights: uniform}`).
`calfat plugins NAME` and [plugins.md](plugins.md) list the options. Some names can end with a number: `pgd20` means
`{name: pgd, steps: 20}`, and `label2` means two shards per client.
"""

_PLUGINS_HEAD = """\
# Plugins

The plugins of this package. Each kind has a page with its plugins, their options and their papers. `calfat plugins`
lists these and other installed plugins; `calfat plugins NAME` explains one. [hooks.md](hooks.md) shows how to write
one.

| kind | in a recipe | plugins |
| --- | --- | --- |
"""

_SHARED = """\
Several of them share these options. Each lists those that it has, with the default, unless that is null.
"""

_COMMANDS = """\
# Command line

Every command with its arguments and options, as `calfat COMMAND --help` prints them. [commands.md](../commands.md) has
exit codes, `--json` and completion.
"""


def pages() -> Mapping[str, str]:
    """Path in ``docs/`` to content, of every page that is made here."""
    sections = {**HOST_SECTIONS, "calfat": CalfatSection}
    registry, group = Registry.load(entry_points=False), click.Context(main, info_name="calfat")
    parts = {
        "recipes.md": [_RECIPE_HEAD, *(text for name, config in sections.items() for text in _sections(name, config))],
        "plugins.md": [_PLUGINS_HEAD + "".join(_kind_row(registry, kind) for kind in KINDS)],
        **{_page_of_kind(kind): [_kind_page(registry, kind)] for kind in KINDS},
        "reference/cli.md": [_COMMANDS, *(text for name in COMMANDS for text in _command(group, main, name))],
    }
    made_here = {name: "\n".join(texts) for name, texts in parts.items()}
    return {name: f"{_MADE_BY}\n{text}" for name, text in {**made_here, **python_pages()}.items()}


def _page_of_kind(kind: type[Entry]) -> str:
    return f"plugins/{kind.hook.removeprefix('calfat_')}.md"


def _kind_row(registry: Registry, kind: type[Entry]) -> str:
    """The row of a kind in the index."""
    names = ", ".join(f"`{entry.shown_name}`" for entry, _ in registry.offers(kind))
    return f"| [{kind.kind.capitalize()}s]({_page_of_kind(kind)}) | {_in_recipe(kind)} | {names} |\n"


def _in_recipe(kind: type[Entry]) -> str:
    """Where a recipe names a plugin, with the keys as code."""
    return re.sub(r"[\w.\[\]]*\.[\w.\[\]]*\w\b", r"`\g<0>`", WHERE[kind])


def _kind_page(registry: Registry, kind: type[Entry]) -> str:
    """Every entry of a kind: as ``entry_page``, but what several of them share is said once, above them."""
    offered = [(entry, describe_options(entry.config)) for entry, _ in registry.offers(kind)]
    shared = _shared_options([options for _, options in offered])
    parts = [f"# {kind.kind.capitalize()}s\n"]
    parts.append(f"In recipes: {_in_recipe(kind)}. [hooks.md](../hooks.md#{kind.hook}) shows how to write one.\n")
    parts += ["| name | what it is |", "| --- | --- |"]
    parts += [f"| [`{entry.shown_name}`](#{entry.name}) | {cell(entry.summary)} |" for entry, _ in offered]
    parts.append("")
    if shared:
        parts.append(_SHARED)
        parts += ["| shared option | expected | meaning |", "| --- | --- | --- |"]
        parts += [f"| `{name}` | {cell(expected)} | {cell(help)} |" for name, expected, help in shared.values()]
        parts.append("")
    for entry, options in offered:
        above = [info for info in options if shared.get(info.name) == meaning_of(info)]
        facts = list(facts_of(registry, entry))
        if above:
            facts.append(f"Shared options: {', '.join(map(_with_default, above))}")
        page = page_of(entry, facts, [info for info in options if info not in above])
        parts.append(f"## `{entry.name}`\n\n{page}")
    return "\n".join(parts)


def _shared_options(options_of_entries: Sequence[Sequence[OptionInfo]]) -> dict[str, tuple[str, str, str]]:
    """Name to meaning of each option that two entries or more have; of two meanings the more frequent one."""
    counts = Counter(meaning_of(info) for options in options_of_entries for info in options)
    shared: dict[str, tuple[str, str, str]] = {}
    for meaning, count in counts.most_common():
        if count > 1:
            shared.setdefault(meaning[0], meaning)
    return shared


def _with_default(info: OptionInfo) -> str:
    return f"`{info.name}`" if info.default is None else f"`{info.name}: {yaml_text(info.default)}`"


def _command(parent: click.Context, group: click.Group, name: str) -> Iterator[str]:
    """The section of a command, then those of its own."""
    command = group.get_command(parent, name)
    assert command is not None, f"{name} is a command"
    context = click.Context(command, info_name=name, parent=parent)
    described = filter(None, (parameter.get_help_record(context) for parameter in command.params))
    # As HTML: a bar in a code span ends the cell for some readers of Markdown, and shows its escape in others.
    rows = [
        f"| <code>{escape(option).replace('|', '&#124;')}</code> | {cell(escape(help, quote=False))} |"
        for option, help in described
        if help
    ]
    yield "\n".join(
        [
            f"## `{context.command_path}`\n",
            f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n",
            f"{cleandoc(command.help or '')}\n",
            *(["| option | meaning |", "| --- | --- |", *rows, ""] if rows else []),
        ]
    )
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _command(context, command, below)


def _sections(path: str, config: type) -> Iterator[str]:
    """The section at ``path`` of a recipe, then those below it."""
    doc = " ".join((config.__doc__ or "").split("\n\n")[0].split(": ", 1)[-1].split())
    keys = keys_of(config)
    rows = [row for row in (_row(name, what) for name, what in keys.items()) if row]
    if config is GroupOptions:
        rows += [f"| `{name}` | {cell(key.holds)} | `null` | {key.help} |" for name, key in BESIDE.items()]
    yield "\n".join(
        [f"## `{path}`\n", f"{doc[:1].upper()}{doc[1:]}\n", option_table(describe_options(config)), *rows, ""]
    )
    for name, what in keys.items():
        if isinstance(what, Section):
            yield from _sections(f"{path}.{name}", what.config)
        elif isinstance(what, OnePlugin) and what.kind is TrainerEntry:
            yield from _sections(f"{path}.{name}", Additions)
        elif isinstance(what, Groups):
            yield from _sections(f"{path}.{name}[]", what.config)
        elif isinstance(what, Sections):
            yield from _sections(f"{path}.{name}.<{what.named}>", what.config)


def _row(name: str, what: Key) -> str:
    """The row of a key that has no section of its own on the page."""
    meaning = what.help
    match what:
        case OnePlugin():
            expected, default = f"one of the {what.kind.kind}s", f"`{what.default}`"
        case Plugins():
            expected, default = f"a list of {what.kind.kind}s", f"`{yaml_text(list(what.default))}`"
        case OptionsOf():
            expected, default = f"options of the {what.kind.kind} in `{'.'.join(what.named_by)}`", ""
        case Others():
            name, expected, default, meaning = what.info.name, what.info.expected, "", what.info.help
        case _:
            return ""
    return f"| `{name}` | {cell(expected)} | {default} | {cell(meaning)} |"


def write_reference(folder: Path) -> None:
    """Write the pages into ``folder``."""
    for name, content in pages().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write_reference(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
