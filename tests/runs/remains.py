"""What a run leaves behind, but for what no two processes have alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from calfat_plugin.rounds import read_rounds
from calfat_plugin.rounds_csv import COST_COLUMNS
from calfat_plugin.typed_json import as_json


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a ``rounds.csv``, and what ``clients.csv`` has beside it, as text; none without a file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    of_clients = path.with_name("clients.csv")
    if of_clients.exists():
        by_round = {row["round"]: row for row in table}
        with of_clients.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                by_round[row["round"]][f"{row['column']}_{row['client']}"] = row["value"]
    return table


def rows(run: Path) -> list[dict[str, str]]:
    """The rows of a run, timings aside."""
    return [{k: v for k, v in row.items() if k not in COST_COLUMNS} for row in read_rows(run / "rounds.csv")]


def records(run: Path) -> list[dict[str, object]]:
    """The rounds of a run, timings aside."""
    found: list[dict[str, object]] = []
    for record in read_rounds(run / "rounds.jsonl"):
        content = as_json(record)
        for cost in COST_COLUMNS:
            del content[cost]
        for evaluation in content["evaluations"].values():
            del evaluation["seconds"]
        found.append(content)
    return found


def everything(run: Path) -> dict[str, object]:
    """What a run leaves behind, file by file, but for times and what says which process wrote it."""
    found: dict[str, object] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if path.suffix == ".safetensors":
            found[name] = path.read_bytes()
        elif name == "rounds.csv":
            found[name] = rows(run)
        elif name == "rounds.jsonl":
            found[name] = records(run)
        elif name == "recipe.yaml":
            found[name] = path.read_text()
        elif path.suffix == ".json":
            content = json.loads(path.read_text())
            for own in ("seconds", "command", "earlier"):
                content.pop(own, None)
            for evaluation in content.get("evaluations", ()):
                del evaluation["seconds"]
            found[name] = content
        else:
            found[name] = None  # log.txt: that it is there
    return found
