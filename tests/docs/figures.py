"""Figures of the documentation are drawn from committed records, and compared with the committed files."""

from __future__ import annotations

import math
import re
from pathlib import Path

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_NAME_BY_HASH = re.compile(r"(?<=[\"#])([mp])[0-9a-f]{10}(?=[\")])")  # of a shape; all digits of its numbers are hashed


def check_figure(page: Path, name: str, drawn: str, *, update: bool) -> None:
    """That a page shows the file, and that it is what was drawn; or write it.

    To a hundredth of a point: a processor's rounding may show in the last digits of an SVG.
    """
    (shown,) = re.findall(rf"\]\(([\w/]*images/{re.escape(name)})\)", page.read_text(encoding="utf-8"))
    file = page.parent / shown
    if update:
        file.write_text(drawn, encoding="utf-8")
    texts = [_NAME_BY_HASH.sub(r"\1", each) for each in (file.read_text(encoding="utf-8"), drawn)]
    committed, found = map(_NUMBER.split, texts)
    assert committed == found, "pytest with --update-snapshots draws the figures anew"
    pairs = zip(*map(_NUMBER.findall, texts), strict=True)
    assert all(math.isclose(float(one), float(other), rel_tol=0, abs_tol=0.01) for one, other in pairs)
