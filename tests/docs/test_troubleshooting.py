"""docs/troubleshooting.md: every message that it quotes is one of the package's."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import text_of
from tests.docs.sources import HOLE, texts

QUOTED = re.findall(r"^### `(.+)`$", text_of("troubleshooting.md"), re.MULTILINE)


def test_there_is_something_to_check() -> None:
    assert len(QUOTED) >= 60
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_the_source_has_it(message: str) -> None:
    """With an ellipsis where the source fills in a value, or at the end for what follows."""
    words = message.removesuffix(HOLE).rstrip()
    assert len(words) > 12
    assert any(words in text for text in texts()), message
