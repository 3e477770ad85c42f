"""The card of an exported model: what it is, what was measured, and how to check it, from what is on disk."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from calfat_plugin.disk import sha256_of
from calfat_plugin.exact import exact_text
from calfat_plugin.exporting.markdown import Markdown, fenced, one_line, quoted, row, template_of
from calfat_plugin.exporting.sources import Checkpoint
from calfat_plugin.loggers.base import public_recipe_text
from calfat_plugin.options import yaml_text
from calfat_plugin.report.charts import drawn, final_per_class, label_distribution
from calfat_plugin.report.labels import budget, headline
from calfat_plugin.report.numbers import accuracy_text, counted, duration, interval, listed_ids, percent
from calfat_plugin.report.page import alarms_of, citations, environment
from calfat_plugin.report.run_tables import left_out_of
from calfat_plugin.results import EvaluationResult
from calfat_plugin.version import __version__

if TYPE_CHECKING:
    from calfat_plugin.analyses.replay import Replay

CARD = "README.md"
_FIGURES = "figures"
_MOST_CLIENTS = 20  # that are listed one by one


@dataclass(frozen=True)
class Replayed:
    """What the evidence shows of one model file."""

    exact: Replay  # with the images as they were kept
    eight_bit: Replay  # with each rounded to 8 bits a value


def card_text(
    folder: Path,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    replayed: Mapping[str, Replayed],
    not_replayed: str,
    left_out: Mapping[str, str],
    notes: str,
) -> str:
    """The card as Markdown, with a block of metadata that model hubs read.

    Args:
        folder: where the model files are; figures are written there.
        checkpoint: what is exported.
        config: what ``config.json`` says.
        replayed: model file to what the evidence shows of it.
        not_replayed: why nothing was replayed.
        left_out: file to why it is not in the folder.
        notes: the user's own text; empty: none.
    """
    _, channels, height, width = config["input"]["shape"]
    return template_of("card.md.jinja").render(
        checkpoint=checkpoint,
        stored=checkpoint.stored,
        config=config,
        metadata=Markdown(_metadata(checkpoint, config)),
        headline=headline(checkpoint.stored),
        image_size=f"{height} x {width}",
        channels=counted(channels, "channel"),
        shape=f"{channels}, {height}, {width}",
        ball="the {} ball of eps {}".format(*checkpoint.budget),
        natural=_with_interval(checkpoint.natural),
        attacked=_with_interval(checkpoint.weakest),
        tables=_tables(checkpoint),
        remarks=_remarks(checkpoint),
        alarms=alarms_of(checkpoint.stored),
        figures=_figures(folder, checkpoint),
        left_out=left_out,
        replayed=[_replayed_row(name, both) for name, both in replayed.items()],
        not_replayed=not_replayed,
        check_command=fenced(_check_command(checkpoint, left_out), "sh"),
        digests={path.name: sha256_of(path) for path in sorted(folder.glob("*.*"))},
        data=_data(checkpoint),
        clients=_client_rows(checkpoint),
        training=_training(checkpoint),
        recipe=fenced(public_recipe_text(checkpoint.stored.recipe), "yaml"),
        notes=quoted(notes),
        citations={text: fenced(bibtex, "bibtex") for text, bibtex in citations([checkpoint.stored]).items()},
    )


def _metadata(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    """The block in front of a card, as model hubs read it."""
    dataset = one_line(checkpoint.stored.experiment.dataset.name)
    tags = ["image-classification", "federated-learning", "adversarial-training", "adversarial-robustness"]
    tags.append(one_line(checkpoint.stored.experiment.trainer.name))
    metrics = []
    for evaluation in (checkpoint.natural, checkpoint.weakest):
        if evaluation is not None:
            name = " ".join(["accuracy,", evaluation.label, budget(evaluation.settings)])
            metrics.append({"type": "accuracy", "name": one_line(name), "value": evaluation.accuracy})
    block: dict[str, Any] = {
        "library_name": config["library_name"],
        "pipeline_tag": config["task"],
        "tags": tags,
        "datasets": [dataset],
        "metrics": ["accuracy"],
    }
    if metrics:
        split = {"name": dataset, "type": dataset, "split": "test"}
        result = {"task": {"type": config["task"]}, "dataset": split, "metrics": metrics}
        block["model-index"] = [{"name": one_line(checkpoint.stored.name), "results": [result]}]
    return yaml.safe_dump(block, sort_keys=False, width=1000).strip()


# --- what was measured ------------------------------------------------------------------------------------------------


def _with_interval(evaluation: EvaluationResult | None) -> str:
    """``94.7 % [91.9, 96.6]``; empty where nothing was measured."""
    if evaluation is None:
        return ""
    return f"{accuracy_text(evaluation.accuracy)} {_interval(evaluation)}"


def _interval(evaluation: EvaluationResult) -> str:
    """``[91.9, 96.6]``; empty where the attack did not run."""
    return "" if evaluation.interval is None else interval(*evaluation.interval)


def _tables(checkpoint: Checkpoint) -> dict[str, list[Markdown]]:
    """For each file of results a row for each evaluation."""
    tables: dict[str, list[Markdown]] = {}
    for file, results in checkpoint.results.items():
        tables[file] = []
        for evaluation in results.evaluations:
            cells = [evaluation.label, budget(evaluation.settings), accuracy_text(evaluation.accuracy)]
            cells += [_interval(evaluation), f"{evaluation.num_examples:,}"]
            class_names = checkpoint.stored.class_names
            for worst, names in ((evaluation.worst_class, class_names), (evaluation.worst_clients, ())):
                cells += ["", ""] if worst is None else [listed_ids(worst.ids, names), percent(worst.accuracy)]
            tables[file].append(row(cells))
    return tables


def _remarks(checkpoint: Checkpoint) -> list[str]:
    """What did not run."""
    remarks = []
    for content in checkpoint.results.values():
        for evaluation in content.evaluations:
            if evaluation.not_run:
                remarks.append(f"{evaluation.label} did not run: {evaluation.not_run}.")
            elif left_out_of(evaluation):
                missing = ", ".join(left_out_of(evaluation))
                remarks.append(f"{evaluation.label} is without {missing}, which did not run.")
    return remarks


def _figures(folder: Path, checkpoint: Checkpoint) -> list[dict[str, str]]:
    """Charts as PNG files: accuracies by class, of the last checkpoint alone, and the labels of each client."""
    every = [label_distribution(checkpoint.stored)]
    if checkpoint.is_last and checkpoint.stored.finished:
        every.insert(0, final_per_class(checkpoint.stored))
    charts = [chart for chart in every if chart is not None]
    if not charts:
        return []
    (folder / _FIGURES).mkdir()
    drawn(charts, folder / _FIGURES)
    for file in (folder / _FIGURES).iterdir():
        if file.suffix != ".png":
            file.unlink()
    figures = []
    for chart in charts:
        file_name = Markdown(f"{_FIGURES}/{chart.name}.png")
        figures.append({"title": chart.title, "caption": chart.caption, "file": file_name})
    return figures


# --- loading and checking it ------------------------------------------------------------------------------------------


def _replayed_row(name: str, replayed: Replayed) -> Markdown:
    exact = replayed.exact
    assert exact.model_file is not None  # a file was asked
    cells = [name, exact.model_file.runtime]
    for replay in (exact, replayed.eight_bit):
        fallen = [number.label for number in replay.numbers if not number.stands]
        cells += [f"{int(replay.falls.sum()):,} of {len(replay.falls):,}", ", ".join(fallen) or "none"]
    return row([*cells, f"{exact.difference:.1e}"])


def _check_command(checkpoint: Checkpoint, left_out: Mapping[str, str]) -> str:
    """The command that shows the evidence to an exported file."""
    words = ["calfat", "replay", "RUN", "--model-file", "model.pt2" if "model.onnx" in left_out else "model.onnx"]
    directory, evidence = checkpoint.stored.directory, checkpoint.evidence
    if evidence is not None and evidence.parent != directory:  # the run's own needs no name, that of an attack does
        words[2] = f"RUN/{evidence.relative_to(directory)}"
    if not checkpoint.is_last:
        words += ["--checkpoint", checkpoint.name]
    return shlex.join(words)


# --- data and training ------------------------------------------------------------------------------------------------


def _data(checkpoint: Checkpoint) -> dict[str, str]:
    """What the model was trained and measured on: a name for each fact, empty where it is not known."""
    recipe, partition = checkpoint.stored.experiment, checkpoint.stored.partition
    class_names = checkpoint.stored.class_names
    options = recipe.partition.plain_options()
    if recipe.partition.entry.uses_alpha:
        options = {"alpha": recipe.data.partition_alpha, **options}
    facts = {
        "data set": recipe.dataset.name,
        "licence of the data": recipe.dataset.entry.licence or "not known to this package",
        "SHA-256 of all its images and labels": partition.dataset_sha256 or "not noted",
        "classes": f"{len(class_names)}: {', '.join(class_names)}",
        "clients": f"{recipe.num_clients:,}",
        "split among the clients": f"{recipe.partition.name} ({_options(options)})",
        "SHA-256 of the split": partition.partition_sha256 or "not noted",
    }
    if checkpoint.natural is not None:
        facts["test images"] = f"{checkpoint.natural.num_examples:,}"
    sizes = [sum(row) for row in partition.class_counts]
    if any(sizes):
        shares = [max(row) / sum(row) for row in partition.class_counts if sum(row)]
        facts["training images"] = f"{sum(sizes):,}"
        facts["skew"] = (
            f"clients have {min(sizes):,} to {max(sizes):,} images (median {median(sizes):,.0f}); the largest class of "
            f"a client is {percent(median(shares))} of its images (median)"
        )
    return facts


def _options(options: Mapping[str, Any]) -> str:
    """``alpha 0.1, min_size 10``."""
    return ", ".join(f"{key} {yaml_text(value)}" for key, value in options.items() if value is not None)


def _client_rows(checkpoint: Checkpoint) -> list[Markdown]:
    """A row a client, of a few."""
    class_counts, class_names = checkpoint.stored.partition.class_counts, checkpoint.stored.class_names
    if len(class_counts) > _MOST_CLIENTS:
        return []
    rows = []
    for client, counts in enumerate(class_counts):
        size, largest = sum(counts), max(counts, default=0)
        cells: list[object] = [client, f"{size:,}", sum(count > 0 for count in counts), "", ""]
        if size:
            cells[3:] = [class_names[counts.index(largest)], percent(largest / size)]
        rows.append(row(cells))
    return rows


def _training(checkpoint: Checkpoint) -> dict[str, str]:
    """How it was trained, likewise."""
    stored = checkpoint.stored
    recipe, results = stored.experiment, stored.final
    trainer, threat = recipe.trainer, recipe.threat
    facts = {
        "method": f"{trainer.name}: {trainer.entry.summary}",
        "its paper": trainer.entry.citation.text if trainer.entry.citation else "",
        "aggregation": f"{recipe.aggregator.name}: {recipe.aggregator.entry.summary}",
        "network": f"{recipe.model.name} ({_options(recipe.model.plain_options())})",
        "budget of training": f"{threat.norm}, eps {exact_text(threat.eps)}, {threat.steps} steps",
        "rounds": f"{checkpoint.round:,} of {recipe.num_rounds:,}",
        "checkpoint": checkpoint.name,
        "seed": str(recipe.seed),
    }
    if stored.stopped_early is not None:
        facts["stopped early"] = str(stored.stopped_early)
    if results is not None:
        facts["time"] = duration(results.seconds)
    noted = environment(stored)
    if noted is not None and stored.environment is not None:
        facts["processor"] = stored.environment.processor
        facts |= {key.lower(): text for key, text in noted["machine"].items()}
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in noted["versions"].items())
    facts["exported with"] = f"calfat-plugin {__version__}"
    return facts
