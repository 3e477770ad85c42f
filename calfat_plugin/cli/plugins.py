"""``calfat plugins [NAME]``: what a recipe can name, who offers it, and everything known about one of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from calfat_plugin import entries
from calfat_plugin.cli.options import plugin_option
from calfat_plugin.entries import KINDS, kind_of
from calfat_plugin.errors import PluginError, did_you_mean
from calfat_plugin.experiment import defined_modifiers
from calfat_plugin.options import OptionInfo, describe_options, yaml_text
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.plugin_files import with_plugins
from calfat_plugin.registry import BLOCK_VARIABLE, Registry

_WIDTH = 80


@click.command()
@click.argument("name", required=False)
@plugin_option
def plugins(name: str | None, plugins: tuple[Path, ...]) -> None:
    """List everything that a recipe can name, or explain NAME."""
    registry = Registry.for_recipe(with_plugins(Document("calfat plugins", {}), plugins))
    if name is None:
        _print_list(registry)
    else:
        _print_pages(registry, _find(registry, name))


def _find(registry: Registry, name: str) -> list[entries.Entry]:
    """Every entry that a recipe could mean by ``name``; one name may mean entries of several kinds."""
    matches: list[entries.Entry] = []
    for kind in KINDS:
        with suppress(PluginError):
            matches.append(registry.find(kind, name)[0])
    if matches:
        return matches
    names = [registry.names(kind) for kind in KINDS]
    hint = did_you_mean(name, itertools.chain(*names))
    for names_of_kind in names:  # an abbreviation may fit several names, but one name of a kind
        hint = hint or did_you_mean(name, names_of_kind)
    not_loaded = "".join(f"\nNot loaded: {failure}" for failure in registry.failures)
    raise PluginError(f"no plugin called '{name}'.{hint} 'calfat plugins' lists them all.{not_loaded}")


def _print_list(registry: Registry) -> None:
    with _console() as console:
        for kind in KINDS:
            offers = list(registry.offers(kind))
            console.print(Text.assemble((f"{kind.kind}s", "bold"), (f"   {WHERE[kind]}", "dim")))
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
            table.add_column(no_wrap=True, min_width=16)
            table.add_column(no_wrap=True)
            table.add_column(ratio=1)
            for entry, provider in offers:
                table.add_row(Text(entry.shown_name), Text(str(provider)), Text(entry.summary))
            console.print(Padding(table if offers else Text("none"), (0, 0, 1, 2)))
        for complaint in dict.fromkeys(provider.complaint for provider in registry.plugins()):
            if complaint:
                console.print(Text.assemble(("warning: ", "bold yellow"), f"{complaint}\n"), soft_wrap=True)
        for failure in registry.failures:
            console.print(Text.assemble(("not loaded: ", "bold red"), str(failure)), soft_wrap=True)
        if registry.failures:
            leave_out = f"{BLOCK_VARIABLE}={registry.failures[0].provider.distribution}"
            console.print(Text(f"Fix, update or uninstall it, or start with {leave_out}.\n"), soft_wrap=True)
        console.print("calfat plugins NAME explains one of them.")


def _print_pages(registry: Registry, matches: Sequence[entries.Entry]) -> None:
    """Each entry's page, wrapped for the terminal; BibTeX stays as it is."""
    from rich.markdown import Markdown

    with _console() as console:
        for entry in matches:
            provider = registry.provider(kind_of(entry), entry.name)
            console.print(Text(f"{entry.name} ({entry.kind}), offered by {provider} ({provider.plugin})", "bold"))
            if provider.complaint:
                console.print(Text.assemble(("warning: ", "bold yellow"), provider.complaint))
            console.print(Markdown(f"---\n{entry_page(registry, entry)}"))
            if entry.citation is not None and entry.citation.bibtex:
                console.print(Text(f"\n{entry.citation.bibtex}"), soft_wrap=True)
            console.print()


@contextmanager
def _console() -> Iterator[Console]:
    """A console as wide as the terminal, or 80 columns; lines end without spaces."""
    width = None if sys.stdout and sys.stdout.isatty() else _WIDTH
    console = Console(file=sys.stdout, highlight=False, width=width)
    with console.capture() as capture:
        yield console
    click.echo("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))


# --- one plugin as Markdown, also for docs/plugins/ -------------------------------------------------------------------


PRESET_DATASET = "digits"  # some presets depend on the data set; this is the one they are shown for
#: Where a recipe names a plugin of each kind.
WHERE: Mapping[type[entries.Entry], str] = {
    entries.TrainerEntry: "calfat.trainer",
    entries.ModifierEntry: "calfat.trainer.loss",
    entries.InnerAttackEntry: "calfat.threat.inner",
    entries.AggregatorEntry: "calfat.aggregator",
    entries.AttackerEntry: "calfat.clients[].attacker",
    entries.EvaluatorEntry: "calfat.evaluators, calfat.monitor.evaluators",
    entries.DatasetEntry: "data_args.dataset; its options in calfat.dataset",
    entries.ModelEntry: "model_args.model; its options in calfat.model",
    entries.PartitionEntry: "data_args.partition_method; its options in calfat.partition",
    entries.LoggerEntry: "calfat.loggers",
}


def entry_page(registry: Registry, entry: entries.Entry) -> str:
    """Everything known about an entry of ``registry``, without its distribution and its BibTeX."""
    place = f"In recipes: {WHERE[kind_of(entry)]}"
    return page_of(entry, [place, *facts_of(registry, entry)], describe_options(entry.config))


def page_of(entry: entries.Entry, facts: Sequence[str], options: Sequence[OptionInfo]) -> str:
    """The page of an entry with these facts and options."""
    parts = [f"{entry.summary[:1].upper()}{entry.summary[1:]}."]
    if entry.formula:
        parts.append(f"    {entry.formula}")
    if facts:
        parts.append("\n".join(f"- {fact}" for fact in facts))
    if options:
        parts.append(option_table(options))
    parts += _presets(entry)
    if entry.citation is not None:
        parts.append(f"{entry.citation.text}.")
    return "\n\n".join(parts) + "\n"


def meaning_of(info: OptionInfo) -> tuple[str, str, str]:
    """Name, expected value and meaning of an option; two options that agree in these are described together."""
    meaning = info.help
    if info.unit:
        meaning += f" ({info.unit})"
    return info.name, info.expected, meaning


def option_table(options: Iterable[OptionInfo]) -> str:
    """Options as a table, one a row."""
    rows = ["| key | expected | default | meaning |", "| --- | --- | --- | --- |"]
    for info in options:
        default = "required" if info.required else f"`{yaml_text(info.default)}`"
        name, expected, meaning = meaning_of(info)
        rows.append(f"| `{name}` | {cell(expected)} | {default} | {cell(meaning)} |")
    return "\n".join(rows)


def methods_of(registry: Registry, modifier: entries.ModifierEntry) -> list[str]:
    """Names of the local trainers that a loss modifier composes with."""
    names = []
    for trainer, _ in registry.offers(entries.TrainerEntry):
        if modifier.name in defined_modifiers(registry, trainer):
            names.append(trainer.name)
    return names


def facts_of(registry: Registry, entry: entries.Entry) -> Iterator[str]:
    """What a page says of an entry in a list, beside its summary and its options."""
    for name, meaning in entry.metrics.items():
        yield f"Metric `{name}`: {meaning}"
    if entry.number_option is not None:
        yield f"`{entry.name}20` is `{{name: {entry.name}, {entry.number_option}: 20}}`"
    if isinstance(entry, entries.TrainerEntry):
        yield f"Loss modifiers: {_names(defined_modifiers(registry, entry)) or 'none, it has its own loss'}"
    if isinstance(entry, entries.ModifierEntry):
        yield f"Local trainers: {_names(methods_of(registry, entry)) or 'none'}"
    if isinstance(entry, entries.AttackerEntry):
        others = ", and the models of the honest clients" if entry.sees_honest else ""
        yield f"Sees: its own data and model{others}"
    if isinstance(entry, (entries.TrainerEntry, entries.AggregatorEntry)):
        for name, reason in entry.conflicts.items():
            yield f"Not with `{name}`: {reason}"
    if isinstance(entry, entries.DatasetEntry):
        classes, images = "as the files say", "as the files say"
        if entry.num_classes is not None:
            classes = str(entry.num_classes)
        if entry.image_shape is not None:
            images = f"{' x '.join(map(str, entry.image_shape))} (channels first)"
        yield f"Classes: {classes}"
        yield f"Images: {images}"
    if isinstance(entry, entries.PartitionEntry) and entry.uses_alpha:
        yield "alpha: data_args.partition_alpha"


def _presets(entry: entries.Entry) -> list[str]:
    """A paragraph for each preset, and one for the keys that all presets set alike where the recipe is silent."""
    silent = f"(shown for {PRESET_DATASET})"
    keys_of: dict[str, list[str]] = {}
    for name, preset in entry.presets.items():
        keys_of[name] = _key_texts(preset.recipe(PRESET_DATASET))
    common: list[str] = []
    if len(keys_of) > 1:
        first, *others = keys_of.values()
        for key in first:
            if all(key in keys for keys in others):
                common.append(key)
    parts = []
    for name, preset in entry.presets.items():
        sentences = [f"Preset `{name}`: {preset.help}."]
        if preset.options:
            sentences.append(f"It sets {', '.join(_key_texts(preset.options))}.")
        own_keys = [key for key in keys_of[name] if key not in common]
        if own_keys:
            sentences.append(f"Where the recipe is silent {silent}: {', '.join(own_keys)}.")
        parts.append(" ".join(sentences))
    if common:
        parts.append(f"Where the recipe is silent, with each preset {silent}: {', '.join(common)}.")
    return parts


def _key_texts(values: Mapping[str, Any]) -> list[str]:
    return [f"`{key}: {yaml_text(value)}`" for key, value in values.items()]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def cell(text: str) -> str:
    """A text inside a table."""
    return text.replace("|", "\\|")
