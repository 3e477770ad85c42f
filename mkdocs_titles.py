"""A hook of MkDocs: a link whose text is the name of a page's file shows the page's title instead.

In the repository file names are what a reader looks for; on the site pages have no such names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)(#[\w-]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """MkDocs calls it with the text of each page."""
    folder = Path(config["docs_dir"], page.file.src_uri).parent

    def titled(link: re.Match[str]) -> str:
        target = folder / link[1]
        text = target.read_text(encoding="utf-8") if target.is_file() else ""  # MkDocs reports a file that is missing
        heading = re.search(r"^# ([^:\n]*)", text, re.MULTILINE)
        return f"[{heading[1]}]({link[1]}{link[2] or ''})" if heading else link[0]

    return _LINK.sub(titled, markdown)
