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
from calfat_plugin.report.images import Strip, read_strips
from calfat_plugin.report.numbers import (
    NO_NUMBER,
    NOTHING,
    bare_percent,
    counted,
    duration,
    figure,
    listing,
    unbroken_percent,
)
from calfat_plugin.report.page import alarms_of, citations, environment, render_page, some
from calfat_plugin.report.run_tables import (
    evaluation_of,
    evaluations_table,
    figures_of,
    groups_table,
    ranges,
    shows_release,
    spending,
    tails_table,
    trust_table,
    with_groups,
    worst_table,
)
from calfat_plugin.report.table import Table
from calfat_plugin.results import EVIDENCE, NATURAL, EvaluationResult
from calfat_plugin.run_files import AttackResults, TrustResults
from calfat_plugin.stored_run import Run


def run_page(run: Run, figures: Path) -> str:
    """HTML of one run's page; its figures are also written to ``figures``."""
    facts = labels.highlights(run)
    with suppress(RecipeError):  # the run may name a backend that is not there any more
        if runtime_of(run.experiment).is_unprotected:
            facts["security"] = UNPROTECTED
    progress = ""
    if not run.finished:
        progress = f"{len(run.records)} of {counted(run.experiment.num_rounds, 'round')}"
    final_charts = (learning_curves(run), final_per_class(run))
    client_charts = (label_distribution(run), heterogeneity(run), losses(run))
    trust_strips = read_strips([run.directory], run.class_names, f"trust.{EVIDENCE}")
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
                measured=_how_measured(run),
                figures=drawn(final_charts, figures),
                rounds=_rounds(run),
            ),
            "clients": some(figures=drawn(client_charts, figures), groups=groups_table(run), counts=_class_counts(run)),
            "images": some(strips=read_strips([run.directory], run.class_names)),
            "attacks": attacks_view(run.attacks, figures),
            "trust": trust_view(run.trust, figures, trust_strips),
            "time": [] if run.spending is None else spending(run.spending),
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
    tiles = []
    if run.evaluations:
        most = max(evaluation.num_examples for evaluation in run.evaluations)
        for evaluation in run.evaluations:
            number, text = NO_NUMBER, evaluation.label
            if evaluation.accuracy is not None:
                number = unbroken_percent(evaluation.accuracy)
            if 0 < evaluation.num_examples < most:
                text += f", {evaluation.num_examples:,} of {most:,} images"
            tiles.append((number, text))
        return tiles
    for label in run.monitored:
        last_round, accuracy = run.curve(label)[-1]
        text = f"{label}, round {last_round}, {run.experiment.data.monitored_split} split"
        tiles.append((unbroken_percent(accuracy), text))
    return tiles


def final_tables(run: Run) -> list[Table]:
    """The final evaluation, measured beside reported, and its worst classes and clients."""
    if run.final is None or not run.evaluations:
        return []
    reported = run.experiment.reported.percent
    published = {label: number for label, number in reported.items() if label in run.results}
    notes = [_accuracy_note(run, published), _best_rounds_note(run)]
    attackers = ranges(run.partition.attackers)
    return [
        evaluations_table("Final evaluation", run.evaluations, published, notes=list(filter(None, notes))),
        worst_table(run.evaluations, run.class_names, with_groups(run), attackers),
        tails_table(run.evaluations, run.class_names),
    ]


def _accuracy_note(run: Run, published: Mapping[str, float]) -> str:
    """What the accuracies of the final evaluation are, and what they are compared with."""
    model = "Global model"
    if run.experiment.ema is not None:
        model = "Moving average of the global models"
    last = "the final round"
    if run.stopped_early is not None:
        last = f"round {run.stopped_early.round}, where training stopped early"
    by_release, measured = "and gives the same numbers here", "accuracy"
    if shows_release(run.evaluations):
        by_release, measured = "and is beside it", "release"
    note = (
        f"{model} after {last}. Accuracy counts an example that is classified correctly both clean and "
        "under attack; the convention of the release leaves the clean image out of account, as CalFAT's authors and "
        f"the paper's tables do, {by_release}. "
        "The interval (Wilson's) is over the test examples; another seed may lie outside."
    )
    if published:
        source = run.experiment.reported.source or "as the recipe says"
        note += f" Reported: {source}; difference: {measured} minus reported, in percentage points."
    return note


def _best_rounds_note(run: Run) -> str:
    """The rounds of the best checkpoints; empty where nothing was monitored."""
    if run.final is None:
        return ""
    selected_on, best_rounds = ", selected on the test split and so no fair result", run.final.test_selected
    if run.final.validation_selected is not None:
        selected_on, best_rounds = " on the validation split", run.final.validation_selected
    if not best_rounds:
        return ""
    texts = []
    for best in best_rounds.values():
        texts.append(f"{best.evaluator} {unbroken_percent(best.accuracy)} in round {best.round}")
    return f"Best rounds{selected_on}: {listing(texts)}."


def _how_measured(run: Run) -> dict[str, str]:
    """For each evaluator its figures beside accuracy, its settings, and its implementation."""
    texts = {}
    for label, evaluation in run.results.items():
        settings = [f"{key} {yaml_text(value)}" for key, value in evaluation.settings.items() if value is not None]
        parts = [figures_of(evaluation), ", ".join(settings)]
        if evaluation.implementation:
            parts.append(f"by {evaluation.implementation}")
        texts[label] = "; ".join(filter(None, parts))
    return texts


def _rounds(run: Run) -> Table:
    """The columns of ``rounds.csv`` that are for pages, accuracies first and those of plugins last."""
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
    rows = []
    for record in run.records:
        row = [str(record.round)]
        for column in columns:
            value = column.value_in(record)
            if value is None or not math.isfinite(value):
                row.append(NOTHING)
            elif column.kind == "share":
                row.append(bare_percent(value))
            else:
                row.append(figure(value))
        rows.append(row)
    spent = duration(sum(record.seconds for record in run.records))
    name = f"Every round in numbers: {counted(len(run.records), 'round')} in {spent}"
    rounds_with_refusals = sum(bool(record.refused) for record in run.records)
    if rounds_with_refusals:
        name += f", updates refused in {rounds_with_refusals}"
    return Table(name, ["round", *(column.page for column in columns)], rows)


def _class_counts(run: Run) -> Table:
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
    """Accuracy under the attack on trial over eps; None for a single eps."""
    natural, examples = results.verdict.natural, results.examples
    if natural is None:
        return None
    evaluations = [EvaluationResult(NATURAL, examples, natural, natural, (), (), {}, "calfat trust", 0.0)]
    rows = []
    for check in results.checks:
        rows += [row for row in check.rows if row.attack == results.attack]
    for row in sorted(rows, key=lambda row: parse_number(row.eps)):
        evaluations.append(evaluation_of(row, row.attack, results.threat.norm))
    return eps_chart("trust_curve", evaluations, "an honest one falls to 0")
