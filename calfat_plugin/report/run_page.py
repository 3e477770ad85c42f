"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calfat_plugin.loggers.public import public_recipe_text
from calfat_plugin.report import parts, words
from calfat_plugin.report.attacks import attacks_section
from calfat_plugin.report.bars import final_per_class, label_distribution
from calfat_plugin.report.canvas import Chart, render
from calfat_plugin.report.curves import heterogeneity, learning_curves, losses
from calfat_plugin.report.groups import reported_of
from calfat_plugin.report.markup import Markup, details, element, facts, joined, section, table
from calfat_plugin.report.protocol_view import per_class_section
from calfat_plugin.report.reading import RunFiles
from calfat_plugin.report.scatter import tsne_chart
from calfat_plugin.report.words import bare_percent, points


def run_page(run: RunFiles, figures: Path) -> str:
    """HTML of one run's page; its figures are also written to ``figures``.

    Args:
        run: what to show; parts that the run does not have (yet) are left out.
        figures: an existing folder.
    """

    def drawn(*charts: Chart | None) -> Markup:
        return parts.figures_block(render(chart, figures) for chart in charts if chart is not None)

    return parts.page(
        title=run.name,
        lead=words.headline(run),
        head=[_tiles(run), _state(run), parts.alarms(parts.alarms_of(run))],
        parts=[
            section(
                "results", "Results", _results(run), drawn(learning_curves(run), final_per_class(run)), _rounds(run)
            ),
            section(
                "clients",
                "Clients",
                drawn(label_distribution(run), heterogeneity(run), losses(run)),
                _counts(run),
            ),
            attacks_section(run.attacks, figures),
            per_class_section(run.per_class, figures),
            section("features", "Features", drawn(tsne_chart(run.tsne))),
            section(
                "recipe",
                "What was run",
                facts(words.highlights(run)),
                _command(run),
                parts.recipe_details(public_recipe_text(run.recipe)),
            ),
            parts.environment(run),
            parts.citations([run]),
        ],
        figures=figures.name,
    )


def _tiles(run: RunFiles) -> Markup:
    """Natural accuracy and the accuracy under each attack, largest first what the eye should find."""
    tiles = [(words.percent(float(e["accuracy"])), str(e["label"])) for e in run.evaluations]
    if not tiles:
        last = [(label, run.curve(label)[-1]) for label in run.monitored]
        tiles = [(words.percent(value), f"{label}, round {number}") for label, (number, value) in last]
    if not tiles:
        return Markup()
    items = [
        element("li", element("span", value, class_="value"), element("span", what, class_="what"))
        for value, what in tiles
    ]
    return element("ul", *items, class_="tiles")


def _state(run: RunFiles) -> Markup:
    if run.finished:
        return Markup()
    done = len(run.rounds)
    text = f" {done} of {words.counted(run.num_rounds, 'round')} are done; the final evaluation is not there yet."
    return element("div", element("strong", "This run is not finished."), text, class_="unfinished", role="note")


def _results(run: RunFiles) -> Markup:
    if not run.evaluations:
        return Markup()
    published, source = reported_of(run)
    compares = any(evaluation["label"] in published for evaluation in run.evaluations)
    head = [
        "evaluator",
        "accuracy %",
        *(["reported %", "difference"] if compares else []),
        "strict %",
        "examples",
        "seconds",
    ]
    rows = []
    for evaluation in run.evaluations:
        accuracy, label = float(evaluation["accuracy"]), str(evaluation["label"])
        paper = published.get(label)
        beside = (
            [bare_percent(paper, 2), words.NOTHING if paper is None else points(accuracy - paper)] if compares else []
        )
        ball = words.budget(evaluation.get("settings") or {})
        name = joined([label, element("span", ball, class_="beside") if ball else Markup()])
        rows.append(
            [
                name,
                bare_percent(accuracy, 2),
                *beside,
                bare_percent(evaluation.get("accuracy_strict"), 2),
                f"{evaluation['num_examples']:,}",
                f"{float(evaluation['seconds']):.1f}",
            ]
        )
    notes = [
        "Global model after the final round. Accuracy counts an example whose final point is classified correctly, the "
        "convention of the paper's tables; strict also wants the clean image right."
    ]
    if compares:
        notes.append(f"Reported: {source or 'as the recipe says'}; differences in percentage points.")
    return element(
        "div",
        table(head, rows, caption="Final evaluation"),
        element("p", " ".join(notes), class_="note"),
        _selected(run),
        details("How each was measured", facts(map(_how, run.evaluations))),
    )


def _how(evaluation: Mapping[str, Any]) -> tuple[str, str]:
    """(evaluator, settings and implementation)."""
    made = words.settings_in_words(evaluation.get("settings") or {})
    by = f"by {evaluation['implementation']}" if evaluation.get("implementation") else ""
    return str(evaluation["label"]), "; ".join(filter(None, (made, by)))


def _selected(run: RunFiles) -> Markup:
    """The best rounds, marked for what they are."""
    found = [facts_ for facts_ in (run.results.get("test_selected") or {}).values() if "round" in facts_]
    if not found:
        return Markup()
    told = [f"{f['evaluator']} {words.percent(float(f['accuracy']))} in round {f['round']}" for f in found]
    return element(
        "p", f"Best rounds, selected on the test split and so no fair result: {words.listing(told)}.", class_="note"
    )


def _rounds(run: RunFiles) -> Markup:
    """Every round in numbers, folded away."""
    if not run.rounds:
        return Markup()
    columns = [column for column in (*run.monitored, "heterogeneity", "seconds") if run.curve(column)]
    refused = sum(1 for row in run.rounds if row.get("refused") is not None)
    rows = []
    for row in run.rounds:
        cells = [f"{int(row.get('round') or 0)}"]
        for column in columns:
            value = row.get(column)
            share = column in run.monitored
            cells.append(words.NOTHING if value is None else bare_percent(value, 2) if share else f"{value:.4g}")
        rows.append(cells)
    seconds = sum(value for _, value in run.curve("seconds"))
    total = f"{words.counted(len(rows), 'round')} in {words.duration(seconds)}"
    shown = [
        f"{column} %" if column in run.monitored else "s²" if column == "heterogeneity" else column
        for column in columns
    ]
    return element(
        "div",
        element("p", f"{total}{f', updates refused in {refused}' if refused else ''}.", class_="note"),
        details("Every round in numbers", table(["round", *shown], rows, caption="Rounds", numbers_from=1)),
    )


def _counts(run: RunFiles) -> Markup:
    """The label distribution in numbers, folded away."""
    counts = run.class_counts
    if not counts:
        return Markup()
    rows = [
        [f"client {client}", *(f"{count:,}" for count in row), f"{sum(row):,}"] for client, row in enumerate(counts)
    ]
    head = ["client", *run.class_names, "all"]
    return details("Counts in numbers", table(head, rows, caption="Training examples per client and class"))


def _command(run: RunFiles) -> Markup:
    line = words.command(run)
    return element("p", element("code", line)) if line else Markup()
