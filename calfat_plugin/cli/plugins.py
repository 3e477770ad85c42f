"""``calfat plugins [NAME]``: what a recipe can name, who offers it, and everything known about one of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from calfat_plugin import entries
from calfat_plugin.cli.entry_page import WHERE, entry_page
from calfat_plugin.cli.options import plugin_option
from calfat_plugin.entries import KINDS, kind_of
from calfat_plugin.errors import PluginError, did_you_mean
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
    found: list[entries.Entry] = []
    for kind in KINDS:
        with suppress(PluginError):
            found.append(registry.find(kind, name)[0])
    if found:
        return found
    names = [registry.names(kind) for kind in KINDS]
    # What abbreviates one name among its kind's may abbreviate several among all.
    hint = did_you_mean(name, itertools.chain(*names)) or next(filter(None, (did_you_mean(name, n) for n in names)), "")
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
        for complaint in dict.fromkeys(filter(None, (provider.complaint for provider in registry.plugins()))):
            console.print(Text.assemble(("warning: ", "bold yellow"), f"{complaint}\n"), soft_wrap=True)
        for failure in registry.failures:
            console.print(Text.assemble(("not loaded: ", "bold red"), str(failure)), soft_wrap=True)
        if registry.failures:
            leave_out = f"{BLOCK_VARIABLE}={registry.failures[0].provider.distribution}"
            console.print(Text(f"Fix, update or uninstall it, or start with {leave_out}.\n"), soft_wrap=True)
        console.print("calfat plugins NAME explains one of them.")


def _print_pages(registry: Registry, found: Sequence[entries.Entry]) -> None:
    """Each entry's page, wrapped for the terminal; BibTeX stays as it is."""
    from rich.markdown import Markdown

    with _console() as console:
        for entry in found:
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
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout and sys.stdout.isatty() else _WIDTH)
    with console.capture() as capture:
        yield console
    click.echo("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))
