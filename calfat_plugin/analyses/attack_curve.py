"""Accuracy over eps, one line an attack, as PNG and SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from calfat_plugin.report.attacks import eps_chart
from calfat_plugin.report.canvas import render
from calfat_plugin.results import EvaluationResult


def draw(results: Sequence[EvaluationResult], beside: Path) -> tuple[Path, ...]:
    """Draw the strict accuracy of every attack over eps, from the natural accuracy at eps 0 on.

    Args:
        results: a sweep; those without an eps give the value at 0.
        beside: the results file; the figures get its name.

    Returns:
        The files written; none for a single eps.
    """
    chart = eps_chart(beside.stem, [dataclasses.asdict(result) for result in results])
    if chart is None:
        return ()
    render(chart, beside.parent)
    return tuple(beside.with_suffix(ending) for ending in (".svg", ".png"))
