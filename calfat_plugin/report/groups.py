"""Groups of clients on the page of a run: who differs in what, and each group's last means."""

from __future__ import annotations

from collections.abc import Sequence

from calfat_plugin.recipe.clients import GROUPED, OTHERS
from calfat_plugin.report.labels import difference
from calfat_plugin.report.numbers import figure
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.stored_run import Run


def members(run: Run) -> dict[str, list[int]]:
    """Group to client ids, those of no group last; empty without groups, or where no file says who is in them."""
    groups = {name: list(ids) for name, ids in run.partition.groups.items()}
    grouped = {client for ids in groups.values() for client in ids}
    others = [client for client in range(run.experiment.num_clients) if client not in grouped]
    if groups and others:
        groups[OTHERS] = others
    return groups


def with_groups(run: Run) -> tuple[str, ...]:
    """What the page calls each client: ``3``, or ``3 (weak)`` in a group."""
    if not run.experiment.clients:
        return ()
    names = [str(client) for client in range(run.experiment.num_clients)]
    for group, ids in members(run).items():
        for client in ids:
            if group != OTHERS:
                names[client] = f"{client} ({group})"
    return tuple(names)


def groups_table(run: Run) -> Table:
    """What differs in each group, who is in it, and each mean of the last round that has one; empty without groups."""
    ids_of = members(run)
    groups = {group.name: group for group in run.experiment.clients}
    rows: list[Row] = []
    for name in run.experiment.group_names:
        if name == OTHERS and ids_of and name not in ids_of:
            continue
        heading, text = name, "as the recipe says"
        if name in groups:
            text = difference(groups[name], run.experiment)
            if groups[name].attacker is not None:
                heading = f"{name}, attackers"
        means = []
        for measured in GROUPED:
            curve = run.curve(f"group/{name}/{measured}")
            means.append(figure(curve[-1][1]) if curve else "")
        rows.append([Cell(heading, beside=[text]), ranges(ids_of.get(name, ())), *means])
    head = ["group", "clients", "loss", "update length", "cosine"]
    note = (
        "Means over a group's clients, of the last round in which any of them took part. Cosine: between a client's "
        "update and the coordinate-wise median of the round's."
    )
    return Table("Groups of clients", head, rows, notes=[note])


def ranges(ids: Sequence[int]) -> str:
    """Ascending ids as recipes write them: ``0-4, 7``."""
    ends: list[list[int]] = []  # first and last id of each range; a range of one has it alone
    for client in ids:
        if ends and client == ends[-1][-1] + 1:
            ends[-1][1:] = [client]
        else:
            ends.append([client])
    return ", ".join("-".join(map(str, both)) for both in ends)
