"""Reference pages made from recipe schema, entries and commands, so that they cannot disagree with the parser.

``python -m calfat_plugin.cli.reference docs`` writes them; a test compares.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from inspect import cleandoc
from pathlib import Path

import click

from calfat_plugin.cli.entry_page import cell, entry_page, option_table
from calfat_plugin.cli.main import COMMANDS, main
from calfat_plugin.options import describe_options
from calfat_plugin.recipe import schema
from calfat_plugin.recipe.parse import DEFAULT_EVALUATORS, DEFAULT_MONITOR
from calfat_plugin.recipe.plugin_files import PluginFileOptions
from calfat_plugin.recipe.silo import MQTTSettings, S3Settings, SiloSettings, TLSSettings
from calfat_plugin.registry import KINDS, Registry

_MADE_BY = "<!-- Made by `python -m calfat_plugin.cli.reference docs`; change the code it is made from, not this. -->"

_RECIPE_HEAD = """\
# Recipes

A recipe is a FedML configuration file with one additional section, `calfat:`. FedML's own sections keep their names and
meaning. A key that is not listed here causes a warning if it has no effect. It is an error if it is nearly one of these
keys, if it belongs in another section, or if it promises privacy, a defence or an attack that a run does not have
([host.md](host.md#keys-of-fedml)). The `calfat:` section is strict: an unknown key, name, type or unit is an error.
`calfat check --strict` takes every warning for an error.

Numbers can be written as `0.1`, `1e-3` or `8/255`. Any value can be overridden on the command line:
`--set train_args.comm_round=20 --set "calfat.trainer={name: fedpgd}"`.

Plugins are selected by name (`aggregator: fedavg`) or with options (`aggregator: {name: fedavg, weights: uniform}`).
`calfat plugins NAME` and [plugins.md](plugins.md) list the options. Some names can end with a number: `pgd20` means
`{name: pgd, steps: 20}`, and `label2` means two shards per client.
"""

_PLUGINS = f"""\
## `calfat`: plugins

| key | value |
| --- | --- |
| `name` | name of the runs of this recipe and of their folder; a run's own recipe.yaml contains it. \
Default: the file's name |
| `trainer` | a local trainer with its options; `preset` selects a set of defaults, `loss` a loss modifier. \
Default: `calfat` |
| `aggregator` | an aggregator with its options. Default: `fedavg` |
| `evaluators` | list of evaluators for the final model. `label` renames one, so that it can be listed twice. \
Default: {", ".join(DEFAULT_EVALUATORS)} |
| `monitor.evaluators` | list of evaluators during the run. Default: {", ".join(DEFAULT_MONITOR)} |
| `loggers` | list of loggers, each with its options. Default: none |
| `reported` | the numbers that a paper reports for this recipe, shown next to the measured ones: `source` (a text), \
and for each evaluator's label an accuracy in percent. Default: nothing |
| `silo.parties` | list of `host:port` of the parties of a cross-silo run, the server's first. Default: \
`calfat run --local` uses free ports of this machine |
| `dataset`, `model`, `partition` | options of the plugins in `data_args.dataset`, `model_args.model` and \
`data_args.partition_method` |
"""
_COMMANDS = """\
# Command line

Every command with its arguments and options, as `calfat COMMAND --help` prints them. [commands.md](../commands.md) has
exit codes, `--json` and completion.
"""
_SECTIONS = {
    "threat": schema.ThreatOptions,
    "monitor": schema.MonitorOptions,
    "evaluation": schema.EvaluationOptions,
    "runtime": schema.RuntimeOptions,
    "plugins.<module>": PluginFileOptions,
    "silo": SiloSettings,
    "silo.tls": TLSSettings,
    "silo.mqtt": MQTTSettings,
    "silo.s3": S3Settings,
}


def recipe_reference() -> str:
    """The page on recipes."""
    host = [_section(f"## `{name}`", config) for name, config in schema.HOST_SECTIONS.items()]
    ours = [_section(f"## `calfat.{name}`", config) for name, config in _SECTIONS.items()]
    return "\n".join([_MADE_BY, _RECIPE_HEAD, *host, _PLUGINS, *ours])


def plugin_reference(registry: Registry) -> str:
    """The page on plugins: everything that ``registry`` holds."""
    parts = [
        _MADE_BY,
        "# Plugins\n",
        "The plugins of this package, by kind. `calfat plugins` also lists other installed plugins.\n",
    ]
    for kind in KINDS:
        parts.append(f"## {kind.kind.capitalize()}s\n")
        parts += [f"### `{entry.shown_name}`\n\n{entry_page(registry, entry)}" for entry, _ in registry.offers(kind)]
    return "\n".join(parts)


def command_reference() -> str:
    """The page on the command line: each command as its ``--help`` describes it."""
    group = click.Context(main, info_name="calfat")
    return "\n".join([_MADE_BY, _COMMANDS, *(_command(group, name) for name in COMMANDS)])


def _command(group: click.Context, name: str) -> str:
    command = main.get_command(group, name)
    assert command is not None, f"{name} is in COMMANDS"
    context = click.Context(command, info_name=name, parent=group)
    described = filter(None, (parameter.get_help_record(context) for parameter in command.params))
    # As HTML: a bar in a code span ends the cell for some readers of Markdown, and shows its escape in others.
    rows = [
        f"| <code>{escape(option).replace('|', '&#124;')}</code> | {cell(escape(help, quote=False))} |"
        for option, help in described
        if help
    ]
    return "\n".join(
        [
            f"## `calfat {name}`\n",
            f"```text\ncalfat {name} {' '.join(command.collect_usage_pieces(context))}\n```\n",
            f"{cleandoc(command.help or '')}\n",
            *(["| option | meaning |", "| --- | --- |", *rows, ""] if rows else []),
        ]
    )


def _section(heading: str, config: type) -> str:
    doc = (config.__doc__ or "").split(": ", 1)[-1].strip()
    return f"{heading}\n\n{doc[:1].upper()}{doc[1:]}\n\n{option_table(describe_options(config))}\n"


def pages() -> Mapping[str, str]:
    """Path in ``docs/`` to content, of every page that is made here."""
    return {
        "recipes.md": recipe_reference(),
        "plugins.md": plugin_reference(Registry.load(entry_points=False)),
        "reference/cli.md": command_reference(),
    }


def write_reference(folder: Path) -> None:
    """Write the pages into ``folder``."""
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write_reference(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
