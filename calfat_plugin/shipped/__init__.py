"""The recipes that come with the package, found by name from any folder.

The files are those of the repository's ``recipes/``: here is a link to that folder, which becomes a copy in an sdist
and a wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

_RECIPES = Path(__file__).parent / "recipes"
_SENTENCE = re.compile(r".*?\.(?<! al\.)(?= |$)")  # "et al." does not end a sentence


def shipped_files() -> dict[str, Path]:
    """Name to file, sorted by name."""
    return {file.stem: file for file in sorted(_RECIPES.glob("*.yaml"))}


def located(path: str | Path) -> Path:
    """The file at ``path``; where there is none and ``path`` is the name of a shipped recipe, that one."""
    written = Path(path)
    shipped = shipped_files().get(str(path))
    if shipped is None:  # the system may refuse to look for a path, and reading it reports this
        return written
    if written.exists() and not written.is_dir():
        return written
    return shipped


def headline(file: Path) -> str:
    """The first sentence of the comment at the top of a recipe."""
    words: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.removeprefix("#").strip())
    comment = " ".join(words)
    sentence = _SENTENCE.match(comment)
    return sentence[0] if sentence else comment
