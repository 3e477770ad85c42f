"""A test that needs a browser: ``test_setup.py`` runs it where there is none."""

from __future__ import annotations

import pytest


@pytest.mark.needs("chromium")
def test_open() -> None:
    """Does nothing with the browser."""
