"""What ``calfat attack`` found about a run's checkpoints, as tables and as accuracy over eps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.report import theme, words
from calfat_plugin.report.canvas import Chart, label, render
from calfat_plugin.report.numbers import bare_percent
from calfat_plugin.threat import parse_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LEVEL_TICKS = 7


def attacks_view(attacks: Mapping[str, Mapping[str, Any]], figures: Path) -> list[dict[str, Any]]:
    """What the page shows of each results file.

    Args:
        attacks: file name to content of ``attacks/*.json``.
        figures: an existing folder, for those with several eps.
    """
    shown = []
    for name, content in attacks.items():
        evaluations: Sequence[Mapping[str, Any]] = content.get("evaluations") or ()
        chart = eps_chart(f"attacks_{Path(name).stem}", evaluations, name)
        shown.append(
            {
                "name": name,
                "checkpoint": Path(str(content.get("checkpoint"))).stem,
                "round": content.get("round"),
                "selected_on": content.get("selected_on"),
                "rows": list(map(evaluation_row, evaluations)),
                "figures": [render(chart, figures)] if chart else [],
            }
        )
    return shown


def evaluation_row(evaluation: Mapping[str, Any], reported: Iterable[str] = ()) -> dict[str, Any]:
    """A row of a table of evaluations; ``reported``: cells beside the accuracy."""
    return {
        "label": str(evaluation["label"]),
        "budget": words.budget(evaluation.get("settings") or {}),
        "numbers": [
            bare_percent(float(evaluation["accuracy"])),
            *reported,
            bare_percent(evaluation.get("accuracy_strict")),
            f"{evaluation['num_examples']:,}",
            f"{float(evaluation['seconds']):.1f}",
        ],
    }


def eps_chart(name: str, evaluations: Sequence[Mapping[str, Any]], of: str = "") -> Chart | None:
    """The strict accuracy of every attack over eps, from the natural accuracy at eps 0 on; None for a single eps.

    Args:
        name: file name without ending.
        evaluations: as in a results file; those without an eps give the value at 0.
        of: whose they are, when there are several on a page.
    """
    attacked = [evaluation for evaluation in evaluations if "eps" in evaluation["settings"]]
    texts = list(dict.fromkeys(str(evaluation["settings"]["eps"]) for evaluation in attacked))
    if len(texts) < 2:
        return None
    natural = [float(e["accuracy_strict"]) for e in evaluations if "eps" not in e["settings"]]
    start = [(0.0, natural[0])] if natural and "0" not in texts else []
    ticks = ["0", *texts] if start else texts
    lines: dict[str, list[tuple[float, float]]] = {}
    for evaluation in attacked:
        line = lines.setdefault(str(evaluation["label"]), [*start])
        line.append((float(parse_number(evaluation["settings"]["eps"])), float(evaluation["accuracy_strict"])))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (attack, points) in enumerate(lines.items()):
            x, y = zip(*sorted(points), strict=True)
            heights = [100 * value for value in y]
            axes.plot(x, heights, label=label(attack), marker=theme.marker(index), **theme.line_style(index))
        axes.set_xticks([float(parse_number(text)) for text in ticks], ticks)
        if len(ticks) > _MOST_LEVEL_TICKS:
            axes.tick_params(axis="x", rotation=60)
        axes.set_xlabel(f"eps ({attacked[0]['settings']['norm']}, fraction of the pixel range)")
        axes.set_ylabel("accuracy, strict (%)")
        axes.set_ylim(0, 100)
        axes.grid(axis="y")

    title = "Accuracy under attack over eps" + (f", {of}" if of else "")
    caption = f"Clean and attacked image both classified correctly, {evaluations[0]['num_examples']} test examples."
    return Chart(name, title, caption, 3.4, draw)
