"""Figures of the studies are drawn from committed records, and compared with the committed files."""

from __future__ import annotations

import math
import re
from pathlib import Path

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_NAME_BY_HASH = re.compile(r"(?<=[\"#])([mp])[0-9a-f]{10}(?=[\")])")  # of a shape; all digits of its numbers are hashed


def check_figure(committed: Path, drawn: Path) -> None:
    """That a committed figure is what was drawn, to a hundredth of a point: processors round differently."""
    texts = [_NAME_BY_HASH.sub(r"\1", file.read_text(encoding="utf-8")) for file in (committed, drawn)]
    known, found = map(_NUMBER.split, texts)
    assert known == found, f"draw {committed} anew"
    pairs = zip(*(map(float, _NUMBER.findall(text)) for text in texts), strict=True)
    assert all(math.isclose(one, other, abs_tol=0.01) for one, other in pairs), f"draw {committed} anew"
