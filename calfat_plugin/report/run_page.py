"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from calfat_plugin.errors import RecipeError
from calfat_plugin.exact import parse_number
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.loggers.base import public_recipe_text
from calfat_plugin.maths.intervals import of_accuracy
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
from calfat_plugin.report.comparison import reported_of
from calfat_plugin.report.groups import groups_table, ranges, with_groups
from calfat_plugin.report.images import Strip, read_strips
from calfat_plugin.report.numbers import (
    NOTHING,
    bare_percent,
    counted,
    duration,
    interval,
    listed_ids,
    on_page,
    points,
    unbroken_percent,
)
from calfat_plugin.report.page import alarms_of, citations, environment, render_page, some
from calfat_plugin.report.profile_table import cells, spending
from calfat_plugin.report.reading import NATURAL, RunFiles
from calfat_plugin.results import EVIDENCE, FREQUENCY
from calfat_plugin.rounds_csv import Column, columns_of


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
                final=_final(run),
                figures=drawn((learning_curves(run), final_per_class(run)), figures),
                rounds=_rounds(run),
            ),
            "clients": some(
                figures=drawn(of_clients, figures),
                groups=groups_table(run),
                counts=_counts(run),
            ),
            "images": some(strips=read_strips([run.path], run.class_names)),
            "attacks": attacks_view(run.attacks, figures),
            "trust": trust_view(run.trust, figures, read_strips([run.path], run.class_names, f"trust.{EVIDENCE}")),
            "time": [
                (title, [("\N{NO-BREAK SPACE}" * 3 * row.depth + row.name, "", cells(row)) for row in rows])
                for title, rows in spending(run.profile)
            ],
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
        fewer = [f", {number:,} of {most:,} images" if number < most else "" for number in numbers]
        return [
            (unbroken_percent(float(evaluation["accuracy"])), f"{evaluation['label']}{images}")
            for evaluation, images in zip(run.evaluations, fewer, strict=True)
        ]
    last = [(label, run.curve(label)[-1]) for label in run.monitored]
    split = f"{run.recipe.data.monitored_split} split"
    return [(unbroken_percent(value), f"{label}, round {number}, {split}") for label, (number, value) in last]


def _final(run: RunFiles) -> dict[str, Any] | None:
    """The final evaluation, measured beside reported, and how each number was measured."""
    if not run.evaluations:
        return None
    published, source = reported_of(run)
    compares = any(evaluation["label"] in published for evaluation in run.evaluations)
    rows = []
    for evaluation in run.evaluations:
        paper = published.get(str(evaluation["label"]))
        release = evaluation.get("accuracy_release", evaluation["accuracy"])  # as the paper's tables count
        difference = NOTHING if paper is None else on_page(points(float(release) - paper))
        rows.append(evaluation_row(evaluation, [bare_percent(paper), difference] if compares else []))
    best = [
        f"{found['evaluator']} {unbroken_percent(float(found['accuracy']))} in round {found['round']}"
        for found in (run.results.get("validation_selected") or run.results.get("test_selected") or {}).values()
        if "round" in found
    ]
    return {
        "rows": rows,
        "reported": (source or "as the recipe says") if compares else "",
        "selected": labels.listing(best),
        "validated": "validation_selected" in run.results,
        "attackers": ranges(run.partition.get("attackers") or ()),
        "worst": _worst(run),
        "tails": _tails(run),
        "measured": {str(evaluation["label"]): _how(evaluation) for evaluation in run.evaluations},
    }


def _worst(run: RunFiles) -> list[tuple[str, str, list[str]]]:
    """Whom the final model fails: a row an evaluator; none where nothing is known of classes."""
    rows = []
    for evaluation in run.evaluations:
        found = {key: evaluation.get(key) for key in ("worst_class", "worst_clients")}
        numbers = [bare_percent(float(evaluation["accuracy"]))]
        for worst, names in zip(found.values(), (run.class_names, with_groups(run)), strict=True):
            numbers += [bare_percent(worst["accuracy"]), listed_ids(worst["ids"], names)] if worst else [NOTHING] * 2
        if any(found.values()):
            rows.append((str(evaluation["label"]), "", numbers))
    return rows


def _tails(run: RunFiles) -> list[tuple[str, str, list[str]]]:
    """The final model's accuracies of head, middle and tail, a row an evaluator; none without a long tail."""
    rows = []
    for evaluation in run.evaluations:
        found = [evaluation.get(part) for part in FREQUENCY]
        if any(found):
            numbers = [bare_percent(part["accuracy"]) if part else NOTHING for part in found]
            rows.append((str(evaluation["label"]), "", numbers))
    return rows


def _how(evaluation: Mapping[str, Any]) -> str:
    """Figures beside an accuracy, the evaluator's settings, and its implementation."""
    figures = ((name, value) for name, value in (evaluation.get("metrics") or {}).items() if value is not None)
    settings = (evaluation.get("settings") or {}).items()
    parts = (
        ", ".join(f"{name} {value:.4g}" for name, value in figures),
        ", ".join(f"{key} {labels.plain(value)}" for key, value in settings if value is not None),
        f"by {evaluation['implementation']}" if evaluation.get("implementation") else "",
    )
    return "; ".join(filter(None, parts))


def _rounds(run: RunFiles) -> dict[str, Any] | None:
    if not run.rounds:
        return None
    columns = [column for column in columns_of(run.monitored, metrics=run.metrics) if column.page]
    columns = [column for column in columns if run.curve(column.name)]
    columns.sort(key=lambda column: 0 if column.kind == "share" else 1 if column.key is None else 2)

    def shown(column: Column, value: float | None) -> str:
        return bare_percent(value) if value is None or column.kind == "share" else f"{value:.4g}"

    return {
        "total": counted(len(run.rounds), "round"),
        "duration": duration(sum(seconds for _, seconds in run.curve("seconds"))),
        "refused": run.refused,
        "head": ["round", *(column.page for column in columns)],
        "rows": [
            (f"{row.get('round') or 0:.0f}", "", [shown(column, row.get(column.name)) for column in columns])
            for row in run.rounds
        ],
    }


def _counts(run: RunFiles) -> dict[str, Any] | None:
    if not run.class_counts:
        return None
    rows = [
        (f"client {client}", "", [f"{count:,}" for count in (*row, sum(row))])
        for client, row in enumerate(run.class_counts)
    ]
    return {"head": ["client", *run.class_names, "all"], "rows": rows}


# --- calfat attack ----------------------------------------------------------------------------------------------------


def attacks_view(attacks: Mapping[str, Mapping[str, Any]], figures: Path) -> list[dict[str, Any]]:
    """What the page shows of each results file."""
    return [
        {
            "name": name,
            "checkpoint": Path(str(content.get("checkpoint"))).stem,
            "round": content.get("round"),
            "selected_on": content.get("selected_on"),
            "rows": list(map(evaluation_row, content["evaluations"])),
            "figures": drawn([eps_chart(f"attacks_{Path(name).stem}", content["evaluations"], name)], figures),
        }
        for name, content in attacks.items()
    ]


def evaluation_row(
    evaluation: Mapping[str, Any], reported: Iterable[str] = (), *, picked: bool = False
) -> tuple[str, str, list[str]]:
    """A row of a table of evaluations: (label, budget, numbers)."""
    number = evaluation.get("num_examples") or 0
    found = None if picked else of_accuracy((float(evaluation["accuracy"]),), number)
    numbers = [
        bare_percent(float(evaluation["accuracy"])),
        NOTHING if found is None else interval(*found),
        bare_percent(evaluation.get("accuracy_release")),
        *reported,
        f"{number:,}",
        f"{float(evaluation.get('seconds') or 0):.1f}",
    ]
    return str(evaluation["label"]), labels.budget(evaluation.get("settings") or {}), numbers


# --- the verdict of calfat trust --------------------------------------------------------------------------------------


def trust_view(content: Mapping[str, Any], figures: Path, strips: Sequence[Strip] = ()) -> dict[str, Any] | None:
    """What the page shows of ``trust.json``; None where the battery has not run."""
    if not content:
        return None
    verdict = content["verdict"]
    tried = [(check["check"], row) for check in content["checks"] for row in check["rows"]]
    rows = []
    for check, row in tried:
        evaluation = {
            "label": f"{check}: {row['attack']}",
            "accuracy": row["accuracy"],
            "accuracy_release": row.get("left"),  # this table has it in the place of that one
            "num_examples": row["examples"],
            "seconds": row["seconds"],
            "settings": {"norm": content["threat"]["norm"], "eps": row["eps"]},
        }
        rows.append(evaluation_row(evaluation, picked=_is_of_picked(row)))
    attacks = [row for _, row in tried]
    return {
        "verdict": verdict["text"],
        "sentence": verdict["sentence"],
        "also": verdict["causes"][1:],
        "checkpoint": Path(str(content.get("checkpoint"))).stem,
        "round": content.get("round"),
        "examples": counted(content["examples"], "test image"),
        "finished": content["finished"],
        "rows": rows,
        "figures": drawn([_curve(content, attacks)], figures),
        "strips": strips,
    }


def _curve(content: Mapping[str, Any], attacks: Sequence[Mapping[str, Any]]) -> Chart | None:
    """The attack on trial at every budget; None where there is one alone."""
    natural, norm = content["verdict"].get("natural"), content["threat"]["norm"]
    points = [row for row in attacks if row["attack"] == content["attack"]]
    if natural is None:
        return None
    clean = {"label": NATURAL, "accuracy": natural, "settings": {}, "num_examples": content["examples"]}
    attacked = [
        {"label": row["attack"], "accuracy": row["accuracy"], "settings": {"norm": norm, "eps": row["eps"]}}
        for row in sorted(points, key=lambda row: parse_number(row["eps"]))
    ]
    return eps_chart("trust_curve", [clean, *attacked], "an honest one falls to 0")


def _is_of_picked(row: Mapping[str, Any]) -> bool:
    """Whether the attack had only images that were picked for being near to an error."""
    return row.get("of") not in (None, row["examples"])
