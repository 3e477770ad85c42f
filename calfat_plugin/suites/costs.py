"""What the runs that are left will cost: from rounds that were measured, else from a figure in the suite file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calfat_plugin.report.reading import read_results
from calfat_plugin.rounds_csv import read_rounds
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import PlannedRun
from calfat_plugin.suites.plan import Plan


def seconds_left(plan: Plan) -> float | None:
    """What the selected cells' runs that are left will take one process, the choice runs included.

    Rounds are as dear as those of runs of the same cell, tried or chosen values alike; else as those of the suite.

    Returns:
        Seconds; None where no round was measured and the suite says nothing.
    """
    choosing = plan.choosing
    per_round = _rates((*choosing.runs, *plan.runs), plan.suite.seconds_per_round)
    costs = [per_round(run.cell.name, run.cell.tried != "") for run in (*choosing.left, *plan.left)]
    rounds = [_rounds_left(run) for run in (*choosing.left, *plan.left)]
    for cell in plan.cells:
        if cell.experiment is not None and cell.name in plan.waiting and cell.name in plan.selected:
            costs.append(per_round(cell.name, False))
            rounds.append(len(plan.seeds) * cell.experiment.num_rounds)
            costs.append(per_round(cell.name, True))
            rounds.append(plan.choices[cell.name].finals * cell.experiment.num_rounds)
    known = [cost * number for cost, number in zip(costs, rounds, strict=True) if cost is not None]
    return sum(known) if len(known) == len(costs) else None


def _rates(runs: Sequence[PlannedRun], figure: float | None) -> Callable[[str, bool], float | None]:
    """Seconds of a round by the cell's name and whether it is of a choice run, which skips the final evaluation."""
    known = [(run.cell.name, run.cell.tried != "", rate) for run in runs if (rate := _rate(run)) is not None]

    def per_round(cell: str, choosing: bool) -> float | None:
        wanted: tuple[Callable[[str, bool], bool], ...] = (
            lambda name, kind: name == cell and kind == choosing,
            lambda name, kind: kind == choosing,
            lambda name, kind: True,
        )
        for fits in wanted:
            rates = [rate for name, kind, rate in known if fits(name, kind)]
            if rates:
                return sum(rates) / len(rates)
        return figure

    return per_round


def _rate(run: PlannedRun) -> float | None:
    """Seconds of a round of this run, with its share of the final evaluation where that is done."""
    directory = RunDirectory(run.directory)
    if run.recorded is not None:
        return None  # of another machine
    if run.state == "finished":
        return float(read_results(directory.results).get("seconds") or 0) / run.experiment.num_rounds
    rows = read_rounds(directory.rounds)
    return sum(float(row["seconds"]) for row in rows) / len(rows) if rows else None


def _rounds_left(run: PlannedRun) -> int:
    done = len(read_rounds(RunDirectory(run.directory).rounds)) if run.state == "unfinished" else 0
    return max(0, run.experiment.num_rounds - done)
