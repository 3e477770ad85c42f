"""What a run leaves behind, but for what no two processes have alike."""

from __future__ import annotations

import json
from pathlib import Path

from calfat_plugin.rounds_csv import COST_COLUMNS, read_rounds


def rows(run: Path) -> list[dict[str, str]]:
    """The rows of a run, timings aside."""
    return [{k: v for k, v in row.items() if k not in COST_COLUMNS} for row in read_rounds(run / "rounds.csv")]


def everything(run: Path) -> dict[str, object]:
    """What a run leaves behind, file by file, but for times and what says which process wrote it."""
    found: dict[str, object] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if path.suffix == ".safetensors":
            found[name] = path.read_bytes()
        elif name == "rounds.csv":
            found[name] = rows(run)
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
