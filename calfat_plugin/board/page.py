"""``calfat board page``: one static page, a table a track, its rows by best-known worst case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from calfat_plugin.board.entry import Entry, read_entry
from calfat_plugin.board.standing import Standing, standing
from calfat_plugin.board.tracks import Board, Track
from calfat_plugin.board.verify import digests_of
from calfat_plugin.disk import TRY_AGAIN, read_json, write_text
from calfat_plugin.errors import CalfatError
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.page import render_page
from calfat_plugin.report.scores import score_cell
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.report.write import refuse_no_page

FILE = "index.html"
_COLUMNS = {
    "worst": "worst case %",
    "natural": "natural %",
    "worst_class": "worst class %",
    "worst_clients": "worst clients %",
    "passes": "passes",
}

_NOTE = (
    "Accuracies in percent: means ± standard deviation over seeds, with Student's 95 % interval. Worst case, the best "
    "known: images that withstand the entry's own attacks and all challenges together; worst class and worst clients "
    "are of the same images. A stronger attack may lower every number: calfat board challenge. Passes: how often a "
    "training image went forward through the network, as clients count. Verified: what calfat board verify last found "
    "in this folder. Verdict: what calfat trust said to the entrant, of each seed."
)


def write_page(board: Board, out: Path | None = None) -> Path:
    """Write the page."""
    path = out or board.path / FILE
    refuse_no_page(path)
    tables: dict[str, Table] = {}
    alarms = []
    for name, track in board.tracks.items():
        rows: list[tuple[float, str, Row]] = []
        for entry in (entry for of_track, entry in board.entries() if of_track == name):
            try:
                read = read_entry(board, name, entry)
                found = standing(read)
                rows.append((found.score("worst").mean or 0.0, entry, _row(board, found, read)))
            except CalfatError as error:
                alarms.append({"whose": f"{name}/{entry}", "code": "no entry", "text": str(error)})
        rows.sort(key=lambda row: -row[0])
        records = {entry: read_json(board.record(name, entry)) for _, entry, _ in rows}
        against = [f"{entry}: {why}" for entry, record in records.items() for why in record.get("reasons") or ()]
        head = ["entry", *_COLUMNS.values(), "verified", "seeds", "verdict"]
        tables[name] = Table(track.title or name, head, [row for *_, row in rows], notes=[_NOTE, *against])
    entries = sum(len(table.rows) for table in tables.values())
    page = render_page(
        "page.html",
        title=board.title,
        lead=f"{counted(len(tables), 'track')}, {entries} {'entry' if entries == 1 else 'entries'}",
        alarms=alarms,
        figures="",
        headings={name: table.name for name, table in tables.items()},
        plain=dict.fromkeys(tables, "track"),
        sections={name: {"table": table, "about": _about(board.tracks[name])} for name, table in tables.items()},
    )
    write_text(path, page, TRY_AGAIN)
    return path


def _about(track: Track) -> dict[str, str]:
    seeds = f"{track.at_least} or more of the entrant's choice" if track.seeds is None else str(list(track.seeds))
    passes = "any number" if track.passes is None else f"{track.passes:,.0f} at most"
    shown = {key: value for key, value in track.recipe.items() if not isinstance(value, list | Mapping)}
    facts = {key.rpartition(".")[2]: str(value) for key, value in shown.items() if value is not None}
    return {"seeds": seeds, "passes": passes, **facts}


def _row(board: Board, found: Standing, entry: Entry) -> Row:
    cells = {field: score_cell(found.score(field)) for field in _COLUMNS}
    worst, passes = cells["worst"], found.score("passes").mean
    challengers = [f"{name} ({counted(images, 'image')})" for name, images in found.challengers.items()]
    lowered = [f"lowered by {listing(challengers)}"] if challengers else []
    cells["worst"] = worst._replace(best=True, beside=[*worst.beside, *lowered])
    cells["passes"] = Cell("" if passes is None else f"{passes:,.0f}")
    trainer = entry.recipe(entry.seeds[0]).get(("calfat", "trainer"))
    method = trainer.get("name") if isinstance(trainer, Mapping) else trainer
    return [
        Cell(entry.name, beside=[f"{method}, by {entry.by}"]),
        *cells.values(),
        _verified(board, entry),
        ", ".join(map(str, entry.seeds)),
        listing(list(dict.fromkeys(each.verdict for each in found.by_seed.values()))),
    ]


def _verified(board: Board, entry: Entry) -> Cell:
    """Yes, no or not yet, and why: what ``verify`` last found in this folder."""
    record = read_json(board.record(entry.track, entry.name))
    if not record:
        return Cell("not yet")
    if record.get("digests") != digests_of(entry):
        return Cell("not yet", beside=["it has changed since"])
    at = f"at {str(record.get('revision'))[:12]}"
    return Cell("yes", beside=[at]) if record.get("stands") else Cell(f"no, {at}", beyond=True)
