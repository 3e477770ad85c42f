"""The page of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from calfat_plugin.errors import RecipeError
from calfat_plugin.exact import parse_number
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.loggers.base import public_recipe_text
from calfat_plugin.options import yaml_text
from calfat_plugin.recipe.silo import UNPROTECTED
from calfat_plugin.report import labels
from calfat_plugin.report.charts import (
    Chart,
    drawn,
    eps_chart,
    final_per_class,
    heterogeneity,
    label_distribution,
    learning_curves,
    losses,
)
from calfat_plugin.report.evaluations import (
    evaluations_table,
    figures_of,
    shows_release,
    tails_table,
    trust_table,
    worst_table,
)
from calfat_plugin.report.groups import groups_table, ranges, with_groups
from calfat_plugin.report.images import Strip, read_strips
from calfat_plugin.report.numbers import NO_NUMBER, bare_percent, counted, duration, figure, unbroken_percent
from calfat_plugin.report.page import alarms_of, citations, environment, render_page, some
from calfat_plugin.report.profile_table import spending
from calfat_plugin.report.reading import RunFiles
from calfat_plugin.report.table import Table
from calfat_plugin.results import EVIDENCE, NATURAL, RoundRecord
from calfat_plugin.rounds_csv import Column


def run_page(run: RunFiles, figures: Path) -> str:
    """HTML of one run's page; its figures are also written to ``figures``."""
    facts = labels.highlights(run)
    with suppress(RecipeError):  # of a backend that is not there any more
        if runtime_of(run.recipe).is_unprotected:
            facts["security"] = UNPROTECTED
    of_clients = (label_distribution(run), heterogeneity(run), losses(run))
    return render_page(
        "run.html",
        title=run.name,
        lead=labels.headline(run),
        tiles=_tiles(run),
        progress="" if run.finished else f"{len(run.rounds)} of {counted(run.recipe.num_rounds, 'round')}",
        alarms=alarms_of(run),
        figures=figures.name,
        sections={
            "results": some(
                tables=final_tables(run),
                measured={str(each["label"]): _how(each) for each in run.evaluations},
                figures=drawn((learning_curves(run), final_per_class(run)), figures),
                rounds=_rounds(run),
            ),
            "clients": some(figures=drawn(of_clients, figures), groups=groups_table(run), counts=_counts(run)),
            "images": some(strips=read_strips([run.path], run.class_names)),
            "attacks": attacks_view(run.attacks, figures),
            "trust": trust_view(run.trust, figures, read_strips([run.path], run.class_names, f"trust.{EVIDENCE}")),
            "time": spending(run.profile),
            "recipe": {
                "facts": facts,
                "command": labels.command(run),
                "text": public_recipe_text(run.recipe.document.data),
            },
            "versions": environment(run),
            "citations": citations([run]),
        },
    )


def _tiles(run: RunFiles) -> list[tuple[str, str]]:
    """(accuracy, evaluator) of the final model; without a final evaluation, of the last round that was monitored."""
    if run.evaluations:
        numbers = [evaluation.get("num_examples") or 0 for evaluation in run.evaluations]
        most = max(numbers)
        fewer = [f", {number:,} of {most:,} images" if 0 < number < most else "" for number in numbers]
        return [
            (
                NO_NUMBER if evaluation["accuracy"] is None else unbroken_percent(float(evaluation["accuracy"])),
                f"{evaluation['label']}{images}",
            )
            for evaluation, images in zip(run.evaluations, fewer, strict=True)
        ]
    last = [(label, run.curve(label)[-1]) for label in run.monitored]
    split = f"{run.recipe.data.monitored_split} split"
    return [(unbroken_percent(value), f"{label}, round {number}, {split}") for label, (number, value) in last]


def final_tables(run: RunFiles) -> list[Table]:
    """The final evaluation, measured beside reported, and its worst classes and clients."""
    if not run.evaluations:
        return []
    labels_there = {each["label"] for each in run.evaluations}
    published = {label: number for label, number in run.recipe.reported.percent.items() if label in labels_there}
    release = shows_release(run.evaluations)
    last = "the final round" if run.stop is None else f"round {run.stop.round}, where training stopped early"
    evaluated = "Global model" if run.recipe.ema is None else "Moving average of the global models"
    note = (
        f"{evaluated} after {last}. Accuracy counts an example that is classified correctly both clean and "
        "under attack; the convention of the release leaves the clean image out of account, as CalFAT's authors and "
        f"the paper's tables do, {'and is beside it' if release else 'and gives the same numbers here'}. "
        "The interval (Wilson's) is over the test examples; another seed may lie outside."
    )
    if published:
        source = run.recipe.reported.source or "as the recipe says"
        measured = "release" if release else "accuracy"
        note += f" Reported: {source}; difference: {measured} minus reported, in percentage points."
    best = [
        f"{found['evaluator']} {unbroken_percent(float(found['accuracy']))} in round {found['round']}"
        for found in (run.results.get("validation_selected") or run.results.get("test_selected") or {}).values()
    ]
    validated = "validation_selected" in run.results
    how = " on the validation split" if validated else ", selected on the test split and so no fair result"
    notes = [note, *([f"Best rounds{how}: {labels.listing(best)}."] if best else [])]
    attackers = ranges(run.partition.get("attackers") or ())
    return [
        evaluations_table("Final evaluation", run.evaluations, published, notes=notes),
        worst_table(run.evaluations, run.class_names, with_groups(run), attackers),
        tails_table(run.evaluations, run.class_names),
    ]


def _how(evaluation: Mapping[str, Any]) -> str:
    """Figures beside an accuracy, the evaluator's settings, and its implementation."""
    settings = (evaluation.get("settings") or {}).items()
    parts = (
        figures_of(evaluation),
        ", ".join(f"{key} {yaml_text(value)}" for key, value in settings if value is not None),
        f"by {evaluation['implementation']}" if evaluation.get("implementation") else "",
    )
    return "; ".join(filter(None, parts))


def _rounds(run: RunFiles) -> Table:
    accuracies, others, of_plugins = [], [], []
    for column in run.columns.values():
        if not column.page or not run.curve(column.name):
            continue
        if column.kind == "share":
            accuracies.append(column)
        elif column.key is None:
            others.append(column)
        else:
            of_plugins.append(column)
    columns = [*accuracies, *others, *of_plugins]
    rows = [[str(record.round), *(_number(column, record) for column in columns)] for record in run.rounds]
    spent = duration(sum(record.seconds for record in run.rounds))
    name = f"Every round in numbers: {counted(len(run.rounds), 'round')} in {spent}"
    refused_in = sum(bool(record.refused) for record in run.rounds)
    if refused_in:
        name += f", updates refused in {refused_in}"
    return Table(name, ["round", *(column.page for column in columns)], rows)


def _number(column: Column, record: RoundRecord) -> str:
    """A number of a round; a dash where nothing was measured, or nothing finite."""
    value = column.value_in(record)
    if value is None or not math.isfinite(value):
        return bare_percent(None)
    return bare_percent(value) if column.kind == "share" else figure(value)


def _counts(run: RunFiles) -> Table:
    rows = [
        [f"client {client}", *(f"{count:,}" for count in (*row, sum(row)))]
        for client, row in enumerate(run.class_counts)
    ]
    return Table("Training examples per client and class", ["client", *run.class_names, "all"], rows)


# --- calfat attack ----------------------------------------------------------------------------------------------------


def attacks_view(attacks: Mapping[str, Mapping[str, Any]], figures: Path) -> list[dict[str, Any]]:
    """What the page shows of each results file."""
    return [
        {
            "name": name,
            "checkpoint": Path(str(content.get("checkpoint"))).stem,
            "round": content.get("round"),
            "selected_on": content.get("selected_on"),
            "table": evaluations_table(f"Attacks of {name}", content["evaluations"]),
            "figures": drawn([eps_chart(f"attacks_{Path(name).stem}", content["evaluations"], name)], figures),
        }
        for name, content in attacks.items()
    ]


# --- the verdict of calfat trust --------------------------------------------------------------------------------------


def trust_view(content: Mapping[str, Any], figures: Path, strips: Sequence[Strip] = ()) -> dict[str, Any] | None:
    """What the page shows of ``trust.json``; None where the battery has not run."""
    if not content:
        return None
    verdict = content["verdict"]
    return {
        "verdict": verdict["text"],
        "sentence": verdict["sentence"],
        "also": verdict["causes"][1:],
        "checkpoint": Path(str(content.get("checkpoint"))).stem,
        "round": content.get("round"),
        "examples": counted(content["examples"], "test image"),
        "finished": content["finished"],
        "table": trust_table(content),
        "figures": drawn([_curve(content)], figures),
        "strips": strips,
    }


def _curve(content: Mapping[str, Any]) -> Chart | None:
    """The attack on trial at every budget; None where there is one alone."""
    natural, norm = content["verdict"].get("natural"), content["threat"]["norm"]
    tried = [row for check in content["checks"] for row in check["rows"] if row["attack"] == content["attack"]]
    if natural is None:
        return None
    clean = {"label": NATURAL, "accuracy": natural, "settings": {}, "num_examples": content["examples"]}
    attacked = [
        {"label": row["attack"], "accuracy": row["accuracy"], "settings": {"norm": norm, "eps": row["eps"]}}
        for row in sorted(tried, key=lambda row: parse_number(row["eps"]))
    ]
    return eps_chart("trust_curve", [clean, *attacked], "an honest one falls to 0")
