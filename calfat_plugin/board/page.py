"""``calfat board page``: one static page, a table a track, its rows by best-known worst case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calfat_plugin.board.entry import Entry, read_entry
from calfat_plugin.board.standing import Standing, standing
from calfat_plugin.board.tracks import Board, Track
from calfat_plugin.board.verify import digests_of
from calfat_plugin.disk import read_json, write_text
from calfat_plugin.errors import CalfatError
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import NOTHING, counted, score_texts
from calfat_plugin.report.page import render_page

FILE = "index.html"
_COLUMNS = {
    "worst": "worst case %",
    "natural": "natural %",
    "worst_class": "worst class %",
    "worst_clients": "worst clients %",
    "passes": "passes",
}

_NOTE = (
    "Accuracies in percent: means over seeds, with Student's 95 % interval. Worst case, the best known: images that "
    "withstand the entry's own attacks and all challenges together; worst class and worst clients are of the same "
    "images. A stronger attack may lower every number: calfat board challenge. Passes: how often a training image went "
    "forward through the network, as clients count. Verified: what calfat board verify last "
    "found in this folder. Verdict: what calfat trust said to the entrant, of each seed."
)


def write_page(board: Board, out: Path | None = None) -> Path:
    """Write the page."""
    tracks, alarms = [], []
    for name, track in board.tracks.items():
        rows = []
        for of_track, entry in board.entries():
            if of_track != name:
                continue
            try:
                read = read_entry(board, name, entry)
                rows.append((standing(read), read))
            except CalfatError as error:
                alarms.append({"whose": f"{name}/{entry}", "code": "no entry", "text": str(error)})
        rows.sort(key=lambda row: -(row[0].score("worst").mean or 0.0))
        tracks.append(
            {
                "anchor": name,
                "heading": track.title or name,
                "about": _about(track),
                "columns": list(_COLUMNS.values()),
                "rows": [_row(board, found, entry) for found, entry in rows],
                "reasons": [reason for _, entry in rows for reason in _reasons(board, entry)],
                "note": _NOTE,
            }
        )
    entries = sum(len(each["rows"]) for each in tracks)
    page = render_page(
        "page.html",
        title=board.title,
        lead=f"{counted(len(tracks), 'track')}, {entries} {'entry' if entries == 1 else 'entries'}",
        alarms=alarms,
        figures="",
        headings={each["anchor"]: each["heading"] for each in tracks},
        plain={each["anchor"]: "track" for each in tracks},
        sections={each["anchor"]: each for each in tracks},
    )
    path = out or board.path / FILE
    write_text(path, page)
    return path


def _about(track: Track) -> dict[str, str]:
    seeds = f"{track.at_least} or more of the entrant's choice" if track.seeds is None else str(list(track.seeds))
    passes = "any number" if track.passes is None else f"{track.passes:,.0f} at most"
    shown = {key: value for key, value in track.recipe.items() if not isinstance(value, list | Mapping)}
    facts = {key.rpartition(".")[2]: str(value) for key, value in shown.items() if value is not None}
    return {"seeds": seeds, "passes": passes, **facts}


def _row(board: Board, found: Standing, entry: Entry) -> dict[str, Any]:
    scores = {field: found.score(field) for field in _COLUMNS}
    texts = {field: score_texts(score) for field, score in scores.items()}
    numbers = [(each.mean or NOTHING, each.interval) for field, each in texts.items() if field != "passes"]
    passes = scores["passes"].mean
    numbers.append((NOTHING if passes is None else f"{passes:,.0f}", ""))
    trainer = entry.recipe(entry.seeds[0]).get(("calfat", "trainer"))
    method = trainer.get("name") if isinstance(trainer, Mapping) else trainer
    challengers = [f"{name} ({counted(images, 'image')})" for name, images in found.challengers.items()]
    return {
        "name": entry.name,
        "beside": f"{method}, by {entry.by}",
        "numbers": numbers,
        "seeds": ", ".join(map(str, entry.seeds)),
        "trust": listing(list(dict.fromkeys(each.verdict for each in found.by_seed.values()))),
        "verified": _verified(board, entry),
        "challengers": f"lowered by {listing(challengers)}" if challengers else "",
    }


def _verified(board: Board, entry: Entry) -> tuple[str, str]:
    """(yes, no or not yet; why) of what ``verify`` last found in this folder."""
    record = read_json(board.record(entry.track, entry.name))
    if not record:
        return "not yet", ""
    if record.get("digests") != digests_of(entry):
        return "not yet", "it has changed since"
    at = f"at {str(record.get('revision'))[:12]}"
    return ("yes" if record.get("stands") else "no"), at


def _reasons(board: Board, entry: Entry) -> list[dict[str, str]]:
    """What the last verification has against an entry."""
    reasons = read_json(board.record(entry.track, entry.name)).get("reasons") or ()
    return [{"entry": entry.name, "why": str(why)} for why in reasons]
