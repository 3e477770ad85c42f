"""Groups of clients on the page of a run: who differs in what, and each group's last means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calfat_plugin.recipe.clients import GROUPED, OTHERS
from calfat_plugin.report.labels import difference
from calfat_plugin.report.numbers import figure
from calfat_plugin.report.reading import RunFiles
from calfat_plugin.report.table import Cell, Row, Table


def members(run: RunFiles) -> dict[str, list[int]]:
    """Group to client ids, those of no group last; empty without groups, or where no file says who is in them."""
    found: Mapping[str, Sequence[int]] = run.partition.get("groups") or {}
    if not found:
        return {}
    grouped = {client for ids in found.values() for client in ids}
    others = [client for client in range(run.recipe.num_clients) if client not in grouped]
    return {**{name: list(ids) for name, ids in found.items()}, **({OTHERS: others} if others else {})}


def with_groups(run: RunFiles) -> tuple[str, ...]:
    """What the page calls each client: ``3``, or ``3 (weak)`` in a group."""
    whose = {client: name for name, ids in members(run).items() for client in ids if name != OTHERS}
    clients = range(run.recipe.num_clients if run.recipe.clients else 0)
    return tuple(f"{client} ({whose[client]})" if client in whose else str(client) for client in clients)


def groups_table(run: RunFiles) -> Table:
    """What differs in each group, who is in it, and each mean of the last round that has one; empty without groups."""
    who, of = members(run), {group.name: group for group in run.recipe.clients}
    rows: list[Row] = []
    for name in run.recipe.group_names:
        group, ids = of.get(name), who.get(name)
        if name == OTHERS and who and not ids:
            continue
        curves = [run.curve(f"group/{name}/{what}") for what in GROUPED]
        means = [figure(curve[-1][1]) if curve else "" for curve in curves]
        marked = f"{name}, attackers" if group is not None and group.attacker is not None else name
        text = "as the recipe says" if group is None else difference(group, run.recipe)
        rows.append([Cell(marked, beside=[text]), "" if ids is None else ranges(ids), *means])
    head = ["group", "clients", "loss", "update length", "cosine"]
    note = (
        "Means over a group's clients, of the last round in which any of them took part. Cosine: between a client's "
        "update and the coordinate-wise median of the round's."
    )
    return Table("Groups of clients", head, rows, notes=[note])


def ranges(ids: Sequence[int]) -> str:
    """Ascending ids as recipes write them: ``0-4, 7``."""
    found: list[list[int]] = []
    for client in ids:
        if found and client == found[-1][-1] + 1:
            found[-1][1:] = [client]
        else:
            found.append([client])
    return ", ".join("-".join(map(str, ends)) for ends in found)
