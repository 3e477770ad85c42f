"""What ``calfat trust`` found: the verdict, a table, a curve over the budget and a bar for each attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.maths.intervals import of_accuracy
from calfat_plugin.report import theme, words
from calfat_plugin.report.analyses import eps_chart
from calfat_plugin.report.canvas import Chart, render
from calfat_plugin.report.numbers import NOTHING, bare_percent, counted, interval
from calfat_plugin.report.reading import NATURAL
from calfat_plugin.threat import parse_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def trust_view(content: Mapping[str, Any], figures: Path) -> dict[str, Any] | None:
    """What the page shows of ``trust.json``; None where the battery has not run.

    Args:
        content: of the file.
        figures: an existing folder.
    """
    if not content:
        return None
    verdict = content["verdict"]
    charts = (_curve(content), _bars(content))
    return {
        "verdict": verdict["text"],
        "sentence": verdict["sentence"],
        "also": verdict["causes"][1:],
        "checkpoint": Path(str(content.get("checkpoint"))).stem,
        "round": content.get("round"),
        "examples": counted(content["examples"], "test image"),
        "finished": content["finished"],
        "rows": list(_rows(content)),
        "figures": [render(chart, figures) for chart in charts if chart is not None],
    }


def _rows(content: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Check and attack, its budget, and its numbers."""
    for check in content["checks"]:
        for row in check["rows"]:
            budget = words.budget({"norm": content["threat"]["norm"], "eps": row["eps"]})
            found = of_accuracy((row["accuracy"],), row["examples"])
            numbers = [
                bare_percent(row["accuracy"]),
                NOTHING if found is None else interval(*found),
                bare_percent(row.get("left")),
                f"{row['examples']:,}",
                f"{row['seconds']:.1f}",
            ]
            yield f"{check['check']}: {row['attack']}", budget, numbers


def _curve(content: Mapping[str, Any]) -> Chart | None:
    """The attack on trial at every budget; None where there is one alone."""
    natural, norm = content["verdict"].get("natural"), content["threat"]["norm"]
    points = [row for row in _attacks(content) if row["attack"] == content["attack"]]
    if natural is None:
        return None
    clean = {"label": NATURAL, "accuracy": natural, "settings": {}, "num_examples": content["examples"]}
    attacked = [
        {"label": row["attack"], "accuracy": row["accuracy"], "settings": {"norm": norm, "eps": row["eps"]}}
        for row in sorted(points, key=lambda row: parse_number(row["eps"]))
    ]
    return eps_chart("trust_curve", [clean, *attacked], "an honest one falls to 0")


def _bars(content: Mapping[str, Any]) -> Chart | None:
    """What each attack at the budget leaves alone, and all of them together; None where there is none."""
    rows = [row for row in _attacks(content) if row.get("left") is not None]
    if not rows:
        return None
    usable = content["verdict"].get("usable", True)
    together = "all together" if usable else "all together (no usable number)"
    bars = [*((row["attack"], row["accuracy"]) for row in rows), (together, rows[-1]["left"])]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        lengths = [100 * accuracy for _, accuracy in bars]
        colours = [theme.series(0)] * len(rows) + [theme.series(1)]
        drawn = axes.barh(range(len(bars)), lengths, 0.7, color=colours)
        axes.bar_label(drawn, [f"{length:.1f}" for length in lengths], padding=3, fontsize=8, color=theme.MUTED.light)
        axes.set_yticks(range(len(bars)), [attack for attack, _ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 112)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("accuracy (%)")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)

    budget = words.budget(content["threat"])
    caption = f"{budget}: right clean and under the attack; the last bar under all of them."
    if not usable:
        caption += " The model hides from attacks: the last bar is an upper bound, and no usable number."
    return Chart("trust_attacks", "Accuracy under each attack", caption, 0.8 + 0.24 * len(bars), draw)


def _attacks(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [row for check in content["checks"] for row in check["rows"]]
