"""The recipes and suites that come with the package, found by name from any folder.

The files are those of the repository's ``recipes/`` and ``suites/``: here are links to the two folders, which become
copies in an sdist and a wheel.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Literal, get_args

Folder = Literal["recipes", "suites"]

_HERE = Path(__file__).parent
_SENTENCE = re.compile(r".*?\.(?<! al\.)(?= |$)")  # "et al." ends none


def shipped_files(*folders: Folder) -> dict[str, Path]:
    """Name to file, sorted in each folder; of both folders unless some are named. No two files share a name."""
    return {
        file.stem: file for folder in folders or get_args(Folder) for file in sorted((_HERE / folder).glob("*.yaml"))
    }


def located(path: str | Path) -> Path:
    """The file at ``path``; where there is none and ``path`` is the name of a shipped one, that one."""
    written, shipped = Path(path), shipped_files().get(str(path))
    return written if shipped is None or (written.exists() and not written.is_dir()) else shipped


def headline(file: Path) -> str:
    """The first sentence of the comment at the top of a recipe or a suite."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    sentence = _SENTENCE.match(comment)
    return sentence[0] if sentence else comment
