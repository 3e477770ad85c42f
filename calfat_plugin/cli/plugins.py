"""``calfat plugins [NAME]``: what a recipe can name, who offers it, and everything known about one of them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import click

from calfat_plugin import entries
from calfat_plugin.cli.errors import user_errors
from calfat_plugin.errors import PluginError, did_you_mean
from calfat_plugin.experiment import defined_modifiers
from calfat_plugin.options import OptionInfo, describe_options, to_plain
from calfat_plugin.registry import BLOCK_VARIABLE, KINDS, Registry

_WIDTH = 80
_PRESET_DATASET = "digits"  # some presets depend on the data set; this is the one they are shown for
_WHERE = {
    entries.TrainerEntry: "calfat.trainer",
    entries.ModifierEntry: "calfat.trainer.loss",
    entries.AggregatorEntry: "calfat.aggregator",
    entries.EvaluatorEntry: "calfat.evaluators, calfat.monitor.evaluators",
    entries.DatasetEntry: "data_args.dataset; its options in calfat.dataset",
    entries.ModelEntry: "model_args.model; its options in calfat.model",
    entries.PartitionEntry: "data_args.partition_method; its options in calfat.partition",
    entries.LoggerEntry: "calfat.loggers",
}


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything that is known as JSON, for other programs.")
def plugins(name: str | None, as_json: bool) -> None:
    """List everything that a recipe can name, or explain NAME."""
    with user_errors():
        registry = Registry.load()
        found = list(_offers(registry) if name is None else _find(registry, name))
    if as_json:
        content: dict[str, Any] = {"plugins": [describe_entry(registry, entry) for entry in found]}
        if name is None:
            content["not_loaded"] = [
                {
                    "plugin": failure.plugin,
                    "distribution": failure.provider.distribution,
                    "version": failure.provider.version,
                    "reason": failure.reason,
                }
                for failure in registry.failures
            ]
        click.echo(json.dumps(content, indent=2, allow_nan=False))
    elif name is None:
        _print_list(registry)
    else:
        click.echo("\n\n".join("\n".join(_explain(registry, entry)) for entry in found))


def describe_entry(registry: Registry, entry: entries.Entry) -> dict[str, Any]:
    """Everything known about an entry of ``registry``, ready for JSON."""
    provider = registry.provider(_kind(entry), entry.name)
    return {
        "kind": entry.kind,
        "name": entry.name,
        "summary": entry.summary,
        "formula": entry.formula,
        "where": _WHERE.get(_kind(entry), ""),
        "distribution": provider.distribution,
        "version": provider.version,
        "plugin": provider.plugin,
        "number_option": entry.number_option,
        "options": [_describe_option(info) for info in describe_options(entry.config)],
        "presets": {
            name: {"help": preset.help, "options": _plain(preset.options), "recipe": _plain(_fills_in(preset))}
            for name, preset in entry.presets.items()
        },
        "citation": None if entry.citation is None else {"text": entry.citation.text, "bibtex": entry.citation.bibtex},
        **_of_this_kind(registry, entry),
    }


def _describe_option(info: OptionInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": {Fraction: "fraction", str: "text", bool: "bool", int: "int", float: "float"}[info.type],
        "expected": info.expected,
        "required": info.required,
        "default": to_plain(info.default),
        "optional": info.optional,
        "unit": info.unit,
        "low": info.low,
        "high": info.high,
        "open_low": info.open_low,
        "choices": list(info.choices),
        "help": info.help,
    }


def _of_this_kind(registry: Registry, entry: entries.Entry) -> dict[str, Any]:
    """What only entries of this kind have."""
    if isinstance(entry, entries.TrainerEntry):
        return {"modifiers": list(defined_modifiers(registry, entry)), "conflicts": dict(entry.conflicts)}
    if isinstance(entry, entries.ModifierEntry):
        return {"methods": _methods(registry, entry)}
    if isinstance(entry, entries.AggregatorEntry):
        return {"conflicts": dict(entry.conflicts)}
    if isinstance(entry, entries.DatasetEntry):
        shape = entry.image_shape
        return {"num_classes": entry.num_classes, "image_shape": None if shape is None else list(shape)}
    return {}


def _methods(registry: Registry, modifier: entries.ModifierEntry) -> list[str]:
    """Names of the local trainers that a loss modifier composes with."""
    trainers = (trainer for trainer, _ in registry.offers(entries.TrainerEntry))
    return [trainer.name for trainer in trainers if modifier.name in defined_modifiers(registry, trainer)]


def _fills_in(preset: entries.Preset) -> Mapping[str, Any]:
    return preset.recipe(_PRESET_DATASET)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: to_plain(value) for key, value in values.items()}


# --- finding ----------------------------------------------------------------------------------------------------------


def _kind(entry: entries.Entry) -> type[entries.Entry]:
    """The kind of an entry, which may be of a plugin's own subclass."""
    return next(kind for kind in KINDS if isinstance(entry, kind))


def _offers(registry: Registry) -> Iterator[entries.Entry]:
    for kind in KINDS:
        yield from (entry for entry, _ in registry.offers(kind))


def _find(registry: Registry, name: str) -> list[entries.Entry]:
    """Every entry that a recipe could mean by ``name``; one name may stand for several kinds.

    Raises:
        PluginError: no kind has it.
    """
    found: list[entries.Entry] = []
    for kind in KINDS:
        try:
            found.append(registry.find(kind, name)[0])
        except PluginError:
            continue
    if found:
        return found
    known = {entry.name for entry in _offers(registry)}
    not_loaded = "".join(f"\nNot loaded: {failure}" for failure in registry.failures)
    raise PluginError(
        f"no plugin called '{name}'.{did_you_mean(name, known)} 'calfat plugins' lists them all.{not_loaded}"
    )


# --- printing ---------------------------------------------------------------------------------------------------------


def _print_list(registry: Registry) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    with console.capture() as capture:
        for kind in KINDS:
            offers = list(registry.offers(kind))
            console.print(Text.assemble((f"{kind.kind}s", "bold"), (f"   {_WHERE.get(kind, '')}", "dim")))
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
            table.add_column(no_wrap=True, min_width=16)
            table.add_column(no_wrap=True)
            table.add_column(ratio=1)
            for entry, provider in offers:
                table.add_row(Text(_shown_name(entry)), Text(str(provider)), Text(entry.summary))
            console.print(Padding(table if offers else Text("none"), (0, 0, 1, 2)))
        for failure in registry.failures:
            console.print(Text.assemble(("not loaded: ", "bold red"), str(failure)), soft_wrap=True)
        if registry.failures:
            leave_out = f"{BLOCK_VARIABLE}={registry.failures[0].provider.distribution}"
            console.print(Text(f"Mend, update or uninstall it, or start with {leave_out}.\n"), soft_wrap=True)
        console.print("calfat plugins NAME explains one of them.")
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _shown_name(entry: entries.Entry) -> str:
    return entry.name if entry.number_option is None else f"{entry.name}<{entry.number_option}>"


def _explain(registry: Registry, entry: entries.Entry) -> Iterator[str]:
    """The lines of one entry, wrapped for 80 columns; BibTeX stays as it is."""
    provider = registry.provider(_kind(entry), entry.name)
    yield click.style(f"{entry.name} ({entry.kind})", bold=True)
    yield from _wrapped(entry.summary, 2)
    yield ""
    yield from _row("formula", entry.formula)
    yield from _row("in recipes", _WHERE.get(_kind(entry), ""))
    if entry.former_names:
        yield from _row("formerly", ", ".join(entry.former_names))
    if entry.number_option is not None:
        yield from _row("number", f"{entry.name}20 is {entry.name} with {entry.number_option}: 20")
    yield from _row("offered by", f"{provider} ({provider.plugin})")
    for key, text in _facts(registry, entry):
        yield from _row(key, text)
    yield from _heading("options", describe_options(entry.config))
    for info in describe_options(entry.config):
        yield from _explain_option(info)
    yield from _heading("presets", entry.presets)
    for name, preset in entry.presets.items():
        yield from _explain_preset(name, preset)
    if entry.citation is not None:
        yield from _heading("cite", [entry.citation])
        yield from _wrapped(entry.citation.text, 2)
        yield from ([""] if entry.citation.bibtex else [])
        yield from entry.citation.bibtex.splitlines()


def _facts(registry: Registry, entry: entries.Entry) -> Iterator[tuple[str, str]]:
    """What only entries of this kind have, in words."""
    if isinstance(entry, entries.TrainerEntry):
        names = defined_modifiers(registry, entry)
        yield "losses", ", ".join(names) or "its own; no loss modifier composes with it"
    if isinstance(entry, entries.ModifierEntry):
        yield "methods", ", ".join(_methods(registry, entry)) or "none"
    if isinstance(entry, (entries.TrainerEntry, entries.AggregatorEntry)):
        yield from (("not with", f"{name}: {reason}") for name, reason in entry.conflicts.items())
    if isinstance(entry, entries.DatasetEntry):
        yield "classes", "as the files say" if entry.num_classes is None else str(entry.num_classes)
        shape = entry.image_shape
        yield "images", "as the files say" if shape is None else " x ".join(map(str, shape)) + " (channels first)"
    if isinstance(entry, entries.PartitionEntry) and entry.uses_alpha:
        yield "alpha", "data_args.partition_alpha"


def _explain_option(info: OptionInfo) -> Iterator[str]:
    default = "required" if info.required else f"default {_yaml(info.default)}"
    unit = f"; in {info.unit}s" if info.unit == "pixel" else f"; {info.unit}" if info.unit else ""
    yield from _wrapped(f"{info.name}: {info.expected}{unit}; {default}", 2)
    yield from _wrapped(info.help, 6)


def _explain_preset(name: str, preset: entries.Preset) -> Iterator[str]:
    yield from _wrapped(f"{name}: {preset.help}", 2)
    for key, value in preset.options.items():
        yield from _wrapped(f"{key}: {_yaml(value)}", 6)
    fills_in = _fills_in(preset)
    if fills_in:
        yield from _wrapped(f"where the recipe is silent (shown for {_PRESET_DATASET}):", 6)
    for key, value in fills_in.items():
        yield from _wrapped(f"{key}: {_yaml(value)}", 8)


def _heading(text: str, content: Any) -> Iterator[str]:
    if content:
        yield from ("", click.style(text, bold=True))


def _row(key: str, text: str) -> Iterator[str]:
    if text:
        yield from textwrap.wrap(text, _WIDTH, initial_indent=f"  {key:<12}", subsequent_indent=" " * 14)


def _wrapped(text: str, indent: int) -> Iterator[str]:
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
    )


def _yaml(value: Any) -> str:
    """A value as a recipe writes it."""
    value = to_plain(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
