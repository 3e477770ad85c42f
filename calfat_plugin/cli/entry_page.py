"""One plugin as Markdown: what ``calfat plugins NAME`` prints and ``docs/plugins/`` is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from calfat_plugin import entries
from calfat_plugin.entries import kind_of
from calfat_plugin.experiment import defined_modifiers
from calfat_plugin.options import OptionInfo, describe_options, yaml_text
from calfat_plugin.registry import Registry

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
    """Everything known about an entry of ``registry`` but who offers it and its BibTeX."""
    place = f"In recipes: {WHERE[kind_of(entry)]}"
    return page_of(entry, [place, *facts_of(registry, entry)], describe_options(entry.config))


def page_of(entry: entries.Entry, facts: Sequence[str], options: Sequence[OptionInfo]) -> str:
    """The page of an entry with these facts and options."""
    parts = [f"{entry.summary[:1].upper()}{entry.summary[1:]}."]
    parts += [f"    {entry.formula}"] if entry.formula else []
    parts += ["\n".join(f"- {fact}" for fact in facts)] if facts else []
    parts += [option_table(options)] if options else []
    parts += _presets(entry)
    parts += [f"{entry.citation.text}."] if entry.citation is not None else []
    return "\n\n".join(parts) + "\n"


def meaning_of(info: OptionInfo) -> tuple[str, str, str]:
    """What two options have in common that are one and the same: name, expected value, meaning."""
    return info.name, info.expected, f"{info.help}{f' ({info.unit})' if info.unit else ''}"


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
    trainers = (trainer for trainer, _ in registry.offers(entries.TrainerEntry))
    return [trainer.name for trainer in trainers if modifier.name in defined_modifiers(registry, trainer)]


def facts_of(registry: Registry, entry: entries.Entry) -> Iterator[str]:
    """What is worth a line of its own."""
    yield from (f"Metric `{name}`: {what}" for name, what in entry.metrics.items())
    if entry.number_option is not None:
        yield f"`{entry.name}20` is `{{name: {entry.name}, {entry.number_option}: 20}}`"
    if isinstance(entry, entries.TrainerEntry):
        yield f"Loss modifiers: {_names(defined_modifiers(registry, entry)) or 'none, it has its own loss'}"
    if isinstance(entry, entries.ModifierEntry):
        yield f"Local trainers: {_names(methods_of(registry, entry)) or 'none'}"
    if isinstance(entry, entries.AttackerEntry):
        yield f"Sees: its own data and model{', and the models of the honest clients' if entry.sees_honest else ''}"
    if isinstance(entry, (entries.TrainerEntry, entries.AggregatorEntry)):
        yield from (f"Not with `{name}`: {reason}" for name, reason in entry.conflicts.items())
    if isinstance(entry, entries.DatasetEntry):
        yield f"Classes: {'as the files say' if entry.num_classes is None else entry.num_classes}"
        shape = entry.image_shape
        yield f"Images: {'as the files say' if shape is None else ' x '.join(map(str, shape)) + ' (channels first)'}"
    if isinstance(entry, entries.PartitionEntry) and entry.uses_alpha:
        yield "alpha: data_args.partition_alpha"


def _presets(entry: entries.Entry) -> list[str]:
    fills = {
        name: [f"`{key}: {yaml_text(value)}`" for key, value in preset.recipe(PRESET_DATASET).items()]
        for name, preset in entry.presets.items()
    }
    common = [fill for fill in next(iter(fills.values()), []) if all(fill in of for of in fills.values())]
    common = common if len(fills) > 1 else []
    parts = []
    for name, preset in entry.presets.items():
        sets = [f"`{key}: {yaml_text(value)}`" for key, value in preset.options.items()]
        own = [fill for fill in fills[name] if fill not in common]
        lines = [f"Preset `{name}`: {preset.help}."]
        lines += [f"It sets {', '.join(sets)}."] if sets else []
        lines += [f"Where the recipe is silent (shown for {PRESET_DATASET}): {', '.join(own)}."] if own else []
        parts.append(" ".join(lines))
    if common:
        parts.append(f"Where the recipe is silent, with each preset (shown for {PRESET_DATASET}): {', '.join(common)}.")
    return parts


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def cell(text: str) -> str:
    """A text inside a table."""
    return text.replace("|", "\\|")
