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
    evaluation_of,
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
from calfat_plugin.report.table import Table
from calfat_plugin.results import EVIDENCE, NATURAL, EvaluationResult, RoundRecord
from calfat_plugin.rounds_csv import Column
from calfat_plugin.run_files import AttackResults, TrustResults
from calfat_plugin.stored_run import Run


def run_page(run: Run, figures: Path) -> str:
    """HTML of one run's page; its figures are also written to ``figures``."""
    facts = labels.highlights(run)
    with suppress(RecipeError):  # of a backend that is not there any more
        if runtime_of(run.experiment).is_unprotected:
            facts["security"] = UNPROTECTED
    of_clients = (label_distribution(run), heterogeneity(run), losses(run))
    progress = "" if run.finished else f"{len(run.records)} of {counted(run.experiment.num_rounds, 'round')}"
    trust_strips = read_strips([run.directory], run.class_names, f"trust.{EVIDENCE}")
    time = [] if run.spending is None else spending(run.spending)
    return render_page(
        "run.html",
        title=run.name,
        lead=labels.headline(run),
        tiles=_tiles(run),
        progress=progress,
        alarms=alarms_of(run),
        figures=figures.name,
        sections={
            "results": some(
                tables=final_tables(run),
                measured={label: _how(evaluation) for label, evaluation in run.results.items()},
                figures=drawn((learning_curves(run), final_per_class(run)), figures),
                rounds=_rounds(run),
            ),
            "clients": some(figures=drawn(of_clients, figures), groups=groups_table(run), counts=_counts(run)),
            "images": some(strips=read_strips([run.directory], run.class_names)),
            "attacks": attacks_view(run.attacks, figures),
            "trust": trust_view(run.trust, figures, trust_strips),
            "time": time,
            "recipe": {
                "facts": facts,
                "command": labels.command(run),
                "text": public_recipe_text(run.experiment.document.data),
            },
            "versions": environment(run),
            "citations": citations([run]),
        },
    )


def _tiles(run: Run) -> list[tuple[str, str]]:
    """(accuracy, evaluator) of the final model; without a final evaluation, of the last round that was monitored."""
    if run.evaluations:
        tiles = []
        most = max(evaluation.num_examples for evaluation in run.evaluations)
        for evaluation in run.evaluations:
            number, text = NO_NUMBER, evaluation.label
            if evaluation.accuracy is not None:
                number = unbroken_percent(evaluation.accuracy)
            if 0 < evaluation.num_examples < most:
                text += f", {evaluation.num_examples:,} of {most:,} images"
            tiles.append((number, text))
        return tiles
    last = [(label, run.curve(label)[-1]) for label in run.monitored]
    split = f"{run.experiment.data.monitored_split} split"
    return [(unbroken_percent(value), f"{label}, round {number}, {split}") for label, (number, value) in last]


def final_tables(run: Run) -> list[Table]:
    """The final evaluation, measured beside reported, and its worst classes and clients."""
    if run.final is None or not run.evaluations:
        return []
    reported = run.experiment.reported.percent
    published = {label: number for label, number in reported.items() if label in run.results}
    release = shows_release(run.evaluations)
    last = "the final round"
    if run.stopped_early is not None:
        last = f"round {run.stopped_early.round}, where training stopped early"
    evaluated = "Global model" if run.experiment.ema is None else "Moving average of the global models"
    note = (
        f"{evaluated} after {last}. Accuracy counts an example that is classified correctly both clean and "
        "under attack; the convention of the release leaves the clean image out of account, as CalFAT's authors and "
        f"the paper's tables do, {'and is beside it' if release else 'and gives the same numbers here'}. "
        "The interval (Wilson's) is over the test examples; another seed may lie outside."
    )
    if published:
        source = run.experiment.reported.source or "as the recipe says"
        measured = "release" if release else "accuracy"
        note += f" Reported: {source}; difference: {measured} minus reported, in percentage points."
    notes = [note]
    how, selected = ", selected on the test split and so no fair result", run.final.test_selected
    if run.final.validation_selected is not None:
        how, selected = " on the validation split", run.final.validation_selected
    if selected:
        best = []
        for of_best in selected.values():
            best.append(f"{of_best.evaluator} {unbroken_percent(of_best.accuracy)} in round {of_best.round}")
        notes.append(f"Best rounds{how}: {labels.listing(best)}.")
    attackers = ranges(run.partition.attackers)
    return [
        evaluations_table("Final evaluation", run.evaluations, published, notes=notes),
        worst_table(run.evaluations, run.class_names, with_groups(run), attackers),
        tails_table(run.evaluations, run.class_names),
    ]


def _how(evaluation: EvaluationResult) -> str:
    """Figures beside an accuracy, the evaluator's settings, and its implementation."""
    settings = [f"{key} {yaml_text(value)}" for key, value in evaluation.settings.items() if value is not None]
    by = f"by {evaluation.implementation}" if evaluation.implementation else ""
    return "; ".join(filter(None, (figures_of(evaluation), ", ".join(settings), by)))


def _rounds(run: Run) -> Table:
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
    rows = [[str(record.round), *(_number(column, record) for column in columns)] for record in run.records]
    spent = duration(sum(record.seconds for record in run.records))
    name = f"Every round in numbers: {counted(len(run.records), 'round')} in {spent}"
    refused_in = sum(bool(record.refused) for record in run.records)
    if refused_in:
        name += f", updates refused in {refused_in}"
    return Table(name, ["round", *(column.page for column in columns)], rows)


def _number(column: Column, record: RoundRecord) -> str:
    """A number of a round; a dash where nothing was measured, or nothing finite."""
    value = column.value_in(record)
    if value is None or not math.isfinite(value):
        return bare_percent(None)
    return bare_percent(value) if column.kind == "share" else figure(value)


def _counts(run: Run) -> Table:
    rows = []
    for client, counts in enumerate(run.partition.class_counts):
        rows.append([f"client {client}", *(f"{count:,}" for count in (*counts, sum(counts)))])
    return Table("Training examples per client and class", ["client", *run.class_names, "all"], rows)


# --- calfat attack ----------------------------------------------------------------------------------------------------


def attacks_view(attacks: Mapping[str, AttackResults], figures: Path) -> list[dict[str, Any]]:
    """What the page shows of each results file."""
    views = []
    for name, results in attacks.items():
        chart = eps_chart(f"attacks_{Path(name).stem}", results.evaluations, name)
        views.append(
            {
                "name": name,
                "checkpoint": Path(results.checkpoint).stem,
                "round": results.round,
                "selected_on": results.selected_on,
                "table": evaluations_table(f"Attacks of {name}", results.evaluations),
                "figures": drawn([chart], figures),
            }
        )
    return views


# --- the verdict of calfat trust --------------------------------------------------------------------------------------


def trust_view(results: TrustResults | None, figures: Path, strips: Sequence[Strip] = ()) -> dict[str, Any] | None:
    """What the page shows of ``trust.json``; None where the battery has not run."""
    if results is None:
        return None
    return {
        "verdict": results.verdict.text,
        "sentence": results.verdict.sentence,
        "also": results.verdict.causes[1:],
        "checkpoint": Path(results.checkpoint).stem,
        "round": results.round,
        "examples": counted(results.examples, "test image"),
        "finished": results.finished,
        "table": trust_table(results),
        "figures": drawn([_curve(results)], figures),
        "strips": strips,
    }


def _curve(results: TrustResults) -> Chart | None:
    """The attack on trial at every budget; None where there is one alone."""
    natural, examples = results.verdict.natural, results.examples
    if natural is None:
        return None
    tried = [row for check in results.checks for row in check.rows if row.attack == results.attack]
    clean = EvaluationResult(NATURAL, examples, natural, natural, (), (), {}, "calfat trust", 0.0)
    attacked = []
    for row in sorted(tried, key=lambda row: parse_number(row.eps)):
        attacked.append(evaluation_of(row, row.attack, results.threat.norm))
    return eps_chart("trust_curve", [clean, *attacked], "an honest one falls to 0")
